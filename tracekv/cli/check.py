"""``tracekv check``: which rules of the contract were broken, by whom, where, and what proves it."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from tracekv import settings as settings_module
from tracekv.journal.directory import default_directory
from tracekv.journal.layout import JournalFormatError
from tracekv.journal.opening import open_journals
from tracekv.journal.reader import JournalReader
from tracekv.rules import Checker, Finding, Severity
from tracekv.rules.offline import Read, judge
from tracekv.rules.showing import as_data, in_words, record_fields
from tracekv.settings import SettingsError

_UNUSABLE = 2
_STYLES = {Severity.VIOLATION: "bold red", Severity.SUSPECT: "yellow"}


class Unusable(Exception):
    """There is nothing to judge, with the reason."""


def check(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Journals, archives, or folders of them; by default TRACEKV_JOURNAL_DIR.", show_default=False
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Judge recorded runs by the rules of the connector contract.

    Exits with 1 if a rule is violated, with 0 if nothing or only suspects are found, with 2 if there is nothing to judge.
    """
    checker = Checker()
    try:
        with ExitStack() as open_files:
            readers = _open(paths or [_default()], open_files)
            read = judge(readers, checker)
    except (Unusable, SettingsError, JournalFormatError, OSError) as error:
        typer.echo(_reason(error), err=True)
        raise typer.Exit(_UNUSABLE) from None
    violations = sum(found.severity is Severity.VIOLATION for found in checker.findings)
    if as_json:
        report = _report(checker, read, len(readers), violations)
        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    else:
        _print(checker, read, len(readers), violations)
    if violations:
        raise typer.Exit(1)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"tracekv: {error.filename or 'a journal'} can't be read: {error.strerror or error}"
    return str(error)


def _default() -> Path:
    chosen = settings_module.load().journal_dir
    return Path(chosen) if chosen else default_directory()


def _open(paths: list[Path], open_files: ExitStack) -> list[JournalReader]:
    readers: list[JournalReader] = []
    for path in paths:
        for reader in open_journals(path, patience_ns=0):
            open_files.callback(reader.close)
            readers.append(reader)
    if not readers:
        where = ", ".join(str(path) for path in paths)
        raise Unusable(
            f"tracekv: there is no journal in {where}. Name a journal, an archive or a folder of them, or set TRACEKV_JOURNAL_DIR."
        )
    return readers


def _report(checker: Checker, read: Read, processes: int, violations: int) -> dict[str, Any]:
    return {
        "violations": violations,
        "suspects": len(checker.findings) - violations,
        "counts": dict(checker.counts),
        "processes": processes,
        **read._asdict(),
        "removed_rules": checker.removed,
        "findings": [as_data(found) for found in checker.findings],
    }


def _print(checker: Checker, read: Read, processes: int, violations: int) -> None:
    console = Console(highlight=False)
    for found in checker.findings:
        _print_finding(console, found)
    for rule, error in checker.removed.items():
        console.print(Text(f"{rule} failed and was removed: {error}", "bold red"), soft_wrap=True)
    for rule, count in checker.counts.items():
        shown = sum(found.rule == rule for found in checker.findings)
        if count > shown:
            console.print(f"{rule}: {count - shown} more of these", soft_wrap=True)
    told = f"{read.records} records of {processes} process{'es' if processes > 1 else ''}"
    if read.lost or read.undecodable:
        told += f", {read.lost} lost, {read.undecodable} unknown"
    if read.running:
        told += f"; {read.running} still running: what waits for more records is not judged"
    suspects = len(checker.findings) - violations
    console.print(
        f"{told}: {violations} violation{'s' if violations != 1 else ''}, {suspects} suspect{'s' if suspects != 1 else ''}",
        soft_wrap=True,
    )


def _print_finding(console: Console, found: Finding) -> None:
    head = Text()
    head.append(f"{found.severity.value.upper():10}", _STYLES[found.severity])
    head.append(f"{found.id:8}", "bold")
    head.append(found.title)
    console.print(head, soft_wrap=True)
    where = {"request": found.request, "step": found.step or None, "rank": found.rank}
    lines = [f"by the {found.by.value}: {' '.join(filter(None, (found.callback, in_words(where))))}"]
    if found.numbers:
        lines.append(in_words(found.numbers))
    if found.caused_by:
        lines.append(f"follows from {found.caused_by}")
    lines.append(f"-> {found.fix}")
    lines += [f"proof: {type(each.record).__name__} {in_words(record_fields(each.record))}" for each in found.evidence]
    for line in lines:
        console.print(Text(f"{'':10}{line}"), soft_wrap=True)
