"""Where the frames of a ring or of an archive lie, by kind of record: found without making an object of any record.

A frame is checked as a reader checks it (position and CRC, or an entry's CRC), and of its payload only the tag is looked at.
"""

from __future__ import annotations

import importlib
import mmap
import struct
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from zlib import crc32

from tracekv.journal import archive
from tracekv.journal.layout import FRAME, FRAME_BYTES, SLOT_BYTES, Area

_HEAD = struct.Struct("<q")
#: Bytes after which the pages read so far are given back, since a file may be larger than the memory that a reader should take. Where
#: anything in so many bytes is damaged, or being written, they are looked at one by one.
_WINDOW = 4 << 20
#: Slots from which on numpy is worth its import.
_MANY_SLOTS = 1 << 14

Progress = Callable[[int], object]
"""Told how many bytes of a file were passed since it was told last."""


class Column(NamedTuple):
    """The records of one tag, in order: their sequence numbers, where they lie, and the bytes of their payloads.

    What a place is, whoever scanned knows: a position of a ring, or where a payload begins in an archive.
    """

    numbers: array[int]
    places: array[int]
    lengths: array[int]


class Kinds:
    """Where the records of one process lie in one place, by tag; places and sequence numbers rise within a tag.

    Attributes:
        by_tag: A column for each tag there is.
        first: Lowest sequence number; ``last`` the highest, -1 for none.
        records: How many there are.
    """

    def __init__(self) -> None:
        self.by_tag: dict[int, Column] = {}
        self.first = -1
        self.last = -1
        self.records = 0

    def tag(self, tag: int) -> Column:
        """The column of a tag that wasn't seen yet, to be appended to."""
        found = self.by_tag[tag] = Column(array("Q"), array("Q"), array("I"))
        return found

    def close(self) -> None:
        """Sum up, when all is appended."""
        numbers = [column.numbers for column in self.by_tag.values() if column.numbers]
        self.records = sum(map(len, numbers))
        self.first = min((each[0] for each in numbers), default=-1)
        self.last = max((each[-1] for each in numbers), default=-1)


def tag_of(payload: memoryview, at: int) -> int:
    """The tag of an encoded record: the first element of a MessagePack array; -1 where it isn't one byte."""
    head = payload[at]
    tag = payload[at + 1] if head & 0xF0 == 0x90 else payload[at + 3] if head == 0xDC else 0xFF
    return tag if tag < 0x80 else -1


def scan_ring(mapping: mmap.mmap, area: Area, progress: Progress) -> tuple[Kinds, int]:
    """The records of one ring, places being positions, and the position to read on from.

    What is half written or damaged is passed over, as ``RingReader`` does.
    """
    _, slots, cells = area
    head: int = _HEAD.unpack_from(mapping, cells)[0]
    position = end_of_read = max(0, head - slots)
    bulk = _bulk_frames() if head - position >= _MANY_SLOTS else None
    kinds = Kinds()
    with memoryview(mapping) as view:
        while position < head:
            stop = min(head, position + _WINDOW // SLOT_BYTES)
            reached = bulk.take_ring(view, area, position, stop, kinds) if bulk else None
            if reached is None:
                reached = take_ring(view, area, position, stop, kinds)
            if reached > position:
                end_of_read = reached
            progress((stop - position) * SLOT_BYTES)
            position = max(stop, reached)
            give_back(mapping)
    kinds.close()
    return kinds, end_of_read


def take_ring(view: memoryview, area: Area, position: int, stop: int, kinds: Kinds) -> int:
    """Add the frames that begin at positions ``[position, stop)``; where the last one of them ends, or ``position``."""
    base, slots, _ = area
    ring_bytes = slots * SLOT_BYTES
    longest, edge = ring_bytes - FRAME_BYTES, base + ring_bytes
    by_tag, unpack = kinds.by_tag, FRAME.unpack_from
    reached = position
    while position < stop:
        begin = base + position % slots * SLOT_BYTES
        crc, length, stored, sequence = unpack(view, begin)
        end = begin + FRAME_BYTES + length
        if (
            stored != position
            or length > longest
            or (crc32(view[begin + 4 : end]) if end <= edge else crc_over(view, begin, end, base, edge)) != crc
        ):
            position += 1
            continue
        # A frame and the first bytes of its payload lie in one slot, so never over the edge.
        tag = view[begin + 25] if view[begin + 24] & 0xF0 == 0x90 else tag_of(view, begin + 24)
        found = by_tag.get(tag) or kinds.tag(tag)
        found[0].append(sequence)
        found[1].append(position)
        found[2].append(length)
        reached = position = position + (FRAME_BYTES + length + SLOT_BYTES - 1) // SLOT_BYTES
    return reached


def crc_over(view: memoryview, begin: int, end: int, base: int, edge: int) -> int:
    """The CRC of a frame that goes on at its ring's beginning."""
    return crc32(view[base : base + end - edge], crc32(view[begin + 4 : edge]))


def ring_payloads(
    mapping: mmap.mmap, area: Area, places: Sequence[int], lengths: Sequence[int], *, changes: bool
) -> list[bytes | None]:
    """The payloads at some positions as they are now.

    Args:
        changes: The writer lives: None stands for those that were overwritten since, or are being.
    """
    if changes:
        return [_unless_overwritten(mapping, area, *each) for each in zip(places, lengths, strict=True)]
    base, slots, _ = area
    first, edge = base + FRAME_BYTES, base + slots * SLOT_BYTES
    return [
        mapping[begin:end]
        if (end := (begin := first + place % slots * SLOT_BYTES) + length) <= edge
        else mapping[begin:edge] + mapping[base : base + end - edge]
        for place, length in zip(places, lengths, strict=True)
    ]


def _unless_overwritten(mapping: mmap.mmap, area: Area, position: int, length: int) -> bytes | None:
    # Copied first: what the CRC is taken over is what is used.
    begin = area.offset + position % area.slots * SLOT_BYTES
    crc, _, stored, _ = FRAME.unpack(head := mapping[begin : begin + FRAME_BYTES])
    if stored != position:
        return None
    (payload,) = ring_payloads(mapping, area, [position], [length], changes=False)
    return payload if payload is not None and crc32(payload, crc32(head[4:])) == crc else None


class ArchiveScan:
    """What one archive holds.

    Attributes:
        facts, states: Encoded facts of each source, and the last state, by number.
        kinds: Records of each source; places are where their payloads begin.
        truncated_bytes: What comes after the last whole entry.
    """

    def __init__(self, mapping: mmap.mmap, progress: Progress) -> None:
        self.facts: dict[int, bytes] = {}
        self.states: dict[int, bytes] = {}
        self.kinds: dict[int, Kinds] = {}
        size = len(mapping)
        offset, reached = archive.PREFIX.size, 0
        bulk = _bulk_frames() if size >= _MANY_SLOTS * SLOT_BYTES else None
        take = bulk.take_entries if bulk else take_entries
        with memoryview(mapping) as view:
            while offset > reached:
                reached = offset
                offset = take(view, offset, min(size, offset + _WINDOW), self)
                progress(offset - reached)
                give_back(mapping)
        progress(size - offset)
        self.truncated_bytes = size - offset
        for each in self.kinds.values():
            each.close()

    def tell(self, kind: int, source: int, payload: bytes) -> None:
        """Take an entry that is no record."""
        (self.facts if kind == archive.FACTS else self.states)[source] = payload


def take_entries(view: memoryview, offset: int, stop: int, into: ArchiveScan) -> int:
    """Add the entries that begin at offsets ``[offset, stop)``, up to the first that is cut or damaged; where they end."""
    size = len(view)
    entry_bytes, unpack, record = archive.ENTRY.size, archive.ENTRY.unpack_from, archive.RECORD
    while offset < stop and offset + entry_bytes <= size:
        crc, length, kind, source, sequence = unpack(view, offset)
        payload = offset + entry_bytes
        end = payload + length
        if end > size or crc32(view[offset + 4 : end]) != crc:
            break
        if kind != record:
            into.tell(kind, source, bytes(view[payload:end]))
        elif length:
            kinds = into.kinds.get(source) or into.kinds.setdefault(source, Kinds())
            tag = view[payload + 1] if view[payload] & 0xF0 == 0x90 else tag_of(view, payload)
            found = kinds.by_tag.get(tag) or kinds.tag(tag)
            found[0].append(sequence)
            found[1].append(payload)
            found[2].append(length)
        offset = end
    return offset


def archive_payloads(mapping: mmap.mmap, places: Sequence[int], lengths: Sequence[int]) -> list[bytes | None]:
    """The payloads at some places, which were checked before."""
    return [mapping[place : place + length] for place, length in zip(places, lengths, strict=True)]


def give_back(mapping: mmap.mmap) -> None:
    """Let the kernel have the pages that were read; they are read again when they are needed."""
    mapping.madvise(mmap.MADV_DONTNEED)


def _bulk_frames() -> Any:
    """The module that finds many at a time, None where numpy isn't installed: there they are found one by one."""
    try:
        return importlib.import_module("tracekv.journal.bulk_frames")
    except ModuleNotFoundError as error:
        if error.name != "numpy":
            raise
        return None
