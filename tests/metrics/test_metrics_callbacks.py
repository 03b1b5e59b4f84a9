"""Durations and exceptions of callbacks, the per-layer hooks, requests in flight."""

from __future__ import annotations

from tests.metrics.reading import SOURCE, histograms, of, view_of
from tests.views.sample_run import call, hooks, idle, polled, registered, wrapped
from tracekv.journal.records import CallCounts, IdlePolls
from tracekv.journal.vocabulary import Callback, Side

MILLISECOND = 1_000_000


def test_a_callback_is_timed_in_seconds_in_buckets_that_hold_their_upper_bound() -> None:
    view = view_of(call(Callback.START_LOAD_KV, 0, 5000), call(Callback.START_LOAD_KV, 0, 5001))

    point = histograms(view, "tracekv.callback.duration")["worker.start_load_kv",]
    assert point.counts == [1, 1, *[0] * 12]
    assert (point.count, point.sum, point.min, point.max) == (2, 0.000010001, 0.000005, 0.000005001)


def test_a_duration_beyond_all_buckets_is_in_the_one_without_an_end() -> None:
    view = view_of(call(Callback.START_LOAD_KV, 0, 11_000_000_000))

    assert histograms(view, "tracekv.callback.duration")["worker.start_load_kv",].counts == [*[0] * 13, 1]


def test_an_end_before_the_start_counts_as_no_time() -> None:
    view = view_of(call(Callback.START_LOAD_KV, 50, 20))

    assert histograms(view, "tracekv.callback.duration")["worker.start_load_kv",].sum == 0.0


def test_exceptions_are_counted_by_callback_and_timed_too() -> None:
    view = view_of(
        call(Callback.BUILD_CONNECTOR_META, 1, 2, error="ValueError"), call(Callback.BUILD_CONNECTOR_META, 1, 2)
    )

    assert of(view, "tracekv.callback.exceptions") == {("scheduler.build_connector_meta",): 1}
    assert histograms(view, "tracekv.callback.duration")["scheduler.build_connector_meta",].count == 2


def test_an_unknown_callback_is_other() -> None:
    view = view_of(call(99, 1, 2, error="X"), call(98, 1, 2))  # type: ignore[arg-type]

    assert histograms(view, "tracekv.callback.duration")["other",].count == 2
    assert of(view, "tracekv.callback.exceptions") == {("other",): 1}


def test_idle_polls_count_each_poll_and_their_time_exactly() -> None:
    polls = IdlePolls(1, 4, 10 * MILLISECOND, 7 * MILLISECOND, 0, 90)
    point = histograms(view_of(polls), "tracekv.callback.duration")["worker.get_finished",]

    assert (point.count, point.sum, point.max) == (4, 0.01, 0.007)
    assert sum(point.counts) == 4


def test_calls_of_which_only_counts_are_kept_are_among_the_calls() -> None:
    counts = CallCounts(3, 0, 100, [(Callback.WAIT_FOR_SAVE, 5, 5 * MILLISECOND, MILLISECOND), (99, 1, 1, 1)])
    view = view_of(counts)

    assert histograms(view, "tracekv.callback.duration")["worker.wait_for_save",].count == 5
    assert of(view, "tracekv.passes") == {(): 5}
    assert of(view, "tracekv.layer_hook.expected") == {}


def test_layer_hooks_are_timed_by_layer_group() -> None:
    # Layers 0 and 1 are group 0's, 2 and 3 group 1's.
    view = view_of(hooks())

    assert of(view, "tracekv.layer_hook.time") == {
        ("worker.wait_for_layer_load", 0): 40e-9,
        ("worker.wait_for_layer_load", 1): 25e-9,
        ("worker.save_kv_layer", 0): 3e-9,
        ("worker.save_kv_layer", 1): 7e-9,
    }
    point = histograms(view, "tracekv.callback.duration")["worker.wait_for_layer_load",]
    assert (point.count, point.sum, point.min, point.max) == (4, 65e-9, 5e-9, 30e-9)


def test_hooks_of_layers_that_are_not_registered_are_of_group_minus_one() -> None:
    view = view_of(hooks(waits=[(1, 2), (3, 4), (5, 6), (7, 8), (9, 19)], saves=[]))

    assert of(view, "tracekv.layer_hook.time")["worker.wait_for_layer_load", -1] == 10e-9
    assert of(view, "tracekv.layer_hook.seen") == {("worker.wait_for_layer_load",): 5}


def test_a_hook_that_raised_is_seen_and_not_timed() -> None:
    view = view_of(hooks(waits=[(1, 2), (3, 0), (5, 6), (7, 8)], saves=[]))

    assert of(view, "tracekv.layer_hook.seen") == {("worker.wait_for_layer_load",): 4}
    assert histograms(view, "tracekv.callback.duration")["worker.wait_for_layer_load",].count == 3


def test_a_replayed_graph_shows_as_hooks_expected_and_not_seen() -> None:
    view = view_of(hooks(), call(Callback.WAIT_FOR_SAVE, 2000, 2040), call(Callback.WAIT_FOR_SAVE, 3000, 3040, 2))

    assert of(view, "tracekv.passes") == {(): 2}
    assert of(view, "tracekv.layer_hook.expected") == {("worker.wait_for_layer_load",): 8, ("worker.save_kv_layer",): 8}
    assert of(view, "tracekv.layer_hook.seen") == {("worker.wait_for_layer_load",): 4, ("worker.save_kv_layer",): 4}


def test_hooks_that_the_connector_inherits_are_not_expected() -> None:
    view = view_of(
        registered(), call(Callback.WAIT_FOR_SAVE, 2000, 2040), before=[wrapped(Side.WORKER, ["save_kv_layer"])]
    )

    assert of(view, "tracekv.layer_hook.expected") == {}


def test_requests_in_flight_are_those_given_and_not_returned() -> None:
    view = view_of(
        polled(1000, 1010, loading_given=[7, 8], saving_given=[9]),
        polled(2000, 2010, loading_returned=[7], saving_returned=[9]),
    )

    assert of(view, "tracekv.request.in_flight") == {("load",): 1, ("save",): 0}
    ages = view.metrics(now_ns=5_000_001_010, boot_id=SOURCE.boot_id)
    assert of(ages, "tracekv.request.in_flight_age") == {("load",): 5.0, ("save",): 0.0}


def test_ages_of_another_boot_are_as_of_its_newest_record() -> None:
    view = view_of(polled(1000, 1010, loading_given=[7]), idle(first=3_000_000_000, last=3_000_001_010))

    ages = view.metrics(now_ns=99_000_000_000, boot_id="another boot")
    assert of(ages, "tracekv.request.in_flight_age")["load",] == 3.0
    assert of(ages, "tracekv.tracer.lag") == {(): 0.0}
