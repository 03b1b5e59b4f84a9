"""What the Trace Event Format asks of a file, as far as its document states rules; each broken one is a sentence.

Source: "Trace Event Format", the document of the Chromium project: JSON Object Format, Event Descriptions, Flow Events, Metadata.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from decimal import Decimal
from typing import Any

_METADATA = {
    "process_name": "name", "process_labels": "labels", "process_sort_index": "sort_index", "thread_name": "name",
    "thread_sort_index": "sort_index",
}  # fmt: skip
_PHASES = set("BEXiCsfM")


def problems_of(text: str) -> list[str]:
    """The rules that a file breaks, none where it is sound."""
    data = json.loads(text, parse_float=Decimal)
    if not isinstance(data, dict) or not isinstance(data.get("traceEvents"), list):
        return ["no object with a list traceEvents"]
    problems = []
    if data.get("displayTimeUnit") not in ("ms", "ns"):
        problems.append("displayTimeUnit is neither ms nor ns")
    for event in data["traceEvents"]:
        problems += [f"{problem}: {event}" for problem in _alone(event)]
    return problems or [*_nesting(data["traceEvents"]), *_flows(data["traceEvents"])]


def _alone(event: dict[str, Any]) -> list[str]:
    phase = event.get("ph")
    if phase not in _PHASES:
        return ["unknown phase"]
    problems = []
    if not isinstance(event.get("name"), str) or not event["name"]:
        problems.append("no name")
    if not isinstance(event.get("pid"), int):
        problems.append("pid is no integer")
    if phase not in "C" and not isinstance(event.get("tid"), int):
        problems.append("tid is no integer")
    if not isinstance(event.get("ts"), (int, Decimal)) or event["ts"] < 0:
        problems.append("ts is no time in microseconds")
    args = event.get("args", {})
    if not isinstance(args, dict):
        return [*problems, "args is no object"]
    match phase:
        case "X" if not isinstance(event.get("dur"), (int, Decimal)) or event["dur"] < 0:
            problems.append("a complete event without a duration")
        case "i" if event.get("s", "t") not in ("g", "p", "t"):
            problems.append("an instant without a known scope")
        case "C" if not args or not all(isinstance(value, (int, Decimal)) for value in args.values()):
            problems.append("a counter without numbers")
        case "M" if event["name"] not in _METADATA or _METADATA[event["name"]] not in args:
            problems.append("unknown metadata")
        case "s" | "f" if "id" not in event or "cat" not in event:
            problems.append("a flow without id and category")
    return problems


def _nesting(events: list[dict[str, Any]]) -> list[str]:
    """Bars of one track lie inside or outside of each other; what begins ends or is the last."""
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] in "XBE":
            tracks[event["pid"], event["tid"]].append(event)
    problems = []
    for track, bars in tracks.items():
        open_ends: list[Decimal] = []
        whole = [bar for bar in bars if bar["ph"] == "X"]
        for bar in sorted(whole, key=lambda bar: (bar["ts"], -bar["dur"])):
            while open_ends and open_ends[-1] <= bar["ts"]:
                open_ends.pop()
            if open_ends and bar["ts"] + bar["dur"] > open_ends[-1]:
                problems.append(f"bars of track {track} overlap at {bar['ts']}")
            open_ends.append(bar["ts"] + bar["dur"])
        depth = 0
        for bar in sorted((bar for bar in bars if bar["ph"] in "BE"), key=lambda bar: bar["ts"]):
            depth += 1 if bar["ph"] == "B" else -1
            if depth < 0:
                problems.append(f"an end without a begin on track {track}")
    return problems


def _flows(events: list[dict[str, Any]]) -> list[str]:
    """An arrow leaves before it arrives, and each end lies in a bar of its track."""
    starts = {(e["cat"], e["name"], e["id"]): e for e in events if e["ph"] == "s"}
    problems = []
    for end in (event for event in events if event["ph"] == "f"):
        start = starts.pop((end["cat"], end["name"], end["id"]), None)
        if start is None:
            problems.append(f"an arrow that comes from nowhere: {end}")
        elif end["ts"] < start["ts"]:
            problems.append(f"an arrow that goes back in time: {end}")
        problems += [
            f"an end of an arrow in no bar: {each}"
            for each in (start, end)
            if each and not _lies_in_a_bar(each, events)
        ]
    return problems + [f"an arrow that goes nowhere: {start}" for start in starts.values()]


def _lies_in_a_bar(end: dict[str, Any], events: list[dict[str, Any]]) -> bool:
    return any(
        bar["ph"] == "X"
        and (bar["pid"], bar["tid"]) == (end["pid"], end["tid"])
        and bar["ts"] <= end["ts"] <= bar["ts"] + bar["dur"]
        for bar in events
    )


def times_in(text: str) -> list[str]:
    """Each ``ts`` and ``dur`` as it is written."""
    return re.findall(r'"(?:ts|dur)":([0-9.]+)', text)
