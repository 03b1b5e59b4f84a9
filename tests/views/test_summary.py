"""Calls, bytes, tokens and misses of a run, and of several processes together."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.views.sample_run import (
    allocated,
    call,
    dropped,
    idle,
    looked_up,
    queried,
    registered,
    stored,
    the_run,
    transferred,
)
from tracekv.journal.records import CallCounts, Record
from tracekv.journal.vocabulary import Callback, Direction, Operation, Outcome, Source, Tier
from tracekv.views.durations import Durations
from tracekv.views.summary import Summary, SummaryView


def summary_of(records: list[Record]) -> Summary:
    view = SummaryView()
    for record in records:
        view.feed(record)
    return view.summary


def test_every_callback_is_counted_with_its_time() -> None:
    callbacks = summary_of(the_run()).callbacks

    assert {name: callback.durations.calls for name, callback in callbacks.items()} == {
        "scheduler.__init__": 1,
        "worker.__init__": 1,
        "worker.register_forward_pass_callable": 1,
        "worker.register_kv_cache_layout": 1,
        "scheduler.wait_for_initialization": 1,
        "scheduler.get_num_new_matched_tokens": 1,
        "scheduler.update_state_after_alloc_by_layer_group": 1,
        "scheduler.build_connector_meta": 1,
        "worker.bind_connector_meta": 1,
        "worker.start_load_kv": 1,
        "worker.wait_for_layer_load": 4,
        "worker.save_kv_layer": 4,
        "worker.forward_pass_callable": 1,
        "worker.wait_for_save": 1,
        "scheduler.request_finished_by_layer_group": 1,
        "worker.get_finished": 1,
        "worker.shutdown": 1,
    }
    waits = callbacks["worker.wait_for_layer_load"].durations
    assert (waits.total_ns, waits.max_ns) == (65, 30)


def test_layer_groups_tell_window_pages_and_reported_bytes() -> None:
    groups = summary_of(the_run()).layer_groups

    assert {i: (g.window_size, g.bytes_per_page) for i, g in groups.items()} == {0: (None, 100), 1: (64, 40)}
    assert [(g.pages(Direction.LOAD), g.nbytes(Direction.LOAD)) for g in groups.values()] == [(2, 200), (1, 40)]
    assert [(g.pages(Direction.SAVE), g.nbytes(Direction.SAVE)) for g in groups.values()] == [(1, 100), (0, 0)]


def test_tokens_come_from_the_query_the_allocation_and_the_transfers() -> None:
    summary = summary_of(the_run())

    assert (summary.queries, summary.prompt_tokens, summary.computed_tokens) == (1, 1024, 64)
    assert (summary.offered_tokens, summary.honoured_tokens, summary.untold_allocations) == (512, 480, 0)
    assert (summary.loaded_tokens, summary.saved_tokens) == (96, 32)
    assert (summary.loaded_bytes, summary.saved_bytes) == (240, 100)
    assert (summary.steps, summary.scheduled_tokens) == (1, 480)


def test_only_reported_bytes_count_as_moved_and_others_are_kept_apart() -> None:
    eligible = transferred(Direction.LOAD, 0, [1], 100, 1, 2, source=Source.ELIGIBLE)
    group = summary_of([registered(), eligible]).layer_groups[0]

    assert group.nbytes(Direction.LOAD) == 0
    assert group.nbytes(Direction.LOAD, Source.ELIGIBLE) == 100


def test_misses_drops_and_store_outcomes_are_counted_by_reason() -> None:
    lookups = [looked_up(), looked_up(bounding_layer_group=1), looked_up(reason=None, bounding_layer_group=None)]
    summary = summary_of([*lookups, dropped(), stored(), stored(outcome=Outcome.MISSING)])

    assert (summary.lookups, summary.misses, summary.bounding) == (3, {"not_staged": 2}, {0: 1, 1: 1})
    assert summary.drops == {"queue_full": 3}
    assert summary.store_outcomes == {"put.ok": 1, "put.missing": 1}


def test_what_the_store_was_asked_is_counted_beside_the_hits_that_it_served() -> None:
    failed = stored(operation=Operation.READ, outcome=Outcome.UNAVAILABLE, requests=0)
    reads = [stored(operation=Operation.READ, requests=4), stored(operation=Operation.READ), failed]
    records = [queried(), queried(offered_tokens=0), *reads, stored(requests=3)]
    summary = summary_of(records)
    summary.merge(summary_of(records[:3]))

    assert summary.hits == 2
    assert summary.store_requests == {"read": 9, "put": 3}
    assert summary.store_bytes == {"read": 240, "put": 80}


def test_a_process_that_has_lost_its_layout_takes_nothing_from_what_another_tells() -> None:
    told = summary_of([registered(), transferred(Direction.SAVE, 1, [3], 40, 1, 2)])
    told.merge(summary_of([transferred(Direction.SAVE, 1, [3], 40, 1, 2)]))

    group = told.layer_groups[1]
    assert (group.window_size, group.bytes_per_page, group.nbytes(Direction.SAVE)) == (64, 40, 80)


def test_idle_polls_count_each_poll_and_keep_their_sum() -> None:
    durations = summary_of([idle(count=100, longest=50)]).callbacks["worker.get_finished"].durations

    assert (durations.calls, durations.total_ns, durations.max_ns) == (100, 4995, 50)


def test_calls_that_were_only_counted_are_among_the_calls() -> None:
    counted = CallCounts(
        9, 1000, 2000, [(Callback.WAIT_FOR_SAVE, 3, 600, 300), (Callback.BUILD_CONNECTOR_META, 1, 50, 50)]
    )
    callbacks = summary_of([counted]).callbacks

    assert callbacks["worker.wait_for_save"].durations.calls == 3
    assert callbacks["worker.wait_for_save"].durations.total_ns == 600
    assert callbacks["scheduler.build_connector_meta"].durations.max_ns == 50


def test_an_allocation_that_does_not_tell_what_is_honoured_is_counted_apart() -> None:
    summary = summary_of([allocated(honoured=None), allocated()])

    assert (summary.honoured_tokens, summary.untold_allocations) == (480, 1)


def test_calls_that_raised_are_among_the_calls() -> None:
    callback = summary_of(
        [call(Callback.START_LOAD_KV, 1, 2), call(Callback.START_LOAD_KV, 3, 5, error="E")]
    ).callbacks["worker.start_load_kv"]

    assert (callback.durations.calls, callback.errors) == (2, 1)


def test_summaries_of_two_processes_merge_to_what_one_would_have_counted() -> None:
    first, second = the_run(), [queried(), transferred(Direction.LOAD, 1, [2], 40, 1, 9, tier=Tier.DISK), *the_run()]
    merged = summary_of(first)
    merged.merge(summary_of(second))

    assert msgspec.to_builtins(merged, order="deterministic") == msgspec.to_builtins(
        summary_of([*first, *second]), order="deterministic"
    )


def test_a_summary_survives_json() -> None:
    summary = summary_of(the_run())

    assert msgspec.json.decode(msgspec.json.encode(summary), type=Summary) == summary


def test_lost_records_are_counted() -> None:
    view = SummaryView()
    view.lost(3)

    assert view.summary.lost_records == 3


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=200), st.sampled_from([50, 99, 100]))
def test_a_percentile_is_within_two_percent_of_the_true_one(durations: list[int], percent: int) -> None:
    histogram = Durations()
    for duration in durations:
        histogram.add(duration)
    rank = max(1, -(-len(durations) * percent // 100))
    true = sorted(durations)[rank - 1]

    assert abs(histogram.percentile_ns(percent) - true) <= max(1, true * 0.02)


def test_a_histogram_s_size_does_not_grow_with_the_calls() -> None:
    histogram = Durations()
    for duration in range(0, 10_000_000, 7):
        histogram.add(duration)

    assert len(histogram.buckets) < 32 * 24


@pytest.mark.parametrize("percent", [50, 99])
def test_without_calls_a_percentile_is_zero(percent: int) -> None:
    assert Durations().percentile_ns(percent) == 0
