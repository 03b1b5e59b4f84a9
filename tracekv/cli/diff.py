"""``tracekv diff``: two runs side by side, what changed most first."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tracekv._version import __version__
from tracekv.agent.paths import NoJournals
from tracekv.cli._opening import scanned
from tracekv.cli._output import CannotWrite, output_file
from tracekv.journal.process_scan import ProcessScan
from tracekv.views.amounts import duration, plural, size
from tracekv.views.diff import Change, changes
from tracekv.views.html import page
from tracekv.views.summary import Summary
from tracekv.views.summary_data import summary_data, summary_of

#: Files of the page, in their order.
SCRIPTS = ("ui.js", "diff.js")
_MOST = 12
_TITLES = {
    "tokens": "Prompt tokens, shares",
    "bytes": "Bytes per request",
    "misses": "Lookups that gave less, by reason",
    "stalls": "Stalls per request, as connectors tell them",
    "callbacks": "Callbacks, mean of a call",
    "calls": "Calls per pass",
    "drops": "Blocks given up per pass",
    "store": "Store operations per pass, requests per hit",
}


class Side(NamedTuple):
    """One of the two runs."""

    name: str
    summary: Summary
    notes: list[str]


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A journal, an archive, or a directory of them.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="What A is compared with.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write an HTML page instead.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Compare two runs: tokens, bytes by layer group, misses by reason, stalls, callbacks.

    Numbers are per request, pass, lookup or call, so runs of different lengths compare. What changed most comes first.
    """
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        sides = [_side(a), _side(b)]
        found = changes(sides[0].summary, sides[1].summary)
        data = _data(sides, found)
        if output is not None:
            with output_file(output) as file:
                file.write(page("tracekv diff", SCRIPTS, data))
        elif not as_json:
            _print(Console(highlight=False), sides, found)
        if as_json:
            sys.stdout.buffer.write(msgspec.json.encode(data) + b"\n")
        for side in sides:
            for note in side.notes:
                errors.print(note, markup=False)
    except (NoJournals, CannotWrite) as error:
        errors.print(str(error), markup=False)
        raise typer.Exit(1) from None


def _side(path: Path) -> Side:
    with scanned([path]) as scan:
        summary = Summary()
        for part in scan.map(_summary):
            summary.merge(part)
        summary.lost_records = scan.lost
        notes = [*scan.left_out]
        if scan.lost:
            notes.append(
                f"tracekv: {path}: {scan.lost:,} records were overwritten: its numbers are too small by what they held"
            )
        return Side(str(path), summary, notes)


def _summary(process: ProcessScan) -> Summary:
    return summary_of(process.select())


def _data(sides: Sequence[Side], found: Sequence[Change]) -> dict[str, Any]:
    return {
        "kind": "diff",
        "version": __version__,
        "sides": [{"name": side.name, "notes": side.notes, "summary": summary_data(side.summary)} for side in sides],
        "titles": _TITLES,
        "changes": [
            {**msgspec.structs.asdict(change), "factor": change.factor, "score": change.score, "proportion": change.proportion}
            for change in found
        ],
    }  # fmt: skip


def _print(console: Console, sides: Sequence[Side], found: Sequence[Change]) -> None:
    width = min(console.width, 80)
    for letter, side in zip("AB", sides, strict=True):
        summary = side.summary
        queries = f"{summary.queries:,} {'query' if summary.queries == 1 else 'queries'}"
        passes = f"{summary.steps:,} pass{'' if summary.steps == 1 else 'es'}"
        told = f"{queries}, {passes}, {plural(summary.records, 'record')}"
        console.print(Text(f"{letter}  {side.name}", "bold"), soft_wrap=True)
        console.print(f"   {told}", soft_wrap=True)
    changed = [change for change in found if change.score > 0]
    if not changed:
        console.print("\nNothing changed.")
        return
    _table(console, "What changed most", changed[:_MOST], width, named=True)
    for kind, title in _TITLES.items():
        rows = [change for change in found if change.kind == kind]
        if rows:
            _table(console, title, rows, width, named=False)


def _table(console: Console, title: str, rows: Sequence[Change], width: int, *, named: bool) -> None:
    table = Table(
        title=f"\n{title}", title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0), width=width
    )
    table.add_column("", ratio=1, overflow="fold")
    for heading in ("A", "B", "change"):
        table.add_column(heading, justify="right", no_wrap=True, header_style="dim")
    if named:
        table.add_column("per", no_wrap=True, header_style="dim")
    for change in rows:
        name = f"{_word(change.kind)} {change.name}" if named else change.name
        table.add_row(
            name,
            shown(change.a, change.unit),
            shown(change.b, change.unit),
            _change(change),
            *([change.per] if named else []),
        )
    console.print(table)


def _word(kind: str) -> str:
    return {"callbacks": "time of", "calls": "calls of", "misses": "miss", "stalls": "stall", "drops": "drop"}.get(
        kind, kind
    )


def _change(change: Change) -> str:
    if change.a == change.b:
        return "="
    if change.kind != "callbacks" and (change.a is None or change.b is None):
        return "not told"
    if change.unit == "share" and change.a is not None and change.b is not None:
        return f"{(change.b - change.a) * 100:+.1f} pt"
    if not change.a or not change.b:
        return "new" if not change.a else "gone"
    factor = change.b / change.a
    if factor >= 2:
        return f"x{factor:,.0f}" if factor >= 100 else f"x{factor:.3g}"
    return f"{(factor - 1) * 100:+.1f} %"


def shown(value: float | None, unit: str) -> str:
    """A number in its unit."""
    if value is None:
        return "–"
    if unit == "share":
        return f"{value * 100:.1f} %"
    if unit == "count":
        return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"
    return duration(value) if unit == "ns" else size(value)
