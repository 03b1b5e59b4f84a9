"""Bytes, pages and times of what moved, by source."""

from __future__ import annotations

from tests.metrics.reading import histograms, of, view_of
from tests.views.sample_run import allocated, bound, built, call, finished, hooks, transferred
from tracekv.journal.vocabulary import Callback, Direction, Source, Tier


def test_a_reported_transfer_counts_bytes_and_pages_of_its_group_and_tier() -> None:
    view = view_of(
        transferred(Direction.LOAD, 0, [3, 4, -1], 200, 1500, 1540),
        transferred(Direction.LOAD, 0, [5], 100, 1540, 1560, tier=Tier.OBJECT),
        transferred(Direction.SAVE, 1, [8], 40, 2010, 2020),
    )

    assert of(view, "tracekv.transfer.io") == {
        ("load", 0, "host", "reported"): 200,
        ("load", 0, "object", "reported"): 100,
        ("save", 1, "host", "reported"): 40,
    }
    assert of(view, "tracekv.transfer.pages") == {
        ("load", 0, "host", "reported"): 2,
        ("load", 0, "object", "reported"): 1,
        ("save", 1, "host", "reported"): 1,
    }


def test_a_failed_transfer_counts_as_an_error_and_nothing_else() -> None:
    view = view_of(transferred(Direction.SAVE, 1, [8], 40, 2010, 2020, error="OSError"))

    assert of(view, "tracekv.transfer.errors") == {("save", "host"): 1}
    assert of(view, "tracekv.transfer.io") == {}
    assert histograms(view, "tracekv.transfer.duration") == {}


def test_a_group_that_is_not_registered_counts_as_minus_one() -> None:
    view = view_of(transferred(Direction.LOAD, 77, [3], 10, 1500, 1540))

    assert of(view, "tracekv.transfer.io") == {("load", -1, "host", "reported"): 10}


def test_what_a_watch_observed_is_told_apart_and_counted_in_no_time() -> None:
    view = view_of(transferred(Direction.LOAD, 0, [3], 100, 1500, 1540, source=Source.OBSERVED))

    assert of(view, "tracekv.transfer.io") == {("load", 0, "host", "observed"): 100}
    assert histograms(view, "tracekv.transfer.duration") == {}


def test_eligible_loads_are_the_allocated_pages_times_their_size() -> None:
    view = view_of(allocated())

    assert of(view, "tracekv.transfer.pages") == {("load", 0, "eligible"): 3, ("load", 1, "eligible"): 2}
    assert of(view, "tracekv.transfer.io") == {("load", 0, "eligible"): 300, ("load", 1, "eligible"): 80}


def test_planned_pages_are_told_beside_what_else_is_known() -> None:
    view = view_of(transferred(Direction.LOAD, 0, [1, 2], 200, 10, 20, source=Source.PLANNED))

    assert of(view, "tracekv.transfer.pages") == {("load", 0, "planned"): 2}
    assert of(view, "tracekv.transfer.io") == {("load", 0, "planned"): 200}


def test_eligible_saves_are_the_new_pages_of_a_planned_pass() -> None:
    view = view_of(built())

    assert of(view, "tracekv.transfer.io") == {("save", 0, "eligible"): 300, ("save", 1, "eligible"): 80}


def test_blocks_without_a_page_are_counted_by_group_and_callback() -> None:
    view = view_of(allocated(), built(), finished())

    assert of(view, "tracekv.callback.absent_pages") == {
        (1, "scheduler.update_state_after_alloc_by_layer_group"): 1,
        (1, "scheduler.build_connector_meta"): 1,
        (1, "scheduler.request_finished_by_layer_group"): 2,
    }


def test_durations_and_stalls_are_seconds() -> None:
    view = view_of(
        transferred(Direction.LOAD, 0, [3], 100, 0, 2_000_000, stall_ns=500_000),
        transferred(Direction.LOAD, 1, [3], 40, 0, 60_000_000_000, stall_ns=0),
    )

    (duration,) = histograms(view, "tracekv.transfer.duration").values()
    assert (duration.count, duration.sum, duration.min, duration.max) == (2, 60.002, 0.002, 60.0)
    assert duration.counts == [0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1]
    assert of(view, "tracekv.transfer.stall") == {("load", 0): 0.0005, ("load", 1): 0.0}


def test_a_transfer_inside_start_load_kv_hides_nothing() -> None:
    view = view_of(
        transferred(Direction.LOAD, 0, [3], 100, 1500, 1540),
        call(Callback.START_LOAD_KV, 1490, 1570),
        call(Callback.WAIT_FOR_SAVE, 2000, 2040),
    )

    assert of(view, "tracekv.transfer.time") == {("load", 0): 40e-9}
    assert of(view, "tracekv.transfer.hidden") == {("load", 0): 0.0}


def test_hidden_is_what_no_callback_and_no_layer_hook_saw() -> None:
    # The transfer runs from 1560 to 1960; start_load_kv holds 10 of it, the waits 10 + 30 + 5 + 20, the saves 1 + 2 + 3 + 4.
    view = view_of(
        call(Callback.START_LOAD_KV, 1490, 1570),
        transferred(Direction.LOAD, 0, [3], 100, 1560, 1960),
        hooks(),
        call(Callback.WAIT_FOR_SAVE, 2000, 2040),
    )

    assert of(view, "tracekv.transfer.time") == {("load", 0): 400e-9}
    assert of(view, "tracekv.transfer.hidden") == {("load", 0): 315e-9}


def test_a_transfer_that_outlasts_its_pass_is_settled_by_the_next() -> None:
    view = view_of(
        call(Callback.WAIT_FOR_SAVE, 2000, 2040),
        transferred(Direction.SAVE, 0, [3], 100, 2030, 2130),
    )
    assert of(view, "tracekv.transfer.time") == {}

    view.feed_all(
        next(iter(view._processes.values())).source, [bound(2, 2100, 2110), call(Callback.WAIT_FOR_SAVE, 3000, 3010, 2)]
    )
    assert of(view, "tracekv.transfer.time") == {("save", 0): 100e-9}
    assert of(view, "tracekv.transfer.hidden") == {("save", 0): 80e-9}
