"""``tracekv export``: journals for other tools: Perfetto, whatever reads OTLP, spreadsheets and data frames."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated, BinaryIO

import typer
from rich.console import Console

from tracekv import settings as settings_module
from tracekv.agent.feed import Feed
from tracekv.agent.paths import NoJournals
from tracekv.cli._judging import is_of_run
from tracekv.cli._opening import Paths, scanned
from tracekv.cli._output import STDOUT, CannotWrite, output_directory, output_file
from tracekv.journal.process_scan import ProcessScan
from tracekv.journal.records import Enqueued, RunJoined
from tracekv.journal.scan import Scan
from tracekv.rules import Checker, Finding
from tracekv.rules.offline import judge_scanned
from tracekv.settings import Settings, SettingsError
from tracekv.views.model import Span
from tracekv.views.otlp import to_json_line
from tracekv.views.perfetto import write_perfetto
from tracekv.views.runs import runs_of
from tracekv.views.sampling import Callers
from tracekv.views.tables import TABLES, sources_of, write_csv

export = typer.Typer(add_completion=False, no_args_is_help=True, help="Write what journals hold for other tools.")

Output = Annotated[Path, typer.Option("-o", "--output", help="The file to write; - for standard output.")]
#: Spans on one line of OTLP JSON.
_BATCH = 512


@export.command()
def perfetto(output: Output, paths: Paths = None) -> None:
    """Chrome trace events, for ui.perfetto.dev, chrome://tracing or vizviewer: lanes, counters, and arrows from loads to first use."""
    with _scanned(paths) as (scan, settings):
        with output_file(output) as file:
            events = write_perfetto(scan.processes, file, hash_request_ids=settings.hash_request_ids)
        _say(f"{events} events of {scan.records} records in {output}", output)


class Detail(str, Enum):
    """How per-layer hooks are told."""

    ECONOMY = "economy"
    FULL = "full"


@export.command()
def otlp(
    output: Output,
    paths: Paths = None,
    detail: Annotated[
        Detail, typer.Option(help="full: a span per call of a per-layer hook; economy: one per layer group and pass.")
    ] = Detail.ECONOMY,
) -> None:
    """Spans as OTLP JSON lines: those that the agent would have exported, of every request and step."""
    with _scanned(paths) as (scan, settings):
        callers = _callers(scan.processes)
        told = Settings(detail=detail.value, hash_request_ids=settings.hash_request_ids, step_sample=1)
        with output_file(output) as file:
            spans = sum(_write_spans(process, file, told, callers) for process in scan.processes)
        _say(f"{spans} spans of {scan.records} records in {output}", output)


TableName = Enum("TableName", {name: name for name in (*TABLES, "findings")}, type=str)  # type: ignore[misc]  # made of what there is


@export.command("csv")
def tables(
    output: Annotated[
        Path,
        typer.Option("-o", "--output", help="A directory for a file per table; with --table the file, - for stdout."),
    ],
    paths: Paths = None,
    table: Annotated[TableName | None, typer.Option(help="This table alone.")] = None,
    rules: Annotated[bool, typer.Option(help="Judge the run by the rules, for the table of findings.")] = True,
) -> None:
    """Flat tables: requests, transfers, callbacks, misses, store operations, findings."""
    names = (*TABLES, "findings") if rules else tuple(TABLES)
    with _scanned(paths) as (scan, settings):
        if table is None:
            output_directory(output)
        sources = sources_of(scan.processes, hash_request_ids=settings.hash_request_ids)
        for name in names if table is None else [table.value]:
            path = output if table is not None else output / f"{name}.csv"
            with output_file(path) as file:
                if name == "findings":
                    rows = _write_findings(scan.processes, file, hashed=settings.hash_request_ids)
                else:
                    rows = write_csv(TABLES[name], sources, file)
            _say(f"{rows} {name.replace('_', ' ')} in {path}", path)


@contextmanager
def _scanned(paths: Sequence[Path] | None) -> Iterator[tuple[Scan, Settings]]:
    """What is to be exported. What is wrong with it, or with where it goes, is said."""
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        settings = settings_module.load()
        with scanned(paths or []) as scan:
            yield scan, settings
            if scan.lost:
                errors.print(f"tracekv: {scan.lost:,} records were overwritten before they were read", markup=False)
            for note in scan.left_out:
                errors.print(note, markup=False)
    except (NoJournals, SettingsError, CannotWrite) as error:
        errors.print(str(error), markup=False)
        raise typer.Exit(1) from None


def _say(what: str, output: Path) -> None:
    if output != STDOUT:
        typer.echo(what, err=True)


def _callers(processes: Sequence[ProcessScan]) -> Callers:
    """Who sent the requests: known before any journal is viewed, as the agent does it."""
    callers = Callers()
    for process in processes:
        run = process.facts.process_id
        early: list[Enqueued] = []
        for record in process.select(RunJoined, Enqueued):
            if isinstance(record, RunJoined):
                run = record.run_id
                for enqueued in early:
                    callers.learn(run, enqueued)
                early = []
            elif isinstance(record, Enqueued):
                callers.learn(run, record)
                early.append(record)
    return callers


def _write_spans(process: ProcessScan, file: BinaryIO, settings: Settings, callers: Callers) -> int:
    feed = Feed(settings, {"service.name": os.environ.get("OTEL_SERVICE_NAME") or "tracekv"}, callers=callers)
    batch: list[Span] = []
    count = expected = 0
    for number, record in process.numbered():
        if number > expected:
            feed.lost(number - expected)
        expected = number + 1
        batch += feed.take(record)
        if len(batch) >= _BATCH:
            file.write(to_json_line(batch, feed.resource))
            count, batch = count + len(batch), []
    batch += feed.end()
    if batch:
        file.write(to_json_line(batch, feed.resource))
    return count + len(batch)


_FINDING = ("id", "rule", "severity", "by", "rank", "step", "request", "callback", "at_ns", "caused_by", "title", "fix")


def _write_findings(processes: Sequence[ProcessScan], file: BinaryIO, *, hashed: bool) -> int:
    runs = runs_of(processes)
    checker = Checker()
    judge_scanned(processes, checker)
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    writer = csv.writer(text)
    writer.writerow(_FINDING)
    for found in checker.findings:
        row = {name: _plain(found, name) for name in _FINDING}
        run = next((run for run in runs if is_of_run(found, run)), None)
        if found.request is not None and (hashed or run is not None):
            row["request"] = run.request_label(found.request, hashed=hashed) if run is not None else None
        writer.writerow(row.values())
    text.flush()
    text.detach()
    return len(checker.findings)


def _plain(found: Finding, name: str) -> object:
    value = getattr(found, name)
    return value.value if isinstance(value, Enum) else value
