"""Journals of the past, or of this moment, through the rules: the records of all processes in the order of their times."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from tracekv.journal.reader import JournalReader
from tracekv.journal.records import Record, decode
from tracekv.rules.checker import Checker


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
    offsets: dict[str, int] = {}
    streams = []
    for number, reader in enumerate(readers):
        offset = offsets.setdefault(reader.facts.boot_id, reader.facts.wall_ns - reader.facts.monotonic_ns)
        streams.append(_dated(reader, number, offset, tally))
    names = [f"{reader.facts.host}:{reader.facts.pid}:{reader.facts.process_id.hex()[:8]}" for reader in readers]
    for dated in heapq.merge(*streams, key=lambda each: each[:3]):
        tally.records += 1
        checker.feed(names[dated.reader], dated.record, dated.sequence)
    running = sum(reader.is_alive() for reader in readers)
    if not running:
        checker.close()
    return Read(tally.records, tally.lost, tally.undecodable, running)


class _Tally:
    def __init__(self) -> None:
        self.records = self.lost = self.undecodable = 0


def _dated(reader: JournalReader, number: int, offset_ns: int, tally: _Tally) -> Iterator[_Dated]:
    cursor, now = 0, 0
    while True:
        frames, cursor, lost = reader.read_frames(cursor)
        tally.lost += lost
        if not frames:
            return
        for frame in frames:
            try:
                record = decode(frame.payload)
            except msgspec.DecodeError:  # seen as a gap, by its missing number
                tally.undecodable += 1
                continue
            now = max(now, _time_of(record))
            yield _Dated(now + offset_ns, number, frame.sequence, record)


def _time_of(record: Record) -> int:
    """When it was written, as far as it says; reports of transfers may come long after they began."""
    for name in ("ended_ns", "last_ended_ns", "at_ns", "monotonic_ns"):
        value = getattr(record, name, None)
        if isinstance(value, int):
            return value
    return 0
