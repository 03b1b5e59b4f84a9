"""``tracekv check``: which rules of the contract were broken, by whom, where, and what proves it."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from tracekv import settings as settings_module
from tracekv.agent.paths import NoJournals
from tracekv.cli._judging import as_shown, untold, violations
from tracekv.cli._opening import Paths, progress_bar, scanned
from tracekv.journal.scan import Scan
from tracekv.rules import Checker, Finding, Severity
from tracekv.rules.offline import Read, judge_scanned
from tracekv.rules.showing import in_words, record_fields
from tracekv.settings import SettingsError
from tracekv.views.runs import runs_of

_UNUSABLE = 2
_STYLES = {Severity.VIOLATION: "bold red", Severity.SUSPECT: "yellow"}


def check(
    paths: Paths = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Judge recorded runs by the rules of the connector contract.

    Exits with 1 if a rule is violated, with 0 if nothing or only suspects are found, with 2 if there is nothing to judge.
    """
    checker = Checker()
    try:
        hashed = settings_module.load().hash_request_ids
        with scanned(paths or []) as scan:
            with progress_bar("judging") as tell:
                read = judge_scanned(scan.processes, checker, progress=lambda done: tell(done, scan.records))
            _tell(scan, checker, read, as_json=as_json, hashed=hashed)
    except (NoJournals, SettingsError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(_UNUSABLE) from None
    if violations(checker):
        raise typer.Exit(1)


def _tell(scan: Scan, checker: Checker, read: Read, *, as_json: bool, hashed: bool) -> None:
    runs = runs_of(scan.processes) if hashed else []
    shown = [as_shown(found, runs, hashed=hashed) for found in checker.findings]
    if as_json:
        report = _report(checker, read, len(scan.processes), shown)
        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    else:
        _print(checker, read, len(scan.processes), shown, hashed=hashed)
    for note in scan.notes:
        typer.echo(note, err=True)


def _report(checker: Checker, read: Read, processes: int, shown: list[dict[str, Any]]) -> dict[str, Any]:
    proved = violations(checker)
    return {
        "violations": proved,
        "suspects": checker.counts.total() - proved,
        "counts": dict(checker.counts),
        "processes": processes,
        **read._asdict(),
        "removed_rules": checker.removed,
        "findings": shown,
    }


def _print(checker: Checker, read: Read, processes: int, shown: list[dict[str, Any]], *, hashed: bool) -> None:
    console = Console(highlight=False)
    for found, data in zip(checker.findings, shown, strict=True):
        _print_finding(console, found, data)
    if hashed and shown:
        console.print("proofs are left out: they name requests, whose ids are hashed here", soft_wrap=True)
    for rule, error in checker.removed.items():
        console.print(Text(f"{rule} failed and was removed: {error}", "bold red"), soft_wrap=True)
    for rule, more in untold(checker).items():
        console.print(f"{rule}: {more} more of these", soft_wrap=True)
    told = f"{read.records} records of {processes} process{'es' if processes > 1 else ''}"
    if read.lost or read.undecodable:
        told += f", {read.lost} lost, {read.undecodable} unknown"
    if read.running:
        told += f"; {read.running} still running: what waits for more records is not judged"
    proved = violations(checker)
    suspects = checker.counts.total() - proved
    console.print(
        f"{told}: {proved} violation{'s' if proved != 1 else ''}, {suspects} suspect{'s' if suspects != 1 else ''}",
        soft_wrap=True,
    )


def _print_finding(console: Console, found: Finding, data: dict[str, Any]) -> None:
    head = Text()
    head.append(f"{found.severity.value.upper():10}", _STYLES[found.severity])
    head.append(f"{found.id:8}", "bold")
    head.append(found.title)
    console.print(head, soft_wrap=True)
    where = {"request": data["request"], "step": found.step or None, "rank": found.rank}
    lines = [f"by the {found.by.value}: {' '.join(filter(None, (found.callback, in_words(where))))}"]
    if found.numbers:
        lines.append(in_words(data["numbers"]))
    if found.caused_by:
        lines.append(f"follows from {found.caused_by}")
    lines.append(f"-> {found.fix}")
    if data["evidence"]:
        lines += [
            f"proof: {type(each.record).__name__} {in_words(record_fields(each.record))}" for each in found.evidence
        ]
    for line in lines:
        console.print(Text(f"{'':10}{line}"), soft_wrap=True)
