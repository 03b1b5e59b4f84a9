"""The trace of one step: the callbacks as they ran, the per-layer hooks, and the links to its requests."""

from __future__ import annotations

import hashlib

from tests.views.sample_run import (
    EPOCH,
    RUN,
    bound,
    bring_up,
    built,
    call,
    dropped,
    hooks,
    idle,
    joined,
    named,
    only,
    polled,
    queried,
    registered,
    spans_of,
    started,
    stored,
    the_run,
    transferred,
    wrapped,
)
from tracekv.journal.vocabulary import Callback, Direction, Side, Source
from tracekv.views.model import Link, Span, Status
from tracekv.views.spans import SpanView


def economy() -> SpanView:
    return SpanView(detail="economy")


def step_spans(spans: list[Span]) -> list[Span]:
    root = only(spans, "step")
    return [span for span in spans if span.trace_id == root.trace_id]


def test_the_trace_of_a_step_holds_the_callbacks_of_its_pass() -> None:
    spans = step_spans(spans_of(the_run()))

    assert [span.name for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns))] == [
        "step",
        "build_connector_meta",
        "bind_connector_meta",
        "start_load_kv",
        *["wait_for_layer_load", "save_kv_layer"] * 4,
        "forward_pass_callable",
        "wait_for_save",
        "get_finished",
    ]
    root = only(spans, "step")
    assert root.trace_id == hashlib.sha256(b"tracekv\0" + RUN + b"\0step\0" + b"1").digest()[:16]
    assert {span.parent_span_id for span in spans if span is not root} == {root.span_id}
    assert root.parent_span_id is None


def test_a_step_lasts_from_its_build_to_its_last_callback() -> None:
    root = only(spans_of(the_run()), "step")

    assert (root.start_ns, root.end_ns) == (EPOCH + 1300, EPOCH + 2310)


def test_the_step_s_root_tells_requests_tokens_and_what_moved() -> None:
    assert only(spans_of(the_run()), "step").attributes == {
        "tracekv.step": 1,
        "tracekv.rank": 0,
        "tracekv.requests": 1,
        "tracekv.new_requests": 1,
        "tracekv.scheduled_tokens": 480,
        "tracekv.load.pages": 3,
        "tracekv.load.bytes": 240,
        "tracekv.save.pages": 1,
        "tracekv.save.bytes": 100,
        "tracekv.layer_group.ids": [0, 1],
        "tracekv.layer_group.window": [0, 64],
        "tracekv.layer_group.load_bytes": [200, 40],
        "tracekv.layer_group.save_bytes": [100, 0],
    }


def test_a_step_links_to_the_roots_of_its_requests() -> None:
    spans = spans_of(the_run())
    request = only(spans, "request")

    assert only(spans, "step").links == [
        Link(request.trace_id, request.span_id, {"tracekv.request.id": "7", "tracekv.scheduled_tokens": 480})
    ]


def test_links_beyond_the_limit_are_counted() -> None:
    root = only(spans_of([*bring_up(), built(request_ids=range(200))]), "step")

    assert len(root.links) == 128
    assert root.dropped_links == 72
    assert root.attributes["tracekv.requests"] == 200


def test_the_plan_of_a_step_carries_the_pages_it_hands_out() -> None:
    build = only(spans_of(the_run()), "build_connector_meta")

    expected = {
        "tracekv.callback": "scheduler.build_connector_meta",
        "tracekv.metadata.present": True,
        "tracekv.requests": 1,
        "tracekv.pages": 5,
        "tracekv.pages.absent": 1,
        "tracekv.bytes": 380,
        "tracekv.source": "eligible",
        "tracekv.layer_group.bytes": [300, 80],
    }
    assert {name: build.attributes[name] for name in expected} == expected


def test_binding_tells_size_and_digest_of_the_metadata() -> None:
    attributes = only(spans_of(the_run()), "bind_connector_meta").attributes

    assert attributes["tracekv.metadata.envelope"] is True
    assert attributes["tracekv.metadata.bytes"] == 99
    assert attributes["tracekv.metadata.digest"] == "0102"


def test_start_load_kv_and_wait_for_save_carry_what_was_reported_within_them() -> None:
    spans = spans_of(the_run())
    loads, saves = only(spans, "start_load_kv").attributes, only(spans, "wait_for_save").attributes

    assert (loads["tracekv.source"], loads["tracekv.bytes"], loads["tracekv.pages"]) == ("reported", 240, 3)
    assert loads["tracekv.layer_group.bytes"] == [200, 40]
    assert (saves["tracekv.layer_group.ids"], saves["tracekv.layer_group.bytes"]) == ([0], [100])


def test_the_best_source_of_what_moved_is_named_and_counted_alone() -> None:
    moves = [
        transferred(Direction.LOAD, 0, [1], 100, 1500, 1510, source=source)
        for source in (Source.REPORTED, Source.PLANNED, Source.OBSERVED)
    ]
    span = only(spans_of([*bring_up(), built(), *moves, call(Callback.START_LOAD_KV, 1490, 1570)]), "start_load_kv")

    assert span.attributes["tracekv.source"] == "reported"
    assert span.attributes["tracekv.bytes"] == 100


def test_full_detail_is_a_span_per_layer_and_hook() -> None:
    waits = named(spans_of(the_run()), "wait_for_layer_load")

    assert [(span.start_ns - EPOCH, span.end_ns - EPOCH) for span in waits] == [
        (1600, 1610),
        (1700, 1730),
        (1800, 1805),
        (1900, 1920),
    ]
    assert waits[2].attributes == {
        "tracekv.callback": "worker.wait_for_layer_load",
        "code.function.name": "pkg.mod.Worker.wait_for_layer_load",
        "tracekv.rank": 0,
        "tracekv.step": 1,
        "tracekv.layer": 2,
        "tracekv.layer_group.id": 1,
    }


def test_economy_is_a_span_per_layer_group_and_hook_with_count_sum_and_maximum() -> None:
    spans = spans_of(the_run(), economy())
    waits, saves = named(spans, "wait_for_layer_load"), named(spans, "save_kv_layer")

    assert len(waits) == len(saves) == 2
    assert waits[0].attributes == {
        "tracekv.callback": "worker.wait_for_layer_load",
        "code.function.name": "pkg.mod.Worker.wait_for_layer_load",
        "tracekv.rank": 0,
        "tracekv.step": 1,
        "tracekv.layer_group.id": 0,
        "tracekv.calls": 2,
        "tracekv.time.sum_ns": 40,
        "tracekv.time.max_ns": 30,
    }
    assert (waits[0].start_ns, waits[0].end_ns) == (EPOCH + 1600, EPOCH + 1730)
    assert saves[1].attributes["tracekv.time.sum_ns"] == 7


def test_layers_that_the_layout_does_not_name_are_the_unknown_group() -> None:
    records = [record for record in the_run() if record != registered()]

    (waits,) = named(spans_of(records, economy()), "wait_for_layer_load")
    assert waits.attributes["tracekv.layer_group.id"] == -1
    assert waits.attributes["tracekv.calls"] == 4


def test_pages_of_an_unknown_group_have_no_bytes_rather_than_zero() -> None:
    records = [record for record in the_run() if record != registered()]
    attributes = only(spans_of(records), "update_state_after_alloc_by_layer_group").attributes

    assert attributes["tracekv.pages"] == 5
    assert attributes["tracekv.layer_group.window"] == [-1, -1]
    assert "tracekv.bytes" not in attributes
    assert "tracekv.layer_group.bytes" not in attributes


def test_layers_without_a_call_and_hooks_that_raised_are_no_hook_spans() -> None:
    raised = [
        hooks(waits=[(0, 0), (1700, 1710), (1800, 0), (0, 0)], saves=[]),
        call(Callback.WAIT_FOR_LAYER_LOAD, 1800, 1820, 1, "TimeoutError"),
    ]
    spans = named(spans_of([*bring_up(), built(), *raised]), "wait_for_layer_load")

    assert [span.attributes.get("tracekv.layer") for span in spans] == [1, None]
    assert [span.status for span in spans] == [Status.UNSET, Status.ERROR]
    assert spans[1].attributes["error.type"] == "TimeoutError"


def test_idle_polls_are_one_span_that_counts_them_and_do_not_stretch_the_step() -> None:
    spans = spans_of([*bring_up(), built(), idle(count=900, first=2000, last=900_000, longest=30)])
    polls = only(spans, "get_finished")

    assert polls.attributes == {
        "tracekv.callback": "worker.get_finished",
        "code.function.name": "pkg.mod.Worker.get_finished",
        "tracekv.rank": 0,
        "tracekv.step": 1,
        "tracekv.calls": 900,
        "tracekv.time.sum_ns": 26_995,
        "tracekv.time.max_ns": 30,
    }
    assert (polls.start_ns, polls.end_ns) == (EPOCH + 2000, EPOCH + 900_000)
    assert only(spans, "step").end_ns == EPOCH + 1350


def test_a_poll_with_ids_counts_and_links_them() -> None:
    spans = spans_of([*bring_up(), queried(), built(), polled(1500, 1510, saving_given=[7], loading_returned=[7, 8])])
    span = only(spans, "get_finished")
    request = only(spans, "request")

    assert span.attributes["tracekv.saving.given"] == 1
    assert span.attributes["tracekv.loading.returned"] == 2
    assert [link.attributes["tracekv.request.id"] for link in span.links] == ["7", "8"]
    assert (span.links[0].trace_id, span.links[0].span_id) == (request.trace_id, request.span_id)


def test_a_step_ends_when_the_one_after_the_next_begins() -> None:
    view = SpanView()

    assert named(spans_of([*bring_up(), built(1), built(2, 3000, 3010)], view, is_closed=False), "step") == []
    (root,) = named(view.feed(built(3, 4000, 4010)), "step")
    assert root.attributes["tracekv.step"] == 1


def test_the_last_step_before_a_pause_ends_after_a_second() -> None:
    view = SpanView()
    spans_of([*bring_up(), built(1)], view, is_closed=False)

    assert view.expire(1_000_000_000) == []
    assert only(view.expire(1_000_001_351), "step").attributes["tracekv.step"] == 1


def test_a_record_that_comes_after_its_step_s_end_makes_no_second_root() -> None:
    late = [call(Callback.WAIT_FOR_SAVE, 2000, 2040, step=1), idle(step=1)]
    spans = spans_of([*bring_up(), built(1), built(2, 3000, 3010), built(3, 4000, 4010), *late])
    first = named(spans, "step")[0]

    assert [span.attributes["tracekv.step"] for span in named(spans, "step")] == [1, 2, 3]
    assert only(spans, "wait_for_save").parent_span_id == first.span_id
    assert only(spans, "wait_for_save").trace_id == first.trace_id


def test_a_rank_without_the_scheduler_adds_to_the_leader_s_step() -> None:
    leader = only(spans_of(the_run()), "step")
    records = [started(b"another-process-"), wrapped(Side.WORKER), bound(), joined(rank=1, world=2), hooks()]
    spans = spans_of(records)

    assert named(spans, "step") == []
    assert {(s.trace_id, s.parent_span_id) for s in named(spans, "save_kv_layer")} == {
        (leader.trace_id, leader.span_id)
    }


def test_a_worker_that_is_bound_bare_metadata_roots_its_steps_itself() -> None:
    records = [started(), wrapped(Side.WORKER), registered(), bound(has_envelope=False), hooks()]
    view = SpanView()
    spans = spans_of(records, view)

    assert only(spans, "step").trace_id == only(spans, "bind_connector_meta").trace_id
    assert "tracekv.rank" not in only(spans, "step").attributes


def test_a_store_operation_for_no_request_has_a_trace_of_its_own_linked_to_the_step() -> None:
    spans = spans_of([*bring_up(), built(), stored(request_id=None), stored(2061, 2063, request_id=None)])
    step = only(spans, "step")
    first, second = named(spans, "store.put")

    assert first.trace_id == second.trace_id != step.trace_id
    assert first.parent_span_id is None
    assert first.links == [Link(step.trace_id, step.span_id)]
    assert first.span_id != second.span_id


def test_a_drop_for_no_request_is_an_event_of_the_step_or_a_span_outside_of_any() -> None:
    assert [event.name for event in only(spans_of([*bring_up(), built(), dropped(1400, None)]), "step").events] == [
        "drop"
    ]
    assert only(spans_of([*bring_up(), dropped(1400, None)]), "drop").attributes["tracekv.reason"] == "queue_full"


def test_a_callback_that_this_version_does_not_know_is_still_a_span() -> None:
    unknown = call(Callback.START_LOAD_KV, 1500, 1510)
    unknown.callback = 60
    span = only(spans_of([*bring_up(), built(), unknown]), "callback_60")

    assert span.attributes["tracekv.callback"] == "worker.callback_60"
