"""Whatever records come, from whichever processes and in any order: no error, no unlisted series, and no more than the bound."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tests.metrics.reading import HOOKED, SOURCE, source
from tests.telemetry.everything import EVERYTHING
from tests.views.sample_run import (
    allocated,
    bound,
    built,
    call,
    finished,
    hooks,
    joined,
    polled,
    queried,
    registered,
    stored,
    transferred,
)
from tracekv.journal.records import (
    AllocCall,
    CallCounts,
    FinishCall,
    GroupFacts,
    LayerHooks,
    Record,
    RegisterCall,
    SettingsSeen,
)
from tracekv.journal.vocabulary import Callback, Direction, Operation, Outcome, Source, Tier
from tracekv.views.metrics import MetricPoints, MetricsView, Point
from tracekv.views.metrics_model import Histogram
from tracekv.views.metrics_process import MAX_IN_FLIGHT
from tracekv.views.metrics_prompts import MAX_PROMPTS
from tracekv.views.metrics_ranks import MAX_REQUESTS
from tracekv.views.registry import registry, total_series_bound

RANKS = 3
_small = st.integers(-3, 5)
_numbers = st.one_of(_small, st.integers(-(2**63), 2**63 - 1))
_ids = st.lists(_small)
_pages = st.lists(st.lists(_small, max_size=4), max_size=4)


def _odd_register(layers: list[list[int]]) -> RegisterCall:
    groups = [GroupFacts(number, None, ids, 10, 100, []) for number, ids in enumerate(layers)]
    return RegisterCall(Callback.REGISTER_KV_CACHE_LAYOUT, 1, 2, 0, None, 16, "x", groups)


def _with_pages(record: AllocCall | FinishCall, pages: list[list[int]]) -> Record:
    return msgspec.structs.replace(record, pages=pages)


_odd = st.one_of(
    st.builds(call, st.integers(-1, 120), _numbers, _numbers),
    st.builds(queried, _numbers, _numbers, _small, prompt_tokens=st.one_of(st.none(), _numbers), offered_tokens=_numbers),
    st.builds(finished, _numbers, _numbers, _small, keeps_pages=st.booleans()),
    st.builds(
        polled, _numbers, _numbers,
        saving_given=_ids, saving_returned=_ids, loading_given=_ids, loading_returned=_ids,
    ),
    st.builds(
        transferred, st.sampled_from(Direction), _small, st.lists(_small), _numbers, _numbers, _numbers,
        source=st.sampled_from(Source), tier=st.sampled_from(Tier), request_id=_small, tokens=_numbers, stall_ns=_numbers,
    ),
    st.builds(
        stored, _numbers, _numbers,
        operation=st.sampled_from(Operation), outcome=st.sampled_from(Outcome), engine=st.text(), breaker=st.text(),
        nbytes=_numbers, attempts=_numbers, rank=_numbers,
    ),
    st.builds(LayerHooks, _small, st.binary(max_size=100), st.binary(max_size=100)),
    st.builds(CallCounts, _small, _numbers, _numbers, st.lists(st.tuples(st.integers(-1, 120), _numbers, _numbers, _numbers))),
    st.builds(_odd_register, st.lists(st.lists(_small, max_size=3), max_size=3)),
    st.builds(built, _small, _numbers, _numbers, st.lists(_small, max_size=4), _small),
    st.builds(_with_pages, st.sampled_from([allocated(), finished(), finished(keeps_pages=True)]), _pages),
    st.builds(SettingsSeen, st.binary(max_size=2)),
    st.builds(joined, st.integers(-1, RANKS - 1), st.integers(-1, RANKS), st.sampled_from([b"a" * 16, b"b" * 16, b""])),
)  # fmt: skip
_records = st.lists(st.tuples(st.integers(0, 2), st.one_of(st.sampled_from(EVERYTHING), _odd)), max_size=60)


def series(metrics: list[MetricPoints]) -> int:
    """How many there are on a Prometheus endpoint, ``target_info`` included."""
    count = 1
    for metric in metrics:
        for point in metric.points:
            count += 1 if isinstance(point, Point) else len(point.counts) + 2
    return count


@given(_records, st.integers(0, 2))
def test_no_stream_breaks_the_metrics_or_their_bound(records: list[tuple[int, Record]], ended: int) -> None:
    view = MetricsView()
    view.lost(source(2), 3)
    for number, record in records:
        view.feed(source(number), record)
    view.ended(source(ended))
    metrics = view.metrics(now_ns=10**18, boot_id=SOURCE.boot_id)

    assert series(metrics) <= total_series_bound(ranks=RANKS, layer_groups=4)
    for metric in metrics:
        entry = registry().metrics[metric.name]
        for point in metric.points:
            assert point.attributes.keys() <= set(entry.attributes)
            if isinstance(point, Point) and entry.instrument == "counter":
                assert point.value >= 0


def test_the_bound_holds_where_everything_happens() -> None:
    """Every rank, group and word of every closed set; the bound isn't far above it."""
    view = MetricsView()
    for rank in range(-1, RANKS):
        of_rank = source(rank + 2)
        view.feed_all(of_rank, _all_words(rank))
    metrics = view.metrics()
    most = total_series_bound(ranks=RANKS, layer_groups=2)

    assert most / 2 < series(metrics) <= most


def _all_words(rank: int) -> list[Record]:
    records: list[Record] = [HOOKED, registered(), joined(rank, RANKS)]
    groups = (-1, 0, 1)
    records += [call(number, 1, 2, 1, "E") for number in [*Callback, 99]]  # type: ignore[list-item]
    records += [
        transferred(direction, group, [1], 1, 1, 2, tier=tier, source=of, error=error)
        for direction in Direction
        for group in groups
        for tier in Tier
        for of in Source
        for error in (None, "E")
    ]
    records += [
        stored(operation=operation, outcome=outcome, engine=engine)
        for operation in Operation
        for outcome in Outcome
        for engine in registry().enums["store_engine"].words
    ]
    records += [
        record
        for record in EVERYTHING
        if type(record).__name__ in ("Drop", "Prefetch", "Lookup", "LayerHooks", "FinishedCall")
    ]
    return records


@given(st.lists(st.integers(-5, 10**10)))
def test_counting_many_is_counting_each(durations: list[int]) -> None:
    bounds = (5, 100, 10_000, 10**9)
    each, many = Histogram(bounds), Histogram(bounds)
    for duration in durations:
        each.add(duration)
    many.add_all(durations)

    assert (many.counts, many.sum, many.min, many.max) == (each.counts, each.sum, each.min, each.max)


def test_state_is_bounded_however_long_a_leader_runs_without_ends() -> None:
    view = MetricsView()
    view.feed_all(SOURCE, [HOOKED, registered(), joined()])
    for number in range(2 * MAX_PROMPTS + 100):
        view.feed_all(
            SOURCE,
            [
                queried(number, number + 1, number),
                finished(number, number + 1, number, keeps_pages=True),
                polled(number, number + 1, saving_given=[number], loading_given=[number]),
                transferred(Direction.LOAD, 0, [1], 1, number, number + 1, request_id=number),
                hooks(),
                bound(number),
            ],
        )
    (process,) = view._processes.values()
    (run,) = view._ranks._runs.values()

    assert len(process._prompts._prompts) == MAX_PROMPTS
    assert len(process._loading) <= MAX_IN_FLIGHT
    assert len(run.held) <= MAX_REQUESTS
    assert len(process._overlap._held) <= 2048
    assert len(process._overlap._waiting) <= 1024
    assert len(process.totals.counts) + len(process.totals.histograms) < 100
