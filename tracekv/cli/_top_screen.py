"""The screen of ``tracekv top``, 80 columns wide, readable without colours."""

from __future__ import annotations

import time

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tracekv.views.amounts import duration, plural, size
from tracekv.views.top import STORE_ROW, RateLine, Top

#: Lines of the parts that may be long.
_PROCESSES, _MOVES, _RATES = 8, 8, 8
_LABEL = 10
#: Severities of findings that a person has to act on.
_SERIOUS = ("violation", "problem")


def render(top: Top, *, keys: str = "") -> RenderableType:
    """The whole screen."""
    return Group(
        _head(top, keys), Text(), _processes(top), Text(), _moves(top), Text(), _tokens(top), Text(), _rates(top), Text(), *_rest(top)
    )  # fmt: skip


def _head(top: Top, keys: str) -> Text:
    alive = sum(each.is_alive for each in top.processes)
    gone = len(top.processes) - alive
    at = _clock(top.at_unix_ns, top.at_unix_ns)
    text = Text("tracekv top", "bold")
    text.append(f"  {at} UTC  {alive} running", "")
    text.append(f", {gone} gone" if gone else "", "red" if gone else "")
    text.append(f"  rates over {top.window_s:g} s{keys}", "")
    if top.since_unix_ns is not None:
        text.append(f"\ncounts since {_clock(top.since_unix_ns, top.at_unix_ns)} UTC", "")
    return text


def _clock(at_unix_ns: int, now_unix_ns: int) -> str:
    """A time of the day; with its date where that isn't today's."""
    at, now = time.gmtime(at_unix_ns / 1e9), time.gmtime(now_unix_ns / 1e9)
    return time.strftime("%H:%M:%S" if at[:3] == now[:3] else "%Y-%m-%d %H:%M:%S", at)


def _grid(*columns: tuple[str, bool]) -> Table:
    """A table without lines; ``(name, is a number)``."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for name, is_number in columns:
        table.add_column(name, justify="right" if is_number else "left", no_wrap=True, overflow="ellipsis")
    return table


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return ""
    if seconds < 1:
        return duration(round(seconds * 1e9))
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:,.0f} s" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _processes(top: Top) -> RenderableType:
    table = _grid(
        ("rank", True),
        ("pid", True),
        ("host", False),
        ("is", False),
        ("inside of", False),
        ("for", True),
        ("pass", True),
        ("quiet", True),
    )
    shown = sorted(top.processes, key=lambda each: (not each.is_alive, each.lag_s or 0.0, each.rank or 0))
    for each in shown[:_PROCESSES]:
        rank = "?" if each.rank is None else str(each.rank)
        state = Text("runs", "green") if each.is_alive else Text("gone", "red")
        inside = (each.inside or "-").removeprefix("worker.").removeprefix("scheduler.")[:24]
        since = _seconds(each.inside_s) if each.inside else ""
        table.add_row(
            rank, str(each.pid), Text(each.host[:12]), state, inside, since, f"{each.step:,}", _seconds(each.lag_s)
        )
    return _with_more(table, len(top.processes) - _PROCESSES, "processes")


def _moves(top: Top) -> RenderableType:
    if not top.moves:
        return Text("in flight: no load or save", "")
    table = _grid(
        ("in flight", False),
        ("", False),
        ("group", True),
        ("rank", True),
        ("pages", True),
        ("bytes", True),
        ("age", True),
        ("", False),
    )
    for each in top.moves[:_MOVES]:
        rank = "?" if each.rank is None else str(each.rank)
        nbytes = "" if each.nbytes is None else size(each.nbytes)
        state = Text("") if each.is_alive else Text("left behind", "red")
        table.add_row(
            each.request, each.direction, str(each.layer_group), rank, f"{each.pages:,}", nbytes, _seconds(each.age_s), state
        )  # fmt: skip
    return _with_more(table, len(top.moves) - _MOVES, "in flight")


def _with_more(table: Table, more: int, what: str) -> RenderableType:
    return table if more <= 0 else Group(table, Text(f"and {more:,} more {what}", "dim"))


def _labelled(label: str, text: str | Text) -> Table:
    table = Table(box=None, padding=0, pad_edge=False, show_header=False)
    table.add_column(width=_LABEL, no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    table.add_row(label, Text(text) if isinstance(text, str) else text)
    return table


def _share(part: int, whole: int) -> str:
    return f"{part:,}" + (f" ({part / whole:.0%})" if whole else "")


def _tokens(top: Top) -> RenderableType:
    queried, queries = top.tokens.get("queried", 0), top.tokens.get("requests", 0)
    if not queries:
        return _labelled("prompts", "no request was asked about" + (" yet" if top.since_unix_ns is None else " since"))
    computed, offered, honoured = (top.tokens.get(name, 0) for name in ("computed", "offered", "honoured"))
    asked = f"{queries:,} {'query' if queries == 1 else 'queries'}, {plural(queried, 'prompt token')}: "
    asked += f"{_share(computed, queried)} on the device, "
    asked += f"{_share(honoured, queried)} from the store" + (
        f" (of {offered:,} offered)" if offered != honoured else ""
    )
    rows: list[RenderableType] = [_labelled("prompts", asked), _labelled("now", _now(top))]
    if top.missed:
        ordered = sorted(top.missed.items(), key=lambda each: -each[1])
        words = ", ".join(f"{reason} {_share(tokens, queried)}" for reason, tokens in ordered if reason != "complete")
        rest = top.missed.get("complete", 0)
        rows.append(
            _labelled(
                "computed",
                words
                + (", " if words and rest else "")
                + (f"behind whole hits {_share(rest, queried)}" if rest else ""),
            )
        )
    return Group(*rows)


def _now(top: Top) -> str:
    """What was asked of late."""
    late = top.late_tokens
    if not late.get("requests"):
        return "no queries"
    queried = late["queried"]
    each = (f"{late[name] / queried:.0%} {where}" for name, where in _SERVED.items()) if queried else ()
    return ", ".join(
        (f"{_rate(late['requests'] / top.window_s)} queries/s", f"{_rate(queried / top.window_s)} tokens/s", *each)
    )


_SERVED = {"computed": "on the device", "honoured": "from the store"}


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:,.3g}"


def _rates(top: Top) -> RenderableType:
    if not top.rates:
        return _labelled("bandwidth", "no KV was reported to have moved")
    table = _grid(
        ("bandwidth", False),
        ("layer group", False),
        ("in all", True),
        ("now", True),
        ("while moving", True),
        ("store's best", True),
    )
    for each in top.rates[:_RATES]:
        best = "" if each.ceiling_per_s is None else f"{size(each.ceiling_per_s)}/s"
        moving = "" if each.moving_per_s is None else f"{size(each.moving_per_s)}/s"
        now = f"{size(each.per_s)}/s" if each.per_s else "idle"
        table.add_row(each.direction, _row_name(each), size(each.total_bytes), now, moving, best)
    if any(each.ceiling_per_s is not None for each in top.rates):
        return _with_more(table, len(top.rates) - _RATES, "rows")
    return Group(
        _with_more(table, len(top.rates) - _RATES, "rows"),
        Text("(the store's best isn't measured here: tracekv bench store)", "dim"),
    )


def _row_name(rate: RateLine) -> str:
    if rate.layer_group == STORE_ROW:
        return "the store"
    return f"{rate.layer_group}" + (f" (window {rate.window_size:,})" if rate.window_size else " (full)")


def _rest(top: Top) -> list[RenderableType]:
    stalls = (
        "none reported"
        if not top.stall_total_s
        else (
            f"{_seconds(top.stall_s)} of late, {_seconds(top.stall_total_s)} in all, the longest {_seconds(top.longest_stall_s)}"
        )
    )
    held = (
        f"{plural(top.held_pages, 'page')} of {plural(top.held_requests, 'request')}, the oldest for {_seconds(top.oldest_held_s)}"
        if top.held_requests
        else "none"
    )
    ordered = sorted(top.rules.items(), key=lambda each: (not each[0].startswith(_SERIOUS), each[0]))
    broken = Text()
    for name, times in ordered:
        if name.startswith(("violation", "suspect", "problem")):
            broken.append(
                (", " if broken else "") + f"{name} x{times:,}", "red" if name.startswith(_SERIOUS) else "yellow"
            )
    broken.append(("" if broken else "none broken") + f" (judged: {top.judged})", "")
    lost = sum(each.lost for each in top.processes)
    health = Text(f"{sum(each.records for each in top.processes):,} records, ")
    health.append(f"{lost:,} lost", "red" if lost else "")
    lags = [each.lag_s for each in top.processes if each.is_alive and each.lag_s is not None]
    health.append(f", {size(sum(each.written_bytes for each in top.processes))} written")
    health.append(f", last one {_seconds(min(lags))} ago" if lags else "")
    troubles = {
        "unknown records": top.undecodable,
        "instruments removed": top.faults,
        "processes only counting": top.reduced,
    }
    for what, count in troubles.items():
        if count:
            health.append(f", {count:,} {what}", "red")
    return [
        _labelled("requests", f"{top.open_requests:,} open"), _labelled("stalls", stalls), _labelled("held", held),
        _labelled("rules", broken), _labelled("tracer", health), *(_labelled("note", note) for note in top.notes),
    ]  # fmt: skip
