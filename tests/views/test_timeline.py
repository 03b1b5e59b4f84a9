"""Records as bars on lanes, what transfers add up to over time, and where a load is used first."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.views.sample_run import bound, call, hooks, idle, registered, the_run, transferred
from tracekv.journal.records import CallCounts, Record
from tracekv.journal.vocabulary import Callback, Direction, Source
from tracekv.views.bar_facts import bar_facts
from tracekv.views.first_use import FirstUses
from tracekv.views.rates import TransferRates
from tracekv.views.timeline import Bar, Lane, Row, Timeline
from tracekv.views.tracks import Tracks


def bars_of(records: list[Record]) -> list[Bar]:
    timeline = Timeline()
    return [bar for record in records for bar in timeline.feed(record)]


def on(bars: list[Bar], row: Row, group: int = -2) -> list[tuple[str, int, int]]:
    return [(bar.name, bar.start_ns, bar.end_ns) for bar in bars if bar.lane[:2] == (row, group)]


def test_callbacks_of_each_half_lie_on_a_lane_of_their_own() -> None:
    bars = bars_of(the_run())

    assert ("get_num_new_matched_tokens", 1000, 1100) in on(bars, Row.SCHEDULER)
    assert ("start_load_kv", 1490, 1570) in on(bars, Row.WORKER)
    assert on(bars, Row.PASSES) == [("pass 1", 1400, 2040)]


def test_hooks_and_transfers_lie_on_the_lane_of_their_layer_group() -> None:
    bars = bars_of(the_run())

    assert on(bars, Row.HOOKS, 1)[:2] == [("wait_for_layer_load", 1800, 1805), ("save_kv_layer", 1850, 1853)]
    assert on(bars, Row.LOADS, 0) == [("load host", 1500, 1540)]
    assert on(bars, Row.LOADS, 1) == [("load object", 1540, 1560)]
    assert on(bars, Row.SAVES, 0) == [("save host", 2010, 2020)]


def test_how_bytes_are_known_is_part_of_the_lane() -> None:
    (bar,) = bars_of([transferred(Direction.LOAD, 1, [1], 10, 1, 2, source=Source.OBSERVED)])

    assert bar.lane.label == "load, group 1 (observed)"


def test_many_idle_polls_are_one_bar_beside_the_callbacks() -> None:
    assert on(bars_of([idle(count=9)]), Row.IDLE) == [("get_finished, 9 times", 2300, 2310)]
    assert on(bars_of([idle()]), Row.WORKER) == [("get_finished", 2300, 2310)]


def test_calls_that_were_only_counted_are_a_bar_that_says_so() -> None:
    counted = CallCounts(9, 1000, 2000, [(Callback.WAIT_FOR_SAVE, 3, 600, 300)])

    assert on(bars_of([counted]), Row.COUNTED) == [("3 calls, only counted", 1000, 2000)]


def test_a_bar_tells_its_facts_by_the_field_s_names() -> None:
    (bar,) = bars_of([transferred(Direction.LOAD, 1, [-1, 8], 40, 1, 2, queued_ns=0)])

    assert bar_facts(bar, str) == {
        "request": "7", "step": 1, "layer_group": 1, "tier": "host", "source": "reported", "nbytes": 40, "tokens": 96, "read_ns": 2,
        "verify_ns": 3, "copy_ns": 4, "stall_ns": 5, "pages": 1, "blocks_without_page": 1,
    }  # fmt: skip


# -- rates -----------------------------------------------------------------------------------------------------------


def levels_of(*records: Record) -> list[tuple[int, int, int]]:
    rates = TransferRates()
    levels = [level for record in records for level in rates.add(record)] + list(rates.close())
    return [(level.at_ns, level.bytes_in_flight, level.bytes_per_s) for level in levels]


def load(start: int, end: int, nbytes: int = 1000, **facts: object) -> Record:
    return transferred(Direction.LOAD, 0, [1], nbytes, start, end, **facts)


def test_bytes_are_in_flight_from_start_to_end_and_add_up() -> None:
    assert levels_of(load(0, 10_000), load(5_000, 15_000)) == [
        (0, 1000, 100_000_000),
        (5_000, 2000, 200_000_000),
        (10_000, 1000, 100_000_000),
        (15_000, 0, 0),
    ]


def test_a_failed_transfer_moved_nothing() -> None:
    assert levels_of(load(0, 10_000, error="OSError")) == []


def test_a_transfer_of_no_length_has_a_bounded_rate() -> None:
    assert levels_of(load(100, 100)) == [(100, 1000, 1_000_000_000), (1_100, 0, 0)]


@given(
    st.lists(
        st.tuples(st.integers(0, 10**7), st.integers(1_000, 10**6), st.integers(1, 10**9)), min_size=1, max_size=30
    )
)
def test_the_integral_of_the_bandwidth_is_what_moved(moves: list[tuple[int, int, int]]) -> None:
    levels = levels_of(*(load(start, start + took, nbytes) for start, took, nbytes in moves))
    moved = sum(rate * (after[0] - at) for (at, _, rate), after in itertools.pairwise(levels)) / 1e9

    assert moved == pytest.approx(sum(nbytes for *_, nbytes in moves), abs=len(moves))
    assert levels[-1][1:] == (0, 0)
    assert [at for at, *_ in levels] == sorted({at for at, *_ in levels})


# -- first use -------------------------------------------------------------------------------------------------------


def uses_of(records: list[Record]) -> list[tuple[str, str, int]]:
    uses = FirstUses()
    arrows = [arrow for bar in bars_of(records) for arrow in uses.feed(bar, 0)]
    return [(arrow.load.bar.name, arrow.use.bar.name, arrow.use.bar.layer) for arrow in arrows]


def test_a_load_is_first_used_by_the_first_hook_of_its_group_that_waits_for_it() -> None:
    assert uses_of(the_run()) == [("load host", "wait_for_layer_load", 0), ("load object", "wait_for_layer_load", 2)]


def test_a_hook_that_was_over_before_the_load_did_not_wait_for_it() -> None:
    late = transferred(Direction.LOAD, 0, [3], 100, 1500, 1720)
    records = [registered(), bound(), late, hooks()]

    assert uses_of([*records, call(Callback.WAIT_FOR_SAVE, 2000, 2040)]) == [("load host", "wait_for_layer_load", 1)]


def test_without_hooks_the_pass_is_the_first_use() -> None:
    records = [bound(), load(1500, 1600), call(Callback.WAIT_FOR_SAVE, 2000, 2040)]

    assert uses_of(records) == [("load host", "pass 1", -1)]
    assert uses_of([bound(), load(1500, 3000), call(Callback.WAIT_FOR_SAVE, 2000, 2040)]) == []


def test_a_load_that_is_told_after_its_pass_finds_its_use_too() -> None:
    run = the_run()
    loads = [record for record in run if getattr(record, "direction", None) is Direction.LOAD]
    rest = [record for record in run if record not in loads]

    assert uses_of([*rest, *loads]) == uses_of(run)


# -- tracks ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 30)), max_size=40))
def test_no_two_bars_of_a_track_overlap_in_whatever_order_they_come(times: list[tuple[int, int]]) -> None:
    tracks, lane = Tracks(1000), Lane(Row.LOADS, 0)
    placed: dict[int, list[tuple[int, int]]] = {}
    for start, took in times:
        placed.setdefault(tracks.place(lane, start, start + took), []).append((start, start + took))

    for bars in placed.values():
        bars.sort()
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(bars))
