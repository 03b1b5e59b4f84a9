"""Journals of the past, or of this moment, through the rules: the records of all processes in the order of their times."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, cast

import msgspec

from tracekv.journal.layout import JournalFacts
from tracekv.journal.process_scan import ProcessScan
from tracekv.journal.reader import JournalReader
from tracekv.journal.records import Record, decode
from tracekv.journal.ring import KEPT_RECORDS
from tracekv.rules.checker import Checker

_TOLD_EVERY = 4096
_KEPT = cast("tuple[type[Record], ...]", tuple(KEPT_RECORDS))


class _Dated(NamedTuple):
    """A record at its time; ``reader`` and ``sequence`` decide between equal times."""

    at_ns: int
    reader: int
    sequence: int
    record: Record


class Read(NamedTuple):
    """What was read.

    Attributes:
        records: How many.
        lost: How many a reader can tell to be missing.
        undecodable: Whole records that this version doesn't know; they are among the lost.
        running: Processes that may write more: what waits for more records was not judged.
    """

    records: int
    lost: int
    undecodable: int
    running: int


def judge(readers: Sequence[JournalReader], checker: Checker) -> Read:
    """Feed everything that the readers hold now.

    Times of processes of one boot are compared as they are, others by their clock anchors.
    """
    tally = _Tally()
    facts = [reader.facts for reader in readers]
    _feed(facts, [_records(reader, tally) for reader in readers], checker, tally)
    running = sum(reader.is_alive() for reader in readers)
    if not running:
        checker.close()
    return Read(tally.records, tally.lost, tally.undecodable, running)


def judge_scanned(
    processes: Sequence[ProcessScan],
    checker: Checker,
    *,
    ranges: Sequence[tuple[int, int]] | None = None,
    progress: Callable[[int], object] | None = None,
) -> Read:
    """As :func:`judge`, of what was scanned.

    Args:
        processes: Whose records.
        checker: Fed with them.
        ranges: Of each, the numbers ``[first, last)`` that are judged; what explains the others (which process, run, layout) is
            judged in any case. Where a range ends before the records do, what waits for later ones is not judged.
        progress: Called now and then with how many records were fed.
    """
    tally = _Tally(progress)
    wanted = ranges or [(0, process.next_sequence) for process in processes]
    streams = [_scanned(process, *each) for process, each in zip(processes, wanted, strict=True)]
    _feed([process.facts for process in processes], streams, checker, tally)
    running = sum(process.is_alive() for process in processes)
    if not running and all(last >= each.next_sequence for each, (_, last) in zip(processes, wanted, strict=True)):
        checker.close()
    undecodable = sum(process.undecodable for process in processes)
    return Read(tally.records, sum(process.lost for process in processes), undecodable, running)


def source_name(facts: JournalFacts) -> str:
    """How findings name the process of ``facts``."""
    return f"{facts.host}:{facts.pid}:{facts.process_id.hex()[:8]}"


class _Tally:
    def __init__(self, progress: Callable[[int], object] | None = None) -> None:
        self.records = self.lost = self.undecodable = 0
        self._progress = progress

    def count(self) -> None:
        self.records += 1
        if self._progress is not None and self.records % _TOLD_EVERY == 0:
            self._progress(self.records)


_Stream = Iterator[tuple[int, Record]]


def _feed(facts: Sequence[JournalFacts], streams: Sequence[_Stream], checker: Checker, tally: _Tally) -> None:
    offsets: dict[str, int] = {}
    dated = []
    for number, (each, stream) in enumerate(zip(facts, streams, strict=True)):
        offset = offsets.setdefault(each.boot_id, each.wall_ns - each.monotonic_ns)
        dated.append(_dated(stream, number, offset))
    names = [source_name(each) for each in facts]
    for one in heapq.merge(*dated, key=lambda each: each[:3]):
        tally.count()
        checker.feed(names[one.reader], one.record, one.sequence)


def _dated(stream: _Stream, number: int, offset_ns: int) -> Iterator[_Dated]:
    now = 0
    for sequence, record in stream:
        now = max(now, time_of(record))
        yield _Dated(now + offset_ns, number, sequence, record)


def _records(reader: JournalReader, tally: _Tally) -> _Stream:
    cursor = 0
    while True:
        frames, cursor, lost = reader.read_frames(cursor)
        tally.lost += lost
        if not frames:
            return
        for frame in frames:
            try:
                yield frame.sequence, decode(frame.payload)
            except msgspec.DecodeError:  # seen as a gap, by its missing number
                tally.undecodable += 1


def _scanned(process: ProcessScan, first: int, last: int) -> _Stream:
    yield from process.numbered(*_KEPT, last=first)
    yield from process.numbered(first=first, last=last)


def time_of(record: Record) -> int:
    """When it was written, as far as it says; reports of transfers may come long after they began."""
    for name in ("ended_ns", "last_ended_ns", "at_ns", "monotonic_ns"):
        value = getattr(record, name, None)
        if isinstance(value, int):
            return value
    return 0
