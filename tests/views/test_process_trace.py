"""The trace of one process: bring-up, shutdown, and how long records wait for a run id."""

from __future__ import annotations

from tests.views.sample_run import (
    EPOCH,
    bound,
    bring_up,
    built,
    call,
    idle,
    joined,
    named,
    only,
    queried,
    registered,
    spans_of,
    started,
    the_run,
    wrapped,
)
from tracekv.journal.records import ClockAnchor, TracerFault
from tracekv.journal.vocabulary import Callback, Side
from tracekv.views.model import Status
from tracekv.views.spans import SpanView


def test_bring_up_is_one_trace_with_its_callbacks_below_one_root() -> None:
    spans = spans_of(the_run())
    root = only(spans, "bring_up")
    own = [span for span in spans if span.trace_id == root.trace_id]

    assert sorted(span.name for span in own) == [
        "__init__",
        "__init__",
        "bring_up",
        "register_forward_pass_callable",
        "register_kv_cache_layout",
        "shutdown",
        "wait_for_initialization",
    ]
    assert {span.parent_span_id for span in own if span is not root} == {root.span_id}
    assert (root.start_ns, root.end_ns) == (EPOCH, EPOCH + 310)


def test_the_root_of_bring_up_names_host_process_rank_and_what_is_not_implemented() -> None:
    attributes = only(spans_of(the_run()), "bring_up").attributes

    assert attributes["tracekv.host"] == "node-1"
    assert attributes["tracekv.pid"] == 4711
    assert (attributes["tracekv.rank"], attributes["tracekv.world"]) == (0, 1)
    assert attributes["tracekv.not_implemented"] == ["worker.get_finished"]


def test_the_registration_carries_the_layout() -> None:
    assert only(spans_of(the_run()), "register_kv_cache_layout").attributes == {
        "tracekv.callback": "worker.register_kv_cache_layout",
        "code.function.name": "pkg.mod.Worker.register_kv_cache_layout",
        "tracekv.rank": 0,
        "tracekv.step": 0,
        "tracekv.tokens_per_block": 32,
        "tracekv.dtype": "torch.bfloat16",
        "tracekv.layer_group.ids": [0, 1],
        "tracekv.layer_group.window": [0, 64],
        "tracekv.layer_group.bytes_per_page": [100, 40],
        "tracekv.layer_group.slots": [50, 60],
        "tracekv.layer_group.layers": [2, 2],
    }


def test_a_constructor_s_span_says_where_it_is_defined() -> None:
    leader = named(spans_of(the_run()), "__init__")[0]

    assert leader.attributes["tracekv.callback"] == "scheduler.__init__"
    assert leader.attributes["code.file.path"] == "/src/mod.py"
    assert leader.attributes["code.line.number"] == 10


def test_a_failed_instrument_is_a_failed_span() -> None:
    span = only(spans_of([*bring_up(), TracerFault(500, "query", "ValueError", "recorder.py:10")]), "tracer_fault")

    assert span.status is Status.ERROR
    assert span.attributes == {"tracekv.instrument": "query", "error.type": "ValueError"}


def test_records_wait_for_the_run_id_so_that_their_spans_have_it() -> None:
    view = SpanView()
    early = [started(), wrapped(Side.SCHEDULER), call(Callback.SCHEDULER_INIT, 10, 20, 0), queried()]

    assert spans_of(early, view, is_closed=False) == []
    spans = view.feed(joined(rank=3, world=4))
    assert sorted(span.name for span in spans) == ["__init__", "get_num_new_matched_tokens"]
    assert {span.attributes["tracekv.rank"] for span in spans} == {3}


def test_bring_up_is_told_without_a_rank_when_the_run_does_not_begin() -> None:
    view = SpanView()
    spans_of([started(), wrapped(Side.WORKER), registered(), queried()], view, is_closed=False)

    assert view.expire(1) == []
    told = view.expire(10_000_000_002)
    assert [span.name for span in told] == ["register_kv_cache_layout"]
    assert "tracekv.rank" not in told[0].attributes
    assert [span.name for span in view.feed(joined())] == ["get_num_new_matched_tokens"]


def test_the_wait_for_a_run_id_is_bounded() -> None:
    view = SpanView(max_held=10)
    spans = spans_of([started(), *[queried(n, n + 1, n) for n in range(20)]], view, is_closed=False)

    assert len(named(spans, "get_num_new_matched_tokens")) == 20


def test_an_unknown_rank_is_absent() -> None:
    spans = spans_of([*bring_up()[:-1], joined(rank=-1, world=-1), queried()])

    assert "tracekv.rank" not in only(spans, "get_num_new_matched_tokens").attributes


def test_polls_before_the_first_pass_belong_to_the_process() -> None:
    spans = spans_of([*bring_up(), idle(step=0, count=5)])

    assert only(spans, "get_finished").trace_id == only(spans, "bring_up").trace_id


def test_bring_up_ends_once_when_the_first_pass_begins() -> None:
    view = SpanView()
    spans = spans_of([*bring_up(), built(), bound(), built(2, 5000, 5010), bound(2, 5020, 5030)], view)

    assert len(named(spans, "bring_up")) == 1


def test_times_follow_the_clock_anchor_seen_last() -> None:
    spans = spans_of([*bring_up(), queried(1000, 1100, 1), ClockAnchor(2000, EPOCH + 2500), queried(3000, 3100, 2)])
    first, second = named(spans, "get_num_new_matched_tokens")

    assert first.start_ns == EPOCH + 1000
    assert second.start_ns == EPOCH + 3500
