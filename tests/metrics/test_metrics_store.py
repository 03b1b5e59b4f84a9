"""Store operations, drops, prefetches, and tracekv's own health."""

from __future__ import annotations

from tests.metrics.reading import SOURCE, histograms, of, view_of
from tests.views.sample_run import call, dropped, stored
from tracekv.journal.records import Prefetch, StoreCeiling, TracerFault, TracingReduced
from tracekv.journal.vocabulary import Callback, Direction, Operation, Outcome, PrefetchFate


def test_a_store_operation_counts_time_outcome_attempts_requests_and_bytes() -> None:
    view = view_of(
        stored(0, 2_000_000, requests=9),
        stored(0, 3_000_000, operation=Operation.READ, outcome=Outcome.MISSING, attempts=1, nbytes=80),
    )

    assert of(view, "tracekv.store.operations") == {("s3", "put", "ok"): 1, ("s3", "read", "missing"): 1}
    assert of(view, "tracekv.store.attempts") == {("s3", "put"): 2, ("s3", "read"): 1}
    assert of(view, "tracekv.store.requests") == {("s3", "put"): 9, ("s3", "read"): 1}
    assert of(view, "tracekv.store.io") == {("s3", "put"): 80, ("s3", "read"): 0}
    assert histograms(view, "tracekv.store.operation.duration")["s3", "put"].sum == 0.002


def test_an_engine_outside_of_the_closed_set_is_other() -> None:
    view = view_of(stored(engine="gs"), stored(engine="abfs"))

    assert of(view, "tracekv.store.operations") == {("other", "put", "ok"): 2}


def test_the_breakers_state_is_one_of_three() -> None:
    view = view_of(stored(), stored(breaker="open"), stored(engine="local"))

    assert of(view, "tracekv.store.breaker_state") == {
        ("s3", "closed"): 0,
        ("s3", "open"): 1,
        ("s3", "half_open"): 0,
        ("local", "closed"): 1,
        ("local", "open"): 0,
        ("local", "half_open"): 0,
    }


def test_a_ceiling_belongs_to_no_rank_the_last_one_counts_and_it_outlives_its_process() -> None:
    view = view_of(
        StoreCeiling(1, "s3", None, Direction.LOAD, 65536, 100, 90),
        StoreCeiling(2, "s3", None, Direction.LOAD, 65536, 80, 70),
        StoreCeiling(2, "gs", None, Direction.SAVE, 65536, 60, 50),
    )
    view.ended(SOURCE)

    assert of(view, "tracekv.store.ceiling") == {("s3", "load"): 80, ("other", "save"): 60}


def test_drops_count_blocks_and_bytes_by_reason() -> None:
    view = view_of(dropped(), dropped(request_id=None))

    assert of(view, "tracekv.drop.blocks") == {("save", "queue_full"): 6}
    assert of(view, "tracekv.drop.io") == {("save", "queue_full"): 600}


def test_prefetches_count_by_fate_and_useful_ones_tell_their_lead() -> None:
    view = view_of(
        Prefetch(5500, 8, PrefetchFate.USEFUL, 2, 50, 4_000_000), Prefetch(5500, 8, PrefetchFate.WASTED, 1, 25, 0)
    )

    assert of(view, "tracekv.prefetch.blocks") == {("useful",): 2, ("wasted",): 1}
    assert of(view, "tracekv.prefetch.io") == {("useful",): 50, ("wasted",): 25}
    assert histograms(view, "tracekv.prefetch.lead")[()].sum == 0.004


def test_a_negative_amount_makes_no_counter_fall() -> None:
    view = view_of(stored(nbytes=-5, attempts=-1, requests=-1))

    assert of(view, "tracekv.store.io") == {("s3", "put"): 0}
    assert of(view, "tracekv.store.attempts") == {("s3", "put"): 0}
    assert of(view, "tracekv.store.requests") == {("s3", "put"): 0}


def test_lost_and_undecodable_records_faults_and_written_bytes_are_told() -> None:
    view = view_of(TracerFault(1, "x", "y", "z"))
    view.lost(SOURCE, 5)
    view.lost(SOURCE, 2)
    view.journal(SOURCE, bytes_written=4096, undecodable=3)
    view.journal(SOURCE, bytes_written=8192, undecodable=3)

    assert of(view, "tracekv.tracer.records.lost") == {(): 7}
    assert of(view, "tracekv.tracer.records.undecodable") == {(): 3}
    assert of(view, "tracekv.tracer.written") == {(): 8192}
    assert of(view, "tracekv.tracer.faults") == {(): 1}


def test_the_lag_is_the_age_of_the_newest_record() -> None:
    view = view_of(call(Callback.START_LOAD_KV, 1, 2_000_000_000), call(Callback.START_LOAD_KV, 1, 2))

    assert of(view.metrics(now_ns=5_000_000_000, boot_id=SOURCE.boot_id), "tracekv.tracer.lag") == {(): 3.0}


def test_the_cost_is_told_once_the_budget_guard_has_acted() -> None:
    view = view_of()
    assert of(view, "tracekv.tracer.cost") == {}
    assert of(view, "tracekv.tracer.reduced") == {(): 0}

    view.feed(SOURCE, TracingReduced(10, is_reduced=True, cost_ppm=41_000, limit_ppm=30_000))
    assert of(view, "tracekv.tracer.cost") == {(): 0.041}
    assert of(view, "tracekv.tracer.reduced") == {(): 1}
