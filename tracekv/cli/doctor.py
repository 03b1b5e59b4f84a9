"""``tracekv doctor``: what would go wrong, before it does."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from time import perf_counter_ns
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from tracekv.cli import _doctor_checks as checks
from tracekv.journal.current import current
from tracekv.journal.records import Finding

_MARKS = {
    "ok": ("ok", "green"),
    "note": ("note", "cyan"),
    "advice": ("advice", "yellow"),
    "problem": ("PROBLEM", "bold red"),
}


def doctor(
    llm_args: Annotated[
        Path | None,
        typer.Option(help="The engine's YAML file, to look at its arguments too.", exists=True, dir_okay=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Look at settings, connector, journal, agent, endpoint, store and the engine's arguments, and say what to do.

    Exits with 1 if there is a problem.
    """
    resolved, results = checks.check_settings(os.environ)
    results += checks.check_runtime()
    if resolved is not None:
        results += checks.check_connector(resolved.connector)
        results += checks.check_journal(resolved)
        results += checks.check_agent(resolved, os.environ)
        results += checks.check_backend(resolved)
    if llm_args is not None:
        results += checks.check_arguments(llm_args)
    if current.journal is not None:
        for found in results:
            current.journal.write(Finding(perf_counter_ns(), found.check, found.severity, found.subject, found.what))
    problems = sum(found.severity == "problem" for found in results)
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode({"problems": problems, "results": results}) + b"\n")
    else:
        _print(results, problems)
    if problems:
        raise typer.Exit(1)


def _print(results: list[checks.Result], problems: int) -> None:
    console = Console(highlight=False)
    for found in results:
        mark, style = _MARKS[found.severity]
        line = Text()
        line.append(f"{mark:8}", style)
        line.append(f"{found.check:10}", "dim")
        line.append(f"{found.subject}  ", "bold")
        line.append(found.what)
        console.print(line, soft_wrap=True)
        if found.remedy:
            console.print(Text(f"{'':18}-> {found.remedy}"), soft_wrap=True)
    console.print("no problem" if not problems else f"{problems} problem{'s' if problems > 1 else ''}")
