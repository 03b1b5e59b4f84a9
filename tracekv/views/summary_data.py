"""A summary as plain data, for JSON and for the pages: what it counted, and what follows from it by its own properties."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from tracekv.journal.records import Record
from tracekv.journal.vocabulary import Direction
from tracekv.views.registry import registry
from tracekv.views.summary import COUNTS, GroupSummary, Summary, SummaryView

Data = dict[str, Any]


def summary_of(records: Iterable[Record]) -> Summary:
    """What records add up to."""
    view = SummaryView()
    for record in records:
        view.feed(record)
    return view.summary


def summary_data(summary: Summary) -> Data:
    """A summary as plain data: what it counted, and what follows from it by its own properties."""
    words = {name: entry.words for name, entry in registry().enums.items()}
    return {
        **{field: getattr(summary, field) for field in COUNTS},
        "loaded_tokens": summary.loaded_tokens,
        "saved_tokens": summary.saved_tokens,
        "loaded_bytes": summary.loaded_bytes,
        "saved_bytes": summary.saved_bytes,
        "load_stall_ns": sum(group.stall_ns(Direction.LOAD) for group in summary.layer_groups.values()),
        "callbacks": [
            {
                "name": name, "calls": each.durations.calls, "errors": each.errors, "total_ns": each.durations.total_ns,
                "p50_ns": each.durations.p50_ns, "p99_ns": each.durations.p99_ns, "max_ns": each.durations.max_ns,
            }
            for name, each in sorted(summary.callbacks.items(), key=lambda pair: (-pair[1].durations.total_ns, pair[0]))
        ],
        "groups": [_group(summary.layer_groups[group]) for group in sorted(summary.layer_groups)],
        "misses": _tally(summary.misses, words.get("miss_reason", {})),
        "bounding": _tally({str(group): count for group, count in summary.bounding.items()}, {}),
        "drops": _tally(summary.drops, words.get("drop_reason", {})),
        "store": _tally(summary.store_outcomes, {}),
        "store_use": [
            {"name": name, "requests": requests, "bytes": summary.store_bytes[name]}
            for name, requests in sorted(summary.store_requests.items())
        ],
    }  # fmt: skip


def _tally(counts: dict[str, int], words: Mapping[str, str]) -> list[Data]:
    found = sorted(counts.items(), key=lambda pair: -pair[1])
    return [{"name": name, "count": count, "meaning": words.get(name, "")} for name, count in found]


def _group(group: GroupSummary) -> Data:
    return {
        "id": group.layer_group_id,
        "window": group.window_size,
        "bytes_per_page": group.bytes_per_page,
        "ways": {
            way.value: {
                "bytes": group.nbytes(way), "pages": group.pages(way), "tokens": group.tokens(way),
                "stall_ns": group.stall_ns(way), "time_ns": group.time_ns(way),
            }
            for way in Direction
        },
        "moved": [msgspec.to_builtins(moved) for moved in group.moved],
    }  # fmt: skip
