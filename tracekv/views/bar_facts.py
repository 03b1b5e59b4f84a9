"""What a bar tells when it is pointed at: its record's numbers under the names that the field uses, pages as counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from tracekv.journal.records import (
    AllocCall,
    BindCall,
    BuildCall,
    CallCounts,
    CancelLoadCall,
    Drop,
    Finding,
    FinishCall,
    FinishedCall,
    ForwardCallableCall,
    IdlePolls,
    Lookup,
    Prefetch,
    QueryCall,
    Record,
    RegisterCall,
    StoreOperation,
    TracingReduced,
    Transfer,
)
from tracekv.journal.vocabulary import Direction
from tracekv.views.facts import count_pages
from tracekv.views.story import Story
from tracekv.views.timeline import Bar

#: Requests that are named; of more, how many there are is told too.
_MOST_REQUESTS = 16
_QUERY = ("prompt_tokens", "computed_tokens", "offered_tokens", "is_async", "answer", "lora_id")
_STORY = (
    "outcome", "prompt_tokens", "computed_tokens", "offered_tokens", "honoured_tokens", "miss_reason", "bounding_layer_group",
    "steps", "held_ns",
)  # fmt: skip
_PARTS = ("queued_ns", "read_ns", "verify_ns", "copy_ns", "stall_ns")
#: Fields that are shown as they are, by kind of record; absent ones (None) are left out.
_SHOWN: Mapping[type[Record | Story], tuple[str, ...]] = {
    QueryCall: _QUERY,
    AllocCall: ("honoured_tokens",),
    BuildCall: ("new_requests", "has_metadata"),
    FinishCall: ("keeps_pages", "answer"),
    BindCall: ("has_envelope", "nbytes", "digest"),
    FinishedCall: ("answer",),
    IdlePolls: ("count", "sum_ns", "max_ns"),
    RegisterCall: ("tokens_per_block", "dtype"),
    ForwardCallableCall: ("has_callable",),
    CancelLoadCall: ("start", "end"),
    Transfer: ("layer_group", "tier", "source", "nbytes", "tokens", *_PARTS),
    Lookup: (
        "prompt_tokens", "computed_tokens", "stored_tokens", "staged_tokens", "offered_tokens", "group_tokens",
        "bounding_layer_group", "reason", "waited_ns",
    ),
    StoreOperation: (
        "engine", "bucket", "layer_group", "blocks", "nbytes", "attempts", "requests", "queued_ns", "transfer_ns", "verify_ns",
        "breaker",
    ),
    Drop: ("direction", "layer_group", "blocks", "nbytes"),
    Prefetch: ("blocks", "nbytes", "lead_ns"),
    Finding: ("rule", "severity", "subject", "what", "caused_by"),
    TracingReduced: ("cost_ppm", "limit_ppm"),
}  # fmt: skip


def bar_facts(bar: Bar, label: Callable[[int], str]) -> dict[str, Any]:
    """The facts of a bar by name, as JSON knows them.

    Args:
        label: Names a request.
    """
    record = bar.record
    facts: dict[str, Any] = {}
    if bar.requests:
        shown = [label(request_id) for request_id in bar.requests[:_MOST_REQUESTS]]
        facts["request"] = shown[0] if len(bar.requests) == 1 else shown
        if len(bar.requests) > len(shown):
            facts["requests"] = len(bar.requests)
    if bar.step:
        facts["step"] = bar.step
    if bar.layer >= 0:
        return {**facts, "layer": bar.layer}
    for name in _SHOWN.get(type(record), ()):
        value = getattr(record, name)
        # Parts of a transfer's time that the connector doesn't tell are 0.
        if value is not None and not (value == 0 and name in _PARTS):
            facts[name] = _plain(value)
    facts.update(_counts(record))
    if bar.error is not None:
        facts["error"] = bar.error
    return facts


def _counts(record: Record | Story) -> dict[str, Any]:
    match record:
        case Story():
            told = {name: getattr(record, name) for name in _STORY}
            told |= {"loaded_tokens": record.tokens(Direction.LOAD), "saved_tokens": record.tokens(Direction.SAVE)}
            return {name: _plain(value) for name, value in told.items() if value is not None}
        case Transfer():
            return _pages([record.pages], total=True)
        case AllocCall() | FinishCall():
            return _pages(record.pages)
        case BuildCall():
            return {"requests": len(record.request_ids), "scheduled_tokens": sum(record.scheduled_tokens)}
        case FinishedCall():
            names = ("saving_given", "loading_given", "saving_returned", "loading_returned")
            return {name: len(getattr(record, name)) for name in names}
        case RegisterCall():
            return {
                "layer_groups": [f"{group.layer_group_id}: {len(group.layer_ids)} layers" for group in record.groups]
            }
        case CallCounts():
            return {"calls": sum(calls for _, calls, _, _ in record.callbacks)}
    return {}


def _pages(pages: list[list[int]], *, total: bool = False) -> dict[str, Any]:
    counts = [count_pages(slots) for slots in pages]
    absent = sum(map(len, pages)) - sum(counts)
    facts: dict[str, Any] = {"pages": counts[0] if total else counts}
    return {**facts, "blocks_without_page": absent} if absent else facts


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    return value.hex() if isinstance(value, bytes) else value
