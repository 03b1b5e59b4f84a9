"""The screen of ``tracekv explain``: lines of at most 80 columns, readable without colours."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tracekv.journal.vocabulary import Direction
from tracekv.views.amounts import duration, plural, size
from tracekv.views.explain import Explanation
from tracekv.views.spent import PARTS
from tracekv.views.verdict import MISSES, kind, plain, verdict

_STYLES = {
    "hit": "bold green",
    "partial": "bold green",
    "miss": "bold yellow",
    "broken": "bold red",
    "failed": "bold red",
}
_WORDS = {
    "queue": "in the queue, before its first pass",
    "lookup": "lookup (the query)",
    "read": "store read",
    "verify": "verify",
    "copy": "copy to the device",
    "stall": "stall: its pass stood still for KV",
    "hidden": "hidden: KV moved behind computing",
    "compute": "computing, with no KV moving",
    "between": "between passes",
    "held": "finished, pages held",
    "untold": "not told: calls were only counted",
}
_BAR = 16
_LABEL = 10


def show(console: Console, told: Explanation, *, trace_url: str) -> None:
    """Print one request's explanation."""
    console.print(Text(verdict(told), _STYLES.get(kind(told), "bold")), soft_wrap=True)
    _line(console, "request", _identity(told))
    console.print()
    _tokens(console, told)
    _time(console, told)
    _moved(console, told)
    _store(console, told)
    _held(console, told)
    _rules(console, told)
    console.print(Text(f"{'trace':{_LABEL}}", "bold").append(trace_url, ""), soft_wrap=True)
    for note in told.notes:
        _line(console, "note", note)


def _line(console: Console, label: str, text: str | Text) -> None:
    """A labelled paragraph; what is longer than a line goes on below its beginning."""
    table = Table(box=None, padding=0, pad_edge=False, show_header=False)
    table.add_column(width=_LABEL, no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    table.add_row(label, text if isinstance(text, Text) else Text(text, ""))
    console.print(table)


def _identity(told: Explanation) -> str:
    story = told.story
    at = datetime.fromtimestamp(told.started_unix_ns / 1e9, UTC)
    state = "finished" if told.is_finished else "in flight" if told.is_running else "unfinished"
    ranks = sorted(each.rank for each in told.ranks if each.rank is not None)
    on = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" if ranks else f"pid {told.ranks[0].pid}"
    lora = "" if story.lora_id is None else f", LoRA {story.lora_id}"
    return f"{told.request} of run {told.run}, {on}, {state}{lora}\n{at:%Y-%m-%d %H:%M:%S.%f}"[:-3] + " UTC"


def _number(value: int | None) -> str:
    return "not told" if value is None else f"{value:,}"


def _moved_tokens(told: Explanation, way: Direction) -> str:
    estimate = told.estimated_tokens(way)
    return _number(told.tokens(way)) if estimate is None else f"~{estimate:,}"


def _tokens(console: Console, told: Explanation) -> None:
    story = told.story
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=True, header_style="bold")
    cells = {
        "tokens": "",
        "queried": _number(story.prompt_tokens),
        "on device": _number(story.computed_tokens),
        "offered": _number(story.offered_tokens),
        "honoured": _number(story.honoured_tokens),
        "loaded": _moved_tokens(told, Direction.LOAD),
        "saved": _moved_tokens(told, Direction.SAVE),
    }
    for name in cells:
        table.add_column(name, justify="left" if name == "tokens" else "right", min_width=8 if name == "tokens" else 0)
    table.add_row(*cells.values())
    console.print(table)
    stored = []
    if story.stored_tokens is not None:
        stored.append(f"{story.stored_tokens:,} stored, {_number(story.staged_tokens)} of them in memory when asked")
    if len(set(story.group_tokens)) > 1:
        stored.append(
            "by layer group " + ", ".join(f"{group}: {tokens:,}" for group, tokens in enumerate(story.group_tokens))
        )
    if stored:
        _line(console, "stored", "; ".join(stored))
    if story.miss_reason is not None:
        bound = "" if story.bounding_layer_group is None else f"; layer group {story.bounding_layer_group} bounded it"
        _line(console, "miss", f"{story.miss_reason.value}: {MISSES[story.miss_reason][0]}{bound}")
    if story.queries > 1:
        replayed = f", replayed {story.resets:,} times" if story.resets else ""
        _line(console, "asked", f"{story.queries:,} times (numbers are the last time's){replayed}")
    if story.dropped_blocks:
        _line(console, "dropped", f"{story.dropped_blocks:,} blocks were not saved")
    console.print()


def _time(console: Console, told: Explanation) -> None:
    whole = told.whole_ns
    story = told.story
    begin = "its enqueue" if story.enqueued_ns is not None else "its first query"
    if story.enqueued_ns is None and story.first_query_ns is None:
        begin = "its first record"
    end = "its end" if told.is_finished else "now" if told.is_running else "its last record"
    console.print(Text(f"{duration(whole)} from {begin} to {end}, of which", "bold"))
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, show_header=False)
    table.add_column(width=37, no_wrap=True)
    table.add_column(justify="right", width=9, no_wrap=True)
    table.add_column(justify="right", width=6, no_wrap=True)
    table.add_column(width=_BAR, no_wrap=True)
    for name in PARTS:
        part = told.parts[name]
        if part:
            share = part / whole if whole else 0.0
            table.add_row(f"  {_WORDS[name]}", duration(part), f"{share:.1%}", "#" * round(share * _BAR))
    console.print(table)
    if told.load_ns:
        exposed = told.load_ns - told.load_hidden_ns
        share = told.load_hidden_ns / told.load_ns
        console.print(
            f"  its KV was on the way for {duration(told.load_ns)}: {share:.0%} hidden, {duration(exposed)} exposed",
            soft_wrap=True,
        )
    console.print()


def _moved(console: Console, told: Explanation) -> None:
    moved = told.moved()
    if not moved:
        _line(console, "moved", "no KV was told to have moved")
        return
    several = len({rank for rank, _ in moved}) > 1
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for name in ("moved", "layer group", "tier", *(["rank"] if several else []), "pages", "bytes", "time", "source"):
        right = name in ("rank", "pages", "bytes", "time")
        table.add_column(
            name, justify="right" if right else "left", no_wrap=True, min_width=8 if name == "moved" else 0
        )
    for rank, each in moved:
        window = told.windows.get(each.layer_group)
        group = f"{each.layer_group}" + (f" (window {window:,})" if window else " (full)" if window == 0 else "")
        failed = f" {each.failures} failed" if each.failures else ""
        table.add_row(
            each.direction.value, group, each.tier.value, *([str(rank)] if several else []), f"{each.pages:,}",
            size(each.nbytes), duration(each.time_ns), each.source.value + failed,
        )  # fmt: skip
    console.print(table)


def _store(console: Console, told: Explanation) -> None:
    words = [
        f"{plural(stored.operations, operation.value)}{f' ({stored.failures:,} failed)' if stored.failures else ''} with "
        f"{plural(stored.requests, 'request')}, {size(stored.nbytes)} in {duration(stored.time_ns)}"
        for operation, stored in told.stored().items()
    ]
    if words:
        _line(console, "store", "; ".join(words))


def _held(console: Console, told: Explanation) -> None:
    story = told.story
    pages = "+".join(str(count) for count in story.allocated_pages)
    groups = " by layer group" if len(story.allocated_pages) > 1 else ""
    text = f"{pages}{groups} allocated" if pages else "no allocation is recorded"
    if story.held_since_ns is not None:
        since = max(0, told.now_ns - story.held_since_ns)
        text += f"; {story.held_pages:,} held after its end "
        text += f"since {duration(since)}" if told.held_ns is None else f"for {duration(told.held_ns)}"
    elif story.finished_ns is not None:
        text += "; given back at its end"
    else:
        text += "; its end wasn't announced"
    _line(console, "pages", text)
    for way, word in ((Direction.LOAD, "loading"), (Direction.SAVE, "saving")):
        last = told.last_rank(way)
        if last is not None:
            _line(console, "last rank", f"rank {last[0]} ended {word} last, {duration(last[1])} after the first")


def _rules(console: Console, told: Explanation) -> None:
    if not told.broken:
        _line(console, "rules", "none broken")
    for each in told.broken:
        style = "red" if each.severity == "violation" else "yellow"
        text = Text(f"{each.rule} ({each.severity}", style)
        text.append("" if each.about == "request" else f", of the {each.about}")
        text.append(f") {plain(each.what)}")
        if each.caused_by:
            text.append(f" Follows from {each.caused_by}.")
        _line(console, "rules", text)
        rank = f"rank {each.rank}" if each.rank is not None and "rank" not in each.numbers else ""
        detail = ", ".join(filter(None, (each.numbers, each.callback, rank)))
        for more in (detail, f"-> {plain(each.fix)}"):
            console.print(Padding(Text(more), (0, 0, 0, _LABEL)))


def as_data(told: Explanation, *, trace_url: str) -> dict[str, Any]:
    """The same as JSON holds it; requests by their labels only."""
    story = told.story
    last = {way.value: told.last_rank(way) for way in Direction}
    return {
        "request": told.request,
        "run": told.run,
        "verdict": verdict(told),
        "kind": kind(told),
        "started_unix_ns": told.started_unix_ns,
        "is_finished": told.is_finished,
        "is_running": told.is_running,
        "inside": told.inside,
        "tokens": {
            "prompt": story.prompt_tokens,
            "computed": story.computed_tokens,
            "stored": story.stored_tokens,
            "staged": story.staged_tokens,
            "offered": story.offered_tokens,
            "honoured": story.honoured_tokens,
            "loaded": told.tokens(Direction.LOAD),
            "saved": told.tokens(Direction.SAVE),
            "by_layer_group": story.group_tokens,
        },
        "miss": None
        if story.miss_reason is None
        else {
            "reason": story.miss_reason.value,
            "why": MISSES[story.miss_reason][0],
            "advice": MISSES[story.miss_reason][1],
            "bounding_layer_group": story.bounding_layer_group,
        },
        "whole_ns": told.whole_ns,
        "parts_ns": told.parts,
        "load": {"on_the_way_ns": told.load_ns, "hidden_ns": told.load_hidden_ns},
        "moved": [
            {
                "direction": each.direction.value, "layer_group": each.layer_group, "window": told.windows.get(each.layer_group),
                "tier": each.tier.value, "source": each.source.value, "rank": rank, "transfers": each.transfers,
                "failures": each.failures, "pages": each.pages, "bytes": each.nbytes, "tokens": each.tokens,
                "time_ns": each.time_ns,
            }
            for rank, each in told.moved()
        ],
        "pages": {
            "allocated": story.allocated_pages,
            "held": story.held_pages,
            "is_held": bool(told.holding),
            "held_by_ranks": told.holding,
            "held_ns": told.held_ns,
        },
        "ranks": [{"rank": each.rank, "host": each.host, "pid": each.pid} for each in told.ranks],
        "last_rank": {way: None if each is None else {"rank": each[0], "skew_ns": each[1]} for way, each in last.items()},
        "errors": [error for each in told.ranks for error in each.story.errors],
        "rules": [
            {
                "rule": each.rule, "severity": each.severity, "by": each.by, "what": each.what, "fix": each.fix, "about": each.about,
                "callback": each.callback, "rank": each.rank, "step": each.step, "numbers": each.numbers, "caused_by": each.caused_by,
            }
            for each in told.broken
        ],
        "trace_id": told.trace_id,
        "trace_url": trace_url,
        "records": told.records,
        "records_lost": told.records_lost,
        "notes": told.notes,
    }  # fmt: skip
