"""Which requests and steps are exported, and that every rank decides alike."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.views.sample_run import (
    REQUEST,
    RUN,
    bound,
    bring_up,
    built,
    call,
    dropped,
    finished,
    hooks,
    idle,
    joined,
    looked_up,
    named,
    only,
    queried,
    registered,
    spans_of,
    started,
    stored,
    the_run,
    transferred,
    wrapped,
)
from tracekv.journal.records import Enqueued, Record
from tracekv.journal.vocabulary import Callback, Direction, Side
from tracekv.views import ids
from tracekv.views.model import Span
from tracekv.views.sampling import Caller, Callers, Sampler, caller_of, sampler_from
from tracekv.views.spans import SpanView

CALLER = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
UNSAMPLED = CALLER[:-1] + "0"
OFF = Sampler(0)


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tracekv.views.sampling._said", set())


def a_pass(step: int, at: int, *, moves: Iterator[int] | tuple[int, ...] = ()) -> list[Record]:
    """A pass without hooks that take part in another one's time; ``moves`` are the requests that it loads."""
    return [
        built(step, at, at + 10),
        bound(step, at + 20, at + 30),
        call(Callback.START_LOAD_KV, at + 40, at + 50, step),
        *[transferred(Direction.LOAD, 0, [1], 1, at + 41, at + 49, step=step, request_id=i) for i in moves],
        hooks(step, [(at + 60, at + 61)], [(at + 62, at + 63)]),
        call(Callback.WAIT_FOR_SAVE, at + 70, at + 80, step),
    ]


def steps_of(spans: list[Span]) -> list[int]:
    return [int(span.attributes["tracekv.step"]) for span in named(spans, "step")]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("environ", "sampler"),
    [
        ({}, Sampler(1 << 64, follows_caller=True)),
        ({"OTEL_TRACES_SAMPLER": "always_on"}, Sampler(1 << 64, follows_caller=False)),
        ({"OTEL_TRACES_SAMPLER": "always_off"}, Sampler(0, follows_caller=False)),
        ({"OTEL_TRACES_SAMPLER": "parentbased_always_off"}, Sampler(0, follows_caller=True)),
        ({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.25"}, Sampler(1 << 62, False)),
        ({"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.5"}, Sampler(1 << 63, True)),
        ({"OTEL_TRACES_SAMPLER": "traceidratio"}, Sampler(1 << 64, False)),
        ({"OTEL_TRACES_SAMPLER": "TraceIdRatio", "OTEL_TRACES_SAMPLER_ARG": "2"}, Sampler(1 << 64, False)),
        ({"OTEL_TRACES_SAMPLER": "jaeger_remote"}, Sampler(1 << 64, False)),
    ],
)
def test_the_environment_names_the_sampler(environ: dict[str, str], sampler: Sampler) -> None:
    assert sampler_from(environ) == sampler


def test_an_unknown_sampler_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        sampler_from({"OTEL_TRACES_SAMPLER": "jaeger_remote"})

    assert len(caplog.records) == 1
    assert "always_on" in caplog.text


def test_the_sdk_decides_alike_by_the_same_ratio() -> None:
    from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased

    theirs, ours = (
        TraceIdRatioBased(0.3),
        sampler_from({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.3"}),
    )
    traces = [ids.trace_id(RUN, "request", n) for n in range(500)]
    chosen = [ours.is_exported(trace) for trace in traces]

    assert chosen == [
        theirs.should_sample(None, int.from_bytes(trace, "big"), "x").decision is Decision.RECORD_AND_SAMPLE
        for trace in traces
    ]
    assert 100 < sum(chosen) < 200


@pytest.mark.parametrize(
    ("header", "caller"),
    [
        (CALLER, Caller(bytes.fromhex("0123456789abcdef" * 2), bytes.fromhex("0123456789abcdef"), True)),
        (UNSAMPLED, Caller(bytes.fromhex("0123456789abcdef" * 2), bytes.fromhex("0123456789abcdef"), False)),
        ("cc" + CALLER[2:] + "-more", Caller(bytes.fromhex("0123456789abcdef" * 2), bytes.fromhex("0123456789abcdef"), True)),
        ("ff" + CALLER[2:], None),
        (f"00-{'0' * 32}-0123456789abcdef-01", None),
        (f"00-{'1' * 32}-{'0' * 16}-01", None),
        ("nonsense", None),
        (None, None),
    ],
)  # fmt: skip
def test_a_traceparent_is_read_as_w3c_has_it(header: str | None, caller: Caller | None) -> None:
    assert caller_of(header) == caller


def test_known_callers_are_bounded_and_the_oldest_goes_first() -> None:
    callers = Callers(at_most=2)
    for n in range(3):
        callers.learn(RUN, Enqueued(1, n, None, 1, CALLER))

    assert [callers.of(RUN, n) is not None for n in range(3)] == [False, True, True]


def test_nothing_is_made_of_a_request_that_is_not_exported() -> None:
    everything = [
        *the_run(),
        looked_up(3000, 3010),
        dropped(3100),
        stored(3200, 3300),
        stored(3200, 3300, request_id=None),
    ]
    view = SpanView(detail="full", sampler=OFF, step_sample=100)

    assert spans_of(everything, view) == []


def test_all_ranks_export_the_same_requests() -> None:
    half = Sampler(1 << 63)
    numbers = range(100)
    leader = spans_of(
        [*bring_up(), *[record for n in numbers for record in (queried(n * 10, n * 10 + 5, n),)]],
        SpanView(sampler=half),
    )
    worker = spans_of(
        [
            started(b"another-process-"), wrapped(Side.WORKER), registered(), bound(), joined(rank=1, world=2),
            *[transferred(Direction.LOAD, 0, [1], 1, n * 10, n * 10 + 5, request_id=n) for n in numbers],
        ],
        SpanView(sampler=half),
    )  # fmt: skip
    chosen = {span.attributes["tracekv.request.id"] for span in named(leader, "request")}

    assert chosen == {span.attributes["tracekv.request.id"] for span in named(worker, "load")}
    assert 20 < len(chosen) < 80


def test_a_step_that_moves_nothing_is_exported_once_in_so_many() -> None:
    records = [record for n in range(1, 23) for record in a_pass(n, n * 100)]
    spans = spans_of([*bring_up(), *records], SpanView(step_sample=10))

    assert steps_of(spans) == [1, 11, 21]
    assert {span.attributes["tracekv.step"] for span in named(spans, "start_load_kv")} == {1, 11, 21}


def test_a_step_that_loads_an_exported_request_is_exported_whole() -> None:
    records = [*a_pass(2, 200), *a_pass(3, 300, moves=(REQUEST,)), *a_pass(4, 400), *a_pass(5, 500)]
    spans = spans_of([*bring_up(), *records], SpanView(step_sample=10))

    assert steps_of(spans) == [3]
    told = sorted(span.name for span in spans if span.attributes.get("tracekv.step") == 3)
    assert told == sorted(
        ["step", "build_connector_meta", "bind_connector_meta", "start_load_kv", "load", "wait_for_layer_load",
         "save_kv_layer", "wait_for_save"]
    )  # fmt: skip
    assert only(spans, "step").attributes["tracekv.requests"] == 1


def test_a_step_that_loads_only_what_is_not_exported_is_not() -> None:
    spans = spans_of(
        [*bring_up(), *a_pass(2, 200, moves=(REQUEST,)), idle(2), *a_pass(3, 300)], SpanView(sampler=OFF, step_sample=1)
    )

    assert spans == []


def test_a_step_links_only_to_exported_requests() -> None:
    half = Sampler(1 << 63)
    numbers = list(range(40))
    exported = {n for n in numbers if half.is_exported(ids.trace_id(RUN, "request", n))}
    root = only(spans_of([*bring_up(), built(1, 10, 20, numbers)], SpanView(sampler=half, max_links=5)), "step")

    assert len(root.links) == 5
    assert {int(str(link.attributes["tracekv.request.id"])) for link in root.links} <= exported
    assert root.dropped_links == len(exported) - 5


def test_a_caller_s_decision_goes_first_where_the_sampler_follows_it() -> None:
    unsampled = [*bring_up(), Enqueued(900, REQUEST, 70, 1024, UNSAMPLED), queried(), finished()]
    sampled = [*bring_up(), Enqueued(900, REQUEST, 70, 1024, CALLER), queried(), finished()]

    assert named(spans_of(unsampled), "request") == []
    assert len(named(spans_of(unsampled, SpanView(sampler=Sampler(follows_caller=False))), "request")) == 1
    assert len(named(spans_of(sampled, SpanView(sampler=OFF)), "request")) == 1


def test_a_rank_that_knows_the_caller_from_another_s_journal_joins_the_same_trace() -> None:
    callers = Callers()
    leader = [
        started(), wrapped(Side.SCHEDULER), joined(0, 2), Enqueued(900, REQUEST, 70, 1024, CALLER), queried(), finished(),
    ]  # fmt: skip
    worker = [
        started(b"another-process-"), wrapped(Side.WORKER), registered(), joined(1, 2),
        transferred(Direction.LOAD, 0, [1], 100, 1500, 1540),
    ]  # fmt: skip
    root = only(spans_of(leader, SpanView(callers=callers)), "request")
    knowing = only(spans_of(worker, SpanView(callers=callers)), "load")
    alone = only(spans_of(worker), "load")

    assert (knowing.trace_id, knowing.parent_span_id) == (root.trace_id, root.span_id)
    assert alone.trace_id == ids.trace_id(RUN, "request", REQUEST) != root.trace_id
    # Whoever reads that rank alone still finds its part: the root links to it.
    (link,) = root.links
    assert (link.trace_id, link.span_id) == (alone.trace_id, alone.parent_span_id)


def test_a_step_without_a_number_holds_a_bounded_number_of_records() -> None:
    view = SpanView(step_sample=100)
    spans_of(bring_up(), view, is_closed=False)
    spans_of([hooks(0) for _ in range(1000)], view, is_closed=False)

    assert max(len(step.held) for step in view._steps._open.values()) <= 64


@pytest.mark.parametrize(("detail", "spans"), [("full", 4), ("economy", 2), ("off", 0)])
def test_detail_may_change_between_two_records(detail: str, spans: int) -> None:
    view = SpanView(detail="economy")
    spans_of([*bring_up(), built()], view, is_closed=False)
    view.detail = detail

    assert len(named(view.feed(hooks()), "wait_for_layer_load")) == spans
