"""The trace of one request: who is whose child, when, and with which facts."""

from __future__ import annotations

import hashlib

import pytest

from tests.views.sample_run import (
    EPOCH,
    PROCESS,
    REQUEST,
    RUN,
    allocated,
    bound,
    bring_up,
    built,
    call,
    dropped,
    finished,
    joined,
    looked_up,
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
from tracekv.journal.records import CancelLoadCall, Enqueued, Prefetch, RequestResetCall
from tracekv.journal.vocabulary import Callback, Direction, Outcome, PrefetchFate, Side, Tier
from tracekv.views.model import Kind, Link, Span, Status
from tracekv.views.spans import SpanView


def request_spans(spans: list[Span]) -> list[Span]:
    root = only(spans, "request")
    return [span for span in spans if span.trace_id == root.trace_id]


def test_the_trace_of_a_request_holds_its_callbacks_and_what_moved() -> None:
    names = sorted(span.name for span in request_spans(spans_of(the_run())))

    assert names == [
        "get_num_new_matched_tokens",
        "load",
        "load",
        "lookup",
        "request",
        "request_finished_by_layer_group",
        "save",
        "store.put",
        "update_state_after_alloc_by_layer_group",
    ]


def test_a_request_s_trace_id_is_the_hash_of_run_and_request() -> None:
    root = only(spans_of(the_run()), "request")

    assert root.trace_id == hashlib.sha256(b"tracekv\0" + RUN + b"\0request\0" + b"7").digest()[:16]
    assert root.parent_span_id is None
    assert len(root.span_id) == 8


def test_every_span_of_a_request_hangs_below_its_root_and_the_lookup_below_its_query() -> None:
    spans = request_spans(spans_of(the_run()))
    root, query, lookup = (only(spans, name) for name in ("request", "get_num_new_matched_tokens", "lookup"))

    assert lookup.parent_span_id == query.span_id
    assert {span.parent_span_id for span in spans if span not in (root, lookup)} == {root.span_id}
    assert len({span.span_id for span in spans}) == len(spans)


def test_the_root_lasts_from_the_query_to_request_finished() -> None:
    root = only(spans_of(the_run()), "request")

    assert (root.start_ns, root.end_ns) == (EPOCH + 1000, EPOCH + 2250)


def test_the_root_tells_the_story() -> None:
    root = only(spans_of(the_run()), "request")

    expected = {
        "tracekv.request.id": "7",
        "gen_ai.request.id": "70",
        "tracekv.request.outcome": "finished",
        "tracekv.request.queries": 1,
        "tracekv.prompt_tokens": 1024,
        "tracekv.computed_tokens": 64,
        "tracekv.stored_tokens": 960,
        "tracekv.staged_tokens": 512,
        "tracekv.offered_tokens": 512,
        "tracekv.honoured_tokens": 480,
        "tracekv.loaded_tokens": 96,
        "tracekv.saved_tokens": 32,
        "tracekv.scheduled_tokens": 480,
        "tracekv.miss_reason": "not_staged",
        "tracekv.bounding_layer_group": 0,
        "tracekv.load.pages": 3,
        "tracekv.load.bytes": 240,
        "tracekv.save.pages": 1,
        "tracekv.save.bytes": 100,
        "tracekv.load.tiers": ["host", "object"],
        "tracekv.save.tiers": ["host"],
        "tracekv.layer_group.ids": [0, 1],
        "tracekv.layer_group.window": [0, 64],
        "tracekv.layer_group.load_bytes": [200, 40],
        "tracekv.layer_group.save_bytes": [100, 0],
        "tracekv.time.query_ns": 100,
        "tracekv.time.waited_ns": 20,
        "tracekv.time.copy_ns": 8,
        "tracekv.rank": 0,
        "tracekv.is_async": False,
    }
    assert {name: root.attributes[name] for name in expected} == expected
    assert root.status is Status.UNSET


def test_the_query_s_span_has_callback_rank_step_and_function() -> None:
    query = only(spans_of(the_run()), "get_num_new_matched_tokens")

    assert query.attributes == {
        "tracekv.callback": "scheduler.get_num_new_matched_tokens",
        "code.function.name": "pkg.mod.Leader.get_num_new_matched_tokens",
        "tracekv.rank": 0,
        "tracekv.step": 0,
        "tracekv.request.id": "7",
        "tracekv.prompt_tokens": 1024,
        "tracekv.computed_tokens": 64,
        "tracekv.offered_tokens": 512,
        "tracekv.is_async": False,
    }
    assert (query.start_ns, query.end_ns) == (EPOCH + 1000, EPOCH + 1100)


def test_pages_of_an_allocation_are_eligible_bytes_and_absent_pages_are_counted_apart() -> None:
    alloc = only(spans_of(the_run()), "update_state_after_alloc_by_layer_group")

    expected = {
        "tracekv.source": "eligible",
        "tracekv.pages": 5,
        "tracekv.pages.absent": 1,
        "tracekv.bytes": 380,
        "tracekv.layer_group.ids": [0, 1],
        "tracekv.layer_group.pages": [3, 2],
        "tracekv.layer_group.bytes": [300, 80],
        "tracekv.layer_group.window": [0, 64],
        "tracekv.honoured_tokens": 480,
    }
    assert {name: alloc.attributes[name] for name in expected} == expected


def test_a_load_tells_source_tier_pages_bytes_and_the_parts_of_its_time() -> None:
    spans = spans_of(the_run())
    load = named(spans, "load")[1]
    step = only(spans, "step")

    assert load.attributes == {
        "tracekv.request.id": "7",
        "tracekv.source": "reported",
        "tracekv.direction": "load",
        "tracekv.tier": "object",
        "tracekv.layer_group.id": 1,
        "tracekv.pages": 1,
        "tracekv.pages.absent": 1,
        "tracekv.bytes": 40,
        "tracekv.layer_group.ids": [1],
        "tracekv.layer_group.pages": [1],
        "tracekv.layer_group.bytes": [40],
        "tracekv.layer_group.window": [64],
        "tracekv.tokens": 96,
        "tracekv.time.queued_ns": 1,
        "tracekv.time.read_ns": 2,
        "tracekv.time.verify_ns": 3,
        "tracekv.time.copy_ns": 4,
        "tracekv.time.stall_ns": 5,
        "tracekv.step": 1,
        "tracekv.rank": 0,
    }
    assert load.links == [Link(step.trace_id, step.span_id)]


def test_a_failed_transfer_is_an_error_and_moves_nothing() -> None:
    failed = transferred(Direction.LOAD, 0, [3], 100, 1500, 1510, error="OSError")
    spans = spans_of([*bring_up(), queried(), failed, finished()])

    assert only(spans, "load").status is Status.ERROR
    assert only(spans, "load").attributes["error.type"] == "OSError"
    assert only(spans, "request").attributes["tracekv.load.bytes"] == 0
    assert only(spans, "request").status is Status.UNSET


def test_a_lookup_told_after_its_query_is_still_its_child() -> None:
    spans = spans_of([*bring_up(), queried(), looked_up(), finished()])

    assert only(spans, "lookup").parent_span_id == only(spans, "get_num_new_matched_tokens").span_id
    assert only(spans, "request").attributes["tracekv.miss_reason"] == "not_staged"


def test_a_full_hit_has_no_miss_reason() -> None:
    spans = spans_of([*bring_up(), looked_up(reason=None, bounding_layer_group=None), queried(), finished()])

    for name in ("lookup", "request"):
        assert "tracekv.miss_reason" not in only(spans, name).attributes
        assert "tracekv.bounding_layer_group" not in only(spans, name).attributes


def test_honoured_tokens_that_the_runtime_does_not_tell_are_absent_not_zero() -> None:
    spans = spans_of([*bring_up(), queried(), allocated(honoured=None), finished()])

    assert "tracekv.honoured_tokens" not in only(spans, "request").attributes


def test_a_second_query_continues_the_story() -> None:
    replay = [
        RequestResetCall(Callback.REQUEST_RESET, 1500, 1510, 1, None, REQUEST),
        queried(1600, 1700, computed_tokens=128, offered_tokens=0),
    ]
    spans = spans_of([*bring_up(), queried(), allocated(), *replay, finished()])
    root = only(spans, "request")

    assert len(named(spans, "get_num_new_matched_tokens")) == 2
    assert root.attributes["tracekv.request.queries"] == 2
    assert root.attributes["tracekv.computed_tokens"] == 128
    assert root.attributes["tracekv.time.query_ns"] == 200
    assert root.start_ns == EPOCH + 1000
    assert [event.name for event in root.events] == ["request_reset"]
    assert "tracekv.honoured_tokens" not in root.attributes


def test_a_request_announced_as_finished_twice_has_one_root() -> None:
    spans = spans_of([*bring_up(), queried(), finished(), finished(3000, 3010)])

    assert len(named(spans, "request_finished_by_layer_group")) == 2
    assert len(named(spans, "request")) == 1
    assert {span.parent_span_id for span in named(spans, "request_finished_by_layer_group")} == {
        only(spans, "request").span_id
    }


def test_a_story_that_goes_on_after_its_end_is_a_further_part_below_the_first() -> None:
    spans = spans_of([*bring_up(), queried(), finished(), queried(3000, 3100), finished(4000, 4010)])
    first, second = named(spans, "request")

    assert second.trace_id == first.trace_id
    assert second.parent_span_id == first.span_id != second.span_id
    assert second.attributes["tracekv.request.part"] == 1
    assert named(spans, "get_num_new_matched_tokens")[1].parent_span_id == second.span_id


def test_kept_pages_keep_the_request_open_until_get_finished_gives_it_back() -> None:
    spans = spans_of(
        [*bring_up(), queried(), finished(keeps_pages=True), polled(9000, 9050, step=1, saving_returned=[REQUEST])]
    )
    root = only(spans, "request")

    assert root.end_ns == EPOCH + 9050
    assert root.attributes["tracekv.held.pages"] == 4
    assert root.attributes["tracekv.held.time_ns"] == 9050 - 2250
    assert root.attributes["tracekv.keeps_pages"] is True
    assert [event.name for event in root.events] == ["saving_finished"]


def test_a_request_that_is_never_announced_ends_as_abandoned_at_the_close() -> None:
    root = only(spans_of([*bring_up(), queried(), built()]), "request")

    assert root.attributes["tracekv.request.outcome"] == "abandoned"
    assert root.end_ns == EPOCH + 1350
    assert root.status is Status.UNSET


def test_a_quiet_request_ends_as_abandoned_after_its_time_and_not_before() -> None:
    view = SpanView(request_timeout_s=1.0)
    spans_of([*bring_up(), queried(0, 100)], view, is_closed=False)

    assert named(view.expire(1_000_000_000), "request") == []
    assert only(view.expire(1_000_000_101), "request").attributes["tracekv.request.outcome"] == "abandoned"
    assert view.abandoned == 1


def test_open_requests_are_bounded_and_the_one_quiet_for_longest_goes_first() -> None:
    view = SpanView(max_requests=2)
    spans = spans_of(
        [*bring_up(), queried(1000, 1010, 1), queried(1020, 1030, 2), allocated(1040, 1050, 1), queried(1060, 1070, 3)],
        view,
        is_closed=False,
    )

    assert only(spans, "request").attributes["tracekv.request.id"] == "2"


def test_a_drop_is_an_event_of_its_open_request() -> None:
    (event,) = only(spans_of(the_run()), "request").events

    assert (event.name, event.unix_ns) == ("drop", EPOCH + 2070)
    assert event.attributes == {
        "tracekv.direction": "save",
        "tracekv.reason": "queue_full",
        "tracekv.blocks": 3,
        "tracekv.bytes": 300,
        "tracekv.layer_group.id": 0,
    }


def test_a_drop_after_the_end_is_a_span_of_the_request_s_trace() -> None:
    spans = spans_of([*bring_up(), queried(), finished(), dropped(9000)])
    root = only(spans, "request")

    assert (only(spans, "drop").trace_id, only(spans, "drop").parent_span_id) == (root.trace_id, root.span_id)


def test_a_prefetch_is_an_event_with_its_fate() -> None:
    prefetch = Prefetch(1500, REQUEST, PrefetchFate.LATE, 2, 200, 30)
    (event,) = only(spans_of([*bring_up(), queried(), prefetch, finished()]), "request").events

    assert event.name == "prefetch"
    assert event.attributes == {
        "tracekv.prefetch.fate": "late",
        "tracekv.blocks": 2,
        "tracekv.bytes": 200,
        "tracekv.prefetch.lead_ns": 30,
    }


def test_a_store_operation_is_a_client_span_with_bucket_and_attempts() -> None:
    put = only(spans_of(the_run()), "store.put")

    assert put.kind is Kind.CLIENT
    assert put.status is Status.UNSET
    assert put.attributes == {
        "tracekv.store.engine": "s3",
        "tracekv.store.outcome": "ok",
        "tracekv.store.attempts": 2,
        "tracekv.store.requests": 1,
        "tracekv.store.breaker": "closed",
        "aws.s3.bucket": "kv",
        "tracekv.key": "ee",
        "tracekv.rank": 0,
        "tracekv.blocks": 2,
        "tracekv.bytes": 80,
        "tracekv.layer_group.id": 1,
        "tracekv.request.id": "7",
        "tracekv.time.queued_ns": 6,
        "tracekv.time.transfer_ns": 3,
        "tracekv.time.verify_ns": 1,
    }


@pytest.mark.parametrize(
    ("outcome", "error", "error_type"),
    [
        (Outcome.MISSING, None, None),
        (Outcome.EXISTS, None, None),
        (Outcome.TRUNCATED, None, "truncated"),
        (Outcome.UNAVAILABLE, "ConnectionError", "ConnectionError"),
    ],
)
def test_what_is_not_there_is_no_error_and_what_is_broken_is_one(
    outcome: Outcome, error: str | None, error_type: str | None
) -> None:
    span = only(spans_of([*bring_up(), stored(outcome=outcome, error=error)]), "store.put")

    assert span.attributes.get("error.type") == error_type
    assert (span.status is Status.ERROR) == (error_type is not None)


def test_a_local_store_s_span_is_internal() -> None:
    span = only(spans_of([*bring_up(), stored(engine="local", bucket=None)]), "store.put")

    assert span.kind is Kind.INTERNAL
    assert "aws.s3.bucket" not in span.attributes


def test_a_cancelled_load_names_its_tokens() -> None:
    cancelled = CancelLoadCall(Callback.CANCEL_LOAD, 1500, 1510, 1, None, REQUEST, 64, 128)
    span = only(spans_of([*bring_up(), queried(), cancelled]), "cancel_load")

    assert (span.attributes["tracekv.cancel.start"], span.attributes["tracekv.cancel.end"]) == (64, 128)


def test_an_enqueued_request_begins_there_and_joins_its_caller_s_trace() -> None:
    caller = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
    spans = spans_of([*bring_up(), Enqueued(900, REQUEST, 70, 1024, caller), queried(), looked_up(), finished()])
    root, query = only(spans, "request"), only(spans, "get_num_new_matched_tokens")

    assert root.start_ns == EPOCH + 900
    assert root.attributes["tracekv.time.enqueued_ns"] == 100
    assert root.trace_id == query.trace_id == bytes.fromhex("0123456789abcdef" * 2)
    assert root.parent_span_id == bytes.fromhex("0123456789abcdef")
    assert query.parent_span_id == root.span_id
    assert root.links == ()


def test_two_requests_of_one_caller_have_roots_of_their_own() -> None:
    caller = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
    records = [record for n in (7, 8) for record in (Enqueued(900, n, 70, 1024, caller), queried(request_id=n))]
    first, second = named(spans_of([*bring_up(), *records]), "request")

    assert first.trace_id == second.trace_id
    assert first.span_id != second.span_id


def test_a_caller_told_after_the_first_query_is_linked() -> None:
    caller = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
    root = only(spans_of([*bring_up(), queried(), Enqueued(1150, REQUEST, 70, 1024, caller), finished()]), "request")

    assert root.parent_span_id is None
    assert root.links == [Link(bytes.fromhex("0123456789abcdef" * 2), bytes.fromhex("0123456789abcdef"))]


@pytest.mark.parametrize("header", ["", "nonsense", "00-xyz-0123456789abcdef-01", f"00-{'g' * 32}-{'0' * 16}-01"])
def test_a_trace_context_that_can_not_be_read_joins_nothing(header: str) -> None:
    root = only(spans_of([*bring_up(), Enqueued(900, REQUEST, 70, 1024, header), queried(), finished()]), "request")

    assert root.links == ()
    assert root.parent_span_id is None


def test_two_processes_traces_of_one_request_share_trace_and_root() -> None:
    leader = only(spans_of(the_run()), "request")
    worker = spans_of(
        [
            started(b"another-process-", EPOCH + 5),
            wrapped(Side.WORKER),
            registered(),
            bound(),
            joined(rank=1, world=2),
            transferred(Direction.LOAD, 0, [1], 100, 1500, 1540),
        ]
    )
    load = only(worker, "load")

    assert (load.trace_id, load.parent_span_id) == (leader.trace_id, leader.span_id)
    assert load.attributes["tracekv.rank"] == 1
    assert load.start_ns == EPOCH + 5 + 1500
    assert named(worker, "request") == []


def test_another_run_s_request_of_the_same_number_has_another_trace() -> None:
    other = [record for record in the_run() if record != joined()]
    other.insert(1, joined(run_id=b"another-run-id--"))

    assert only(spans_of(other), "request").trace_id != only(spans_of(the_run()), "request").trace_id


def test_without_a_run_id_traces_come_from_the_process_id() -> None:
    records = [record for record in the_run() if record != joined()]
    root = only(spans_of(records), "request")

    assert root.trace_id == hashlib.sha256(b"tracekv\0" + PROCESS + b"\0request\0" + b"7").digest()[:16]
    assert "tracekv.run" not in root.attributes


def test_hashed_request_ids_appear_nowhere_in_clear() -> None:
    request_id, client_id = 987_654_321, 123_456_789
    records = [
        *bring_up(),
        looked_up(request_id=request_id),
        queried(request_id=request_id, client_id=client_id),
        allocated(request_id=request_id),
        built(request_ids=[request_id]),
        transferred(Direction.LOAD, 0, [3], 100, 1500, 1510, request_id=request_id),
        stored(request_id=request_id),
        polled(1600, 1610, saving_given=[request_id]),
        finished(request_id=request_id),
        dropped(3000, request_id),
    ]
    hashed = str(spans_of(records, SpanView(hash_request_ids=True)))
    plain = str(spans_of(records, SpanView()))

    for number in (request_id, client_id):
        assert str(number) in plain
        assert str(number) not in hashed


def test_a_hashed_request_id_is_the_same_in_every_span_and_keyed_with_the_run() -> None:
    def label(run_id: bytes) -> object:
        records = [*bring_up()[:-1], joined(run_id=run_id), queried(), finished()]
        spans = spans_of(records, SpanView(hash_request_ids=True))
        labels = {span.attributes["tracekv.request.id"] for span in spans if "tracekv.request.id" in span.attributes}
        assert len(labels) == 1
        return labels.pop()

    assert label(RUN) == label(RUN) != label(b"another-run-id--")


def test_a_query_that_raised_is_a_failed_span_of_its_step() -> None:
    raised = call(Callback.GET_NUM_NEW_MATCHED_TOKENS, 1000, 1100, 1, "KeyError")
    span = only(spans_of([*bring_up(), raised]), "get_num_new_matched_tokens")

    assert span.status is Status.ERROR
    assert span.attributes["error.type"] == "KeyError"


def test_lost_records_are_told_on_what_was_open() -> None:
    view = SpanView()
    spans_of([*bring_up(), queried(), built()], view, is_closed=False)
    view.lost(12)
    spans = spans_of([finished(), queried(4000, 4100, 8), finished(4200, 4300, 8)], view)
    roots = {span.attributes["tracekv.request.id"]: span for span in named(spans, "request")}

    assert roots["7"].attributes["tracekv.records_lost"] == 12
    assert "tracekv.records_lost" not in roots["8"].attributes
    assert only(spans, "step").attributes["tracekv.records_lost"] == 12
    assert view.records_lost == 12


def test_the_tiers_of_a_request_are_named_once_each() -> None:
    moves = [transferred(Direction.SAVE, g, [g], 100, 1500 + g, 1510, tier=Tier.DISK) for g in (0, 1, 0)]
    root = only(spans_of([*bring_up(), queried(), *moves, finished()]), "request")

    assert root.attributes["tracekv.save.tiers"] == ["disk"]
