"""What a process tells about itself, as plain data for the report's settings."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tracekv.journal.records import (
    CallCounts,
    ConnectorWrapped,
    Record,
    RegisterCall,
    SettingsSeen,
    TracerFault,
    TracingReduced,
    WatchReport,
)
from tracekv.views.runs import Run, Segment

Data = dict[str, Any]
_TELLING = (ConnectorWrapped, RegisterCall, SettingsSeen, TracerFault, TracingReduced, WatchReport)


def process_data(run: Run, segment: Segment) -> Data:
    """What one process's part of a run tells about itself: classes, layout, settings, what went wrong with tracing."""
    process, facts = segment.process.facts, segment.facts
    told: Data = {
        "name": f"{process.host} pid {process.pid}",
        "run": run.label,
        "rank": facts.rank,
        "world": facts.world,
        "version": facts.started.version if facts.started else None,
        "records": segment.last - segment.first,
        "lost": segment.process.lost,
        "classes": [],
        "groups": [],
        "tokens_per_block": facts.tokens_per_block or None,
    }
    events: Counter[str] = Counter()
    for record in segment.select(*_TELLING):
        _tell(told, events, record)
    told["events"] = [event if times == 1 else f"{times:,} times: {event}" for event, times in events.items()]
    calls, took_ns = 0, 0
    for record in segment.select(CallCounts):
        if isinstance(record, CallCounts):
            calls += sum(each[1] for each in record.callbacks)
            took_ns += record.ended_ns - record.started_ns
    if calls:
        told["events"].append(
            f"{calls:,} calls were only counted, in {took_ns / 1e9:.1f} s: they have sums and no bars of their own"
        )
    return told


def _tell(told: Data, events: Counter[str], record: Record) -> None:
    match record:
        case ConnectorWrapped():
            implemented = [source.name for source in record.implemented]
            told["classes"].append(
                {
                    "side": record.side.value, "name": record.class_name, "implemented": implemented,
                    "not_implemented": record.not_implemented,
                }
            )  # fmt: skip
        case RegisterCall():
            told["dtype"] = record.dtype
            told["groups"] = [
                {
                    "id": group.layer_group_id, "window": group.window_size, "layers": len(group.layer_ids),
                    "slots": group.num_slots, "bytes_per_page": group.bytes_per_page,
                }
                for group in record.groups
            ]  # fmt: skip
        case SettingsSeen():
            told["settings"] = record.digest.hex()[:16]
        case TracerFault():
            events[f"the instrument {record.instrument} failed ({record.error}) and was removed"] += 1
        case TracingReduced() if record.is_off:
            events["the detail was switched off for a while: no call was recorded"] += 1
        case TracingReduced() if record.is_reduced:
            events["tracing took more than its share: calls were only counted for a while"] += 1
        case WatchReport() if not record.is_complete:
            reasons = ", ".join(sorted({gap.reason.value for gap in record.gaps}))
            for earlier in [each for each in events if each.startswith("the watch")]:
                del events[earlier]
            events[f"the watch may not have seen every byte: {reasons}"] = 1
