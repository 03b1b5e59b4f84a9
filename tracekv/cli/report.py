"""``tracekv report``: a run as one HTML file that anybody can open."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tracekv import settings as settings_module
from tracekv.agent.paths import NoJournals
from tracekv.cli._choosing import Chooser
from tracekv.cli._opening import Paths, progress_bar, scanned
from tracekv.cli._output import CannotWrite, output_file
from tracekv.journal.scan import Scan
from tracekv.settings import SettingsError
from tracekv.views.html import page
from tracekv.views.report_data import ReportData
from tracekv.views.runs import Run

#: Files of the page, in their order.
SCRIPTS = ("ui.js", "timeline.js", "pointing.js", "report.js")
#: Findings that are shown, and records that prove each.
_MOST_FINDINGS, _MOST_EVIDENCE = 200, 3


def report(
    output: Annotated[Path, typer.Option("-o", "--output", help="The HTML file to write; - for standard output.")],
    paths: Paths = None,
    requests: Annotated[
        list[str] | None,
        typer.Option("--request", metavar="ID", help="Narrow timeline and requests to this one; may be repeated."),
    ] = None,
    rules: Annotated[bool, typer.Option(help="Judge the run by the rules of the contract.")] = True,
) -> None:
    """Write a report: summary, timeline, requests with their waterfalls, stalls and misses, broken rules, settings.

    The file holds everything that it shows and loads nothing.
    """
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        hashed = settings_module.load().hash_request_ids
        with scanned(paths or []) as scan:
            chooser = Chooser(scan, hashed=hashed)
            chosen = _chosen(chooser, requests or [])
            parts = ReportData(scan, hashed=hashed, chosen=chosen)
            findings, counts = _findings(scan, parts.runs, hashed=hashed) if rules else (None, {})
            with progress_bar("reporting") as tell, _uncollected():
                data = parts.build(findings, tell) | counts
                with output_file(output) as file:
                    file.write(page("tracekv report", SCRIPTS, data))
            for note in chooser.notes:
                errors.print(note, markup=False)
    except (NoJournals, SettingsError, CannotWrite) as error:
        errors.print(str(error), markup=False)
        raise typer.Exit(1) from None


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Without looking for cycles: nothing here makes any, and a large run has hundreds of thousands of objects to look through."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _chosen(chooser: Chooser, requests: Sequence[str]) -> list[tuple[Run, int]]:
    runs = chooser.runs(None) if requests else []
    found = [chooser.find(request, runs) for request in requests]
    return [(each.run, each.request_id) for each in found if each.request_id is not None]


def _findings(scan: Scan, runs: Sequence[Run], *, hashed: bool) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The findings that are shown, and how many there are in all, by rule those that aren't shown."""
    # Importing the rules takes as long as a small report.
    from tracekv.cli._judging import as_shown, find_all, is_of_run, violations

    with progress_bar("rules") as tell:
        checker = find_all(scan.processes, progress=lambda done: tell(done, scan.records))
    shown = []
    for found in checker.findings[:_MOST_FINDINGS]:
        data = as_shown(found, runs, hashed=hashed)
        data["evidence"] = data["evidence"][:_MOST_EVIDENCE]
        number = next((at for at, run in enumerate(runs) if is_of_run(found, run)), None)
        if found.request is not None and number is not None:
            data["request"] = runs[number].request_label(found.request, hashed=hashed)
            data["key"] = f"{number}:{data['request']}"
        shown.append(data)
    proved = violations(checker)
    more = checker.counts - Counter(each["rule"] for each in shown)
    return shown, {"violations": proved, "suspects": checker.counts.total() - proved, "more_findings": more}
