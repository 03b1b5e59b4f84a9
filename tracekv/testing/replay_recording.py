"""What ``TRACEKV_RECORD=replay`` left in journals: the lives of engines, each with its callbacks in order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tracekv.journal.opening import open_journals
from tracekv.journal.reader import JournalReader
from tracekv.journal.records import (
    AllocCall,
    BuildCall,
    ConnectorWrapped,
    QueryCall,
    Record,
    RegisterCall,
    ReplayCaches,
    ReplayEnd,
    ReplayPrompt,
    ReplayStart,
)
from tracekv.journal.vocabulary import Side


class NoRecording(ValueError):
    """The journals hold nothing that can be replayed; the message says what is missing."""


@dataclass
class FirstReport:
    """Where a query's request is first reported.

    Attributes:
        build: The pass's record.
        position: In its ``request_ids``.
        end: First token position behind what the pass computes.
    """

    build: BuildCall
    position: int
    end: int


@dataclass
class Life:
    """One engine, from its connector's construction on.

    Attributes:
        connector: Class name of its scheduler.
        records: Everything recorded in it, in order.
    """

    start: ReplayStart
    records: list[Record] = field(default_factory=list)
    connector: str = ""
    register: RegisterCall | None = None
    caches: ReplayCaches | None = None

    @property
    def is_v2(self) -> bool:
        """The V2 cache manager, with page lists per layer group."""
        return self.start.is_v2 if self.start.is_v2 is not None else not (self.caches and self.caches.shape)

    def look_ahead(self) -> LookAhead:
        """What the records behind each one say of it."""
        ends: dict[int, ReplayEnd] = {}
        reports: dict[int, tuple[BuildCall, int]] = {}
        allocs: dict[int, AllocCall] = {}
        ahead = LookAhead()
        for index in range(len(self.records) - 1, -1, -1):
            record = self.records[index]
            if isinstance(record, ReplayEnd):
                ends[record.request_id] = record
            elif isinstance(record, ReplayPrompt):
                ahead.prompts.append((record, ends.get(record.request_id)))
                ahead.ends[index] = ends.get(record.request_id)
            elif isinstance(record, AllocCall):
                allocs[record.request_id] = record
            elif isinstance(record, BuildCall):
                reports.update((each, (record, position)) for position, each in enumerate(record.request_ids))
            elif isinstance(record, QueryCall):
                report, alloc = reports.pop(record.request_id, None), allocs.pop(record.request_id, None)
                if report is not None:
                    ahead.reports[index] = _first_report(record, alloc, *report)
        ahead.prompts.reverse()
        return ahead


@dataclass
class LookAhead:
    """By index of a record.

    Attributes:
        ends: Of a ``ReplayPrompt``: all tokens of the request, None where it wasn't seen to finish.
        reports: Of a ``QueryCall``: the request's first report; absent where it was never scheduled.
        prompts: Each prompt with its end, in order.
    """

    ends: dict[int, ReplayEnd | None] = field(default_factory=dict)
    reports: dict[int, FirstReport] = field(default_factory=dict)
    prompts: list[tuple[ReplayPrompt, ReplayEnd | None]] = field(default_factory=list)


def _first_report(query: QueryCall, alloc: AllocCall | None, build: BuildCall, position: int) -> FirstReport:
    honoured = 0
    if alloc is not None:  # V1 may not say, and takes everything
        honoured = query.offered_tokens if alloc.honoured_tokens is None else alloc.honoured_tokens
    # A synchronous load is reported where it begins, an asynchronous one where it ends (contract.md section 1.3).
    end = build.computed_positions[position] + build.scheduled_tokens[position]
    return FirstReport(build, position, end if query.is_async else end + honoured)


@dataclass
class Recording:
    """What was read.

    Attributes:
        lost: Records that the ring overwrote before they were read: from the first gap on the replay may stray.
    """

    lives: list[Life]
    lost: int


def read_recording(paths: Iterable[Path]) -> Recording:
    """The lives in journals, oldest process first; processes without a scheduler (other ranks) have none.

    Raises:
        NoRecording: There is none.
        JournalFormatError, OSError: A file is no journal, or can't be read.
    """
    readers: list[JournalReader] = []
    try:
        for path in paths:
            readers += open_journals(path, patience_ns=0)
        readers.sort(key=lambda reader: reader.facts.monotonic_ns)
        found, lost = [], 0
        for reader in readers:
            records, missing = _read_all(reader)
            found += _lives(records)
            lost += missing
    finally:
        for reader in readers:
            reader.close()
    if not found:
        raise NoRecording(
            f"tracekv: {len(readers)} journals, and none holds a recording for replay. Run the engine with "
            "TRACEKV_RECORD=replay, and read the journal of the rank that has the scheduler."
        )
    usable = [life for life in found if life.register is not None]
    if not usable:
        raise NoRecording("tracekv: the recorded connector never registered its caches, so there is nothing to replay.")
    return Recording(usable, lost)


def _read_all(reader: JournalReader) -> tuple[list[Record], int]:
    records: list[Record] = []
    cursor = lost = 0
    while True:
        some, cursor, missing = reader.read(cursor)
        lost += missing
        if not some:
            return records, lost
        records += some


def _lives(records: list[Record]) -> list[Life]:
    lives: list[Life] = []
    for record in records:
        if isinstance(record, ReplayStart):
            lives.append(Life(record))
        elif lives:
            life = lives[-1]
            life.records.append(record)
            if isinstance(record, RegisterCall):
                life.register = record
            elif isinstance(record, ReplayCaches):
                life.caches = record
            elif isinstance(record, ConnectorWrapped) and record.side is Side.SCHEDULER:
                life.connector = record.class_name
    return lives
