"""The story of one request, attribute by attribute: nothing more, nothing less."""

from __future__ import annotations

from tests.views.sample_run import EPOCH, spans_of, the_run
from tracekv.views import ids
from tracekv.views.model import Attributes
from tracekv.views.spans import SpanView

TWO_GROUPS: Attributes = {"tracekv.layer_group.ids": [0, 1], "tracekv.layer_group.window": [0, 64]}
CALL: Attributes = {"tracekv.rank": 0, "tracekv.request.id": "7"}
PARTS: Attributes = {
    "tracekv.time.queued_ns": 1, "tracekv.time.read_ns": 2, "tracekv.time.verify_ns": 3, "tracekv.time.copy_ns": 4,
    "tracekv.time.stall_ns": 5,
}  # fmt: skip

#: (name, from, to, attributes) in the order of their start.
STORY: list[tuple[str, int, int, Attributes]] = [
    ("request", 1000, 2250, {
        "tracekv.request.id": "7", "gen_ai.request.id": "70", "tracekv.request.outcome": "finished",
        "tracekv.request.queries": 1, "tracekv.rank": 0, "tracekv.run": ids.run_label(b"run-run-run-run-"),
        "tracekv.prompt_tokens": 1024, "tracekv.computed_tokens": 64, "tracekv.stored_tokens": 960,
        "tracekv.staged_tokens": 512, "tracekv.offered_tokens": 512, "tracekv.honoured_tokens": 480,
        "tracekv.loaded_tokens": 96, "tracekv.saved_tokens": 32, "tracekv.scheduled_tokens": 480,
        "tracekv.miss_reason": "not_staged", "tracekv.bounding_layer_group": 0,
        "tracekv.load.pages": 3, "tracekv.load.bytes": 240, "tracekv.save.pages": 1, "tracekv.save.bytes": 100,
        "tracekv.load.tiers": ["host", "object"], "tracekv.save.tiers": ["host"],
        "tracekv.layer_group.load_bytes": [200, 40], "tracekv.layer_group.save_bytes": [100, 0], **TWO_GROUPS,
        "tracekv.is_async": False, "tracekv.keeps_pages": False,
        "tracekv.time.query_ns": 100, "tracekv.time.waited_ns": 20, "tracekv.time.queued_ns": 2,
        "tracekv.time.read_ns": 4, "tracekv.time.verify_ns": 6, "tracekv.time.copy_ns": 8, "tracekv.time.stall_ns": 10,
    }),
    ("get_num_new_matched_tokens", 1000, 1100, {
        **CALL, "tracekv.callback": "scheduler.get_num_new_matched_tokens",
        "code.function.name": "pkg.mod.Leader.get_num_new_matched_tokens", "tracekv.step": 0,
        "tracekv.prompt_tokens": 1024, "tracekv.computed_tokens": 64, "tracekv.offered_tokens": 512,
        "tracekv.is_async": False,
    }),
    ("lookup", 1010, 1090, {
        **CALL, "tracekv.prompt_tokens": 1024, "tracekv.computed_tokens": 64, "tracekv.stored_tokens": 960,
        "tracekv.staged_tokens": 512, "tracekv.offered_tokens": 512, "tracekv.time.waited_ns": 20,
        "tracekv.layer_group.tokens": [960, 1024], "tracekv.bounding_layer_group": 0,
        "tracekv.miss_reason": "not_staged", "tracekv.key": "abcd",
    }),
    ("update_state_after_alloc_by_layer_group", 1200, 1230, {
        **CALL, **TWO_GROUPS, "tracekv.callback": "scheduler.update_state_after_alloc_by_layer_group",
        "code.function.name": "pkg.mod.Leader.update_state_after_alloc_by_layer_group", "tracekv.step": 0,
        "tracekv.honoured_tokens": 480, "tracekv.source": "eligible", "tracekv.pages": 5, "tracekv.pages.absent": 1,
        "tracekv.bytes": 380, "tracekv.layer_group.pages": [3, 2], "tracekv.layer_group.bytes": [300, 80],
    }),
    ("load", 1500, 1540, {
        **CALL, **PARTS, "tracekv.direction": "load", "tracekv.source": "reported", "tracekv.tier": "host",
        "tracekv.layer_group.id": 0, "tracekv.layer_group.ids": [0], "tracekv.layer_group.window": [0],
        "tracekv.pages": 2, "tracekv.pages.absent": 0, "tracekv.bytes": 200, "tracekv.layer_group.pages": [2],
        "tracekv.layer_group.bytes": [200], "tracekv.tokens": 96, "tracekv.step": 1,
    }),
    ("load", 1540, 1560, {
        **CALL, **PARTS, "tracekv.direction": "load", "tracekv.source": "reported", "tracekv.tier": "object",
        "tracekv.layer_group.id": 1, "tracekv.layer_group.ids": [1], "tracekv.layer_group.window": [64],
        "tracekv.pages": 1, "tracekv.pages.absent": 1, "tracekv.bytes": 40, "tracekv.layer_group.pages": [1],
        "tracekv.layer_group.bytes": [40], "tracekv.tokens": 96, "tracekv.step": 1,
    }),
    ("save", 2010, 2020, {
        **CALL, **PARTS, "tracekv.direction": "save", "tracekv.source": "reported", "tracekv.tier": "host",
        "tracekv.layer_group.id": 0, "tracekv.layer_group.ids": [0], "tracekv.layer_group.window": [0],
        "tracekv.pages": 1, "tracekv.pages.absent": 0, "tracekv.bytes": 100, "tracekv.layer_group.pages": [1],
        "tracekv.layer_group.bytes": [100], "tracekv.tokens": 32, "tracekv.step": 1,
    }),
    ("store.put", 2050, 2060, {
        **CALL, "tracekv.store.engine": "s3", "tracekv.store.outcome": "ok", "tracekv.store.attempts": 2,
        "tracekv.store.requests": 1, "tracekv.store.breaker": "closed", "tracekv.blocks": 2, "tracekv.bytes": 80,
        "tracekv.time.queued_ns": 6, "tracekv.time.transfer_ns": 3, "tracekv.time.verify_ns": 1, "aws.s3.bucket": "kv",
        "tracekv.key": "ee", "tracekv.layer_group.id": 1,
    }),
    ("request_finished_by_layer_group", 2200, 2250, {
        **CALL, **TWO_GROUPS, "tracekv.callback": "scheduler.request_finished_by_layer_group",
        "code.function.name": "pkg.mod.Leader.request_finished_by_layer_group", "tracekv.step": 1,
        "tracekv.keeps_pages": False, "tracekv.source": "eligible", "tracekv.pages": 4, "tracekv.pages.absent": 2,
        "tracekv.bytes": 340, "tracekv.layer_group.pages": [3, 1], "tracekv.layer_group.bytes": [300, 40],
    }),
]  # fmt: skip


def test_the_golden_story_of_one_request() -> None:
    spans = spans_of(the_run(), SpanView(detail="economy"))
    (root,) = [span for span in spans if span.name == "request"]
    told = sorted(
        (span for span in spans if span.trace_id == root.trace_id), key=lambda span: (span.start_ns, -span.end_ns)
    )

    for span, (name, start, end, attributes) in zip(told, STORY, strict=True):
        assert (span.name, span.start_ns - EPOCH, span.end_ns - EPOCH) == (name, start, end)
        assert span.attributes == attributes, name
    (event,) = root.events
    assert (event.name, event.unix_ns - EPOCH) == ("drop", 2070)
    assert event.attributes == {
        "tracekv.direction": "save", "tracekv.reason": "queue_full", "tracekv.blocks": 3, "tracekv.bytes": 300,
        "tracekv.layer_group.id": 0,
    }  # fmt: skip
