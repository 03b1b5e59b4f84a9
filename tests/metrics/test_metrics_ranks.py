"""What several ranks together tell, in whatever order their journals are read."""

from __future__ import annotations

import itertools

import pytest

from tests.metrics.reading import BRING_UP, SOURCE, by_rank, histograms, of, source, view_of, worker
from tests.views.sample_run import finished, idle, joined, polled, started, transferred
from tracekv.journal.records import Record, SettingsSeen
from tracekv.journal.vocabulary import Direction
from tracekv.views.metrics import MAX_PROCESSES, MetricsView

RANK_1 = source(1)
SECOND = 1_000_000_000


def two_ranks() -> MetricsView:
    view = view_of()
    view.feed_all(RANK_1, worker(1))
    return view


def test_the_skew_is_from_the_first_rank_to_the_last_which_is_named() -> None:
    view = two_ranks()
    view.feed(SOURCE, polled(1000, 1000, saving_given=[7], saving_returned=[7]))
    assert histograms(view, "tracekv.finished.skew") == {}

    view.feed(RANK_1, polled(2_001_000, 2_001_000, saving_given=[7], saving_returned=[7]))
    (skew,) = histograms(view, "tracekv.finished.skew").values()
    assert (skew.count, skew.sum) == (1, 0.002)
    assert by_rank(view, "tracekv.finished.last") == {(1, "save"): 1}


def test_the_last_rank_is_the_last_in_time_and_not_in_reading() -> None:
    view = two_ranks()
    view.feed(RANK_1, polled(9000, 9000, loading_returned=[7]))
    view.feed(SOURCE, polled(1000, 1000, loading_returned=[7]))

    assert by_rank(view, "tracekv.finished.last") == {(1, "load"): 1}
    assert histograms(view, "tracekv.finished.skew")["load",].sum == 8e-6


def test_a_single_rank_has_no_skew() -> None:
    view = view_of(polled(1000, 1010, saving_given=[7], saving_returned=[7]))

    assert histograms(view, "tracekv.finished.skew") == {}
    assert of(view, "tracekv.finished.last") == {}


def test_ranks_of_another_boot_are_compared_by_their_anchors() -> None:
    elsewhere = source(1, boot_id="other", monotonic_ns=500, wall_ns=SOURCE.wall_ns + 700)
    view = view_of()
    view.feed_all(elsewhere, worker(1))
    view.feed(SOURCE, polled(1000, 1000, saving_returned=[7]))
    view.feed(elsewhere, polled(1000, 1000, saving_returned=[7]))

    assert histograms(view, "tracekv.finished.skew")["save",].sum == 200e-9


KEPT: list[tuple[int, Record]] = [
    (0, finished(2200, 2250, keeps_pages=True)),
    (0, polled(2300, 2310, saving_given=[7])),
    (0, polled(2400, 2410, saving_returned=[7])),
    (1, polled(2500, 2510, saving_given=[7], saving_returned=[7])),
]


def test_pages_are_held_until_every_rank_has_given_the_request_back() -> None:
    view = two_ranks()
    view.feed(SOURCE, KEPT[0][1])
    held = view.metrics(now_ns=2250 + 3 * SECOND, boot_id=SOURCE.boot_id)
    assert of(held, "tracekv.held.pages") == {(0,): 3, (1,): 1}
    assert of(held, "tracekv.held.age") == {(): 3.0}

    view.feed(SOURCE, KEPT[2][1])
    assert of(view, "tracekv.held.pages") == {(0,): 3, (1,): 1}
    view.feed(RANK_1, KEPT[3][1])
    assert of(view, "tracekv.held.pages") == {(0,): 0, (1,): 0}
    assert of(view, "tracekv.held.age") == {(): 0.0}


@pytest.mark.parametrize("rank_1_at", range(len(KEPT)))
def test_held_pages_are_released_however_the_ranks_journals_interleave(rank_1_at: int) -> None:
    view = two_ranks()
    leader = iter([record for rank, record in KEPT if rank == 0])
    for place in range(len(KEPT)):
        if place == rank_1_at:
            view.feed(RANK_1, KEPT[3][1])
        else:
            view.feed(SOURCE, next(leader))

    assert set(of(view, "tracekv.held.pages").values()) == {0}


def test_a_request_that_is_not_kept_holds_nothing() -> None:
    assert set(of(view_of(finished()), "tracekv.held.pages").values()) == {0}


def test_what_a_process_held_goes_with_it_and_its_counters_stay() -> None:
    view = view_of(finished(keeps_pages=True), transferred(Direction.LOAD, 0, [3], 100, 1500, 1540))
    view.lost(SOURCE, 3)
    view.ended(SOURCE)

    assert of(view, "tracekv.held.pages") == {}
    assert of(view, "tracekv.processes") == {}
    assert of(view, "tracekv.transfer.io")["load", 0, "host", "reported"] == 100
    assert of(view, "tracekv.tracer.records.lost") == {(): 3}


def test_counters_of_a_rank_go_on_in_its_next_process() -> None:
    view = view_of(transferred(Direction.LOAD, 0, [3], 100, 1500, 1540))
    view.ended(SOURCE)
    again = source(5)
    view.feed_all(again, [*BRING_UP, transferred(Direction.LOAD, 0, [3], 100, 1500, 1540)])

    assert of(view, "tracekv.transfer.io") == {("load", 0, "host", "reported"): 200}
    assert of(view, "tracekv.processes") == {(): 1}


def test_a_rank_that_died_is_not_waited_for() -> None:
    view = two_ranks()
    view.feed(SOURCE, finished(keeps_pages=True))
    view.ended(RANK_1)
    view.feed(SOURCE, polled(2400, 2410, saving_returned=[7]))

    assert set(of(view, "tracekv.held.pages").values()) == {0}


def test_a_process_without_a_rank_counts_as_minus_one_until_it_is_told() -> None:
    view = MetricsView()
    view.feed(SOURCE, started())
    view.feed(SOURCE, idle(count=2))
    assert by_rank(view, "tracekv.tracer.records.read") == {(-1,): 2}

    view.feed(SOURCE, joined(3, 8))
    assert by_rank(view, "tracekv.tracer.records.read") == {(3,): 3}


def test_differing_settings_of_a_run_are_counted_and_told_once() -> None:
    told: list[tuple[int, int]] = []
    view = MetricsView(settings_differ=lambda reference, other: told.append((reference, other)))
    for number, digest in enumerate([b"\x01", b"\x02", b"\x02", b"\x01"]):
        view.feed_all(source(number + 1), [SettingsSeen(digest), joined(number, 4)])

    assert of(view, "tracekv.settings.differing") == {(): 2}
    assert told == [(0, 1)]
    assert by_rank(view, "tracekv.settings.info") == {(0, "01"): 1, (1, "02"): 1, (2, "02"): 1, (3, "01"): 1}


def test_settings_of_different_runs_may_differ() -> None:
    told: list[tuple[int, int]] = []
    view = MetricsView(settings_differ=lambda reference, other: told.append((reference, other)))
    view.feed_all(SOURCE, [SettingsSeen(b"\x01"), joined(0, 1, b"a" * 16)])
    view.feed_all(RANK_1, [SettingsSeen(b"\x02"), joined(1, 1, b"b" * 16)])

    assert of(view, "tracekv.settings.differing") == {(): 0}
    assert told == []


def test_of_too_many_processes_the_quietest_counts_as_ended() -> None:
    view = MetricsView()
    for number in range(MAX_PROCESSES + 10):
        view.feed_all(
            source(number + 1), [joined(0, 1, b"%016d" % number), idle(first=number * 10, last=number * 10 + 5)]
        )

    assert of(view, "tracekv.processes") == {(): MAX_PROCESSES}
    assert of(view, "tracekv.tracer.records.read") == {(): 2 * (MAX_PROCESSES + 10)}


def test_two_processes_of_one_rank_add_up() -> None:
    view = MetricsView()
    for number, run in itertools.product(range(1, 3), [b"a" * 16]):
        view.feed_all(source(number), [joined(0, 1, run), transferred(Direction.LOAD, 0, [3], 100, 1, 2)])

    assert of(view, "tracekv.transfer.io") == {("load", -1, "host", "reported"): 200}
