"""Finds the frames of a large file many at a time: what :mod:`frames` finds, in less time.

Needs numpy, which the core doesn't: :mod:`frames` goes without this where it isn't installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

from tracekv.journal import archive
from tracekv.journal.arrays import np, npt
from tracekv.journal.frames import ArchiveScan, Kinds, crc_over
from tracekv.journal.layout import FRAME_BYTES, FRAME_FIELDS, SLOT_BYTES, Area, Field

_TYPES = {"I": "<u4", "Q": "<u8"}


def _named(fields: Sequence[Field]) -> list[tuple[str, str]]:
    return [(field.name, _TYPES[field.format]) for field in fields]


_SLOT = np.dtype([*_named(FRAME_FIELDS), ("payload", np.uint8, (SLOT_BYTES - FRAME_BYTES,))])
_ENTRY = np.dtype(_named(archive.ENTRY_FIELDS))

_Ints = npt.NDArray[np.int64]
_Bytes = npt.NDArray[np.uint8]


def take_ring(view: memoryview, area: Area, position: int, stop: int, kinds: Kinds) -> int | None:
    """As ``frames.take_ring``; None, with nothing taken, where anything is damaged, or looks like a frame within a frame."""
    base, slots, _ = area
    edge = base + slots * SLOT_BYTES
    table = np.frombuffer(view, _SLOT, slots, base)
    positions = np.arange(position, stop)
    found = positions[table["position"][positions % slots] == positions]
    heads = table[found % slots]
    del table  # what is interrupted below must not hold the file
    if (heads["position"] != found).any():  # overwritten between the two looks
        return None
    lengths = heads["length"].astype(np.int64)
    nexts = found + (FRAME_BYTES + lengths + SLOT_BYTES - 1) // SLOT_BYTES
    if not found.size or (lengths > slots * SLOT_BYTES - FRAME_BYTES).any() or (found[1:] < nexts[:-1]).any():
        return None
    begins = base + found % slots * SLOT_BYTES
    ends = begins + FRAME_BYTES + lengths
    crcs = [
        crc32(view[begin + 4 : end]) if end <= edge else crc_over(view, begin, end, base, edge)
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)
    ]
    if (np.array(crcs, np.uint32) != heads["crc"]).any():
        return None
    payloads = heads["payload"]
    _add(kinds, _tags(payloads[:, 0], payloads[:, 1], payloads[:, 3]), heads["sequence"], found, lengths)
    return int(nexts[-1])


def take_entries(view: memoryview, offset: int, stop: int, into: ArchiveScan) -> int:
    """As ``frames.take_entries``."""
    size, entry_bytes = len(view), archive.ENTRY.size
    unpack = archive.CRC_AND_LENGTH.unpack_from
    offsets = []
    while offset < stop and offset + entry_bytes <= size:
        crc, length = unpack(view, offset)
        end = offset + entry_bytes + length
        if end > size or crc32(view[offset + 4 : end]) != crc:
            break
        offsets.append(offset)
        offset = end
    if not offsets:
        return offset
    begins = np.array(offsets, np.int64)
    data = np.frombuffer(view, np.uint8)
    heads = np.ndarray((size - entry_bytes + 1,), _ENTRY, data, 0, (1,))[begins]
    lengths, payloads = heads["length"].astype(np.int64), begins + entry_bytes
    is_record = heads["kind"] == archive.RECORD
    for at in np.flatnonzero(~is_record).tolist():
        begin, length = int(payloads[at]), int(lengths[at])
        into.tell(int(heads["kind"][at]), int(heads["source"][at]), bytes(view[begin : begin + length]))
    chosen = np.flatnonzero(is_record & (lengths > 0))
    heads, lengths, payloads = heads[chosen], lengths[chosen], payloads[chosen]
    tags = _tags(*(data[np.minimum(payloads + at, size - 1)] for at in (0, 1, 3)))
    for source in np.unique(heads["source"]).tolist():
        rows = heads["source"] == source
        kinds = into.kinds.setdefault(source, Kinds())
        _add(kinds, tags[rows], heads["sequence"][rows], payloads[rows], lengths[rows])
    return offset


def _tags(first: _Bytes, second: _Bytes, fourth: _Bytes) -> _Ints:
    """As ``frames.tag_of``, from the bytes of some payloads."""
    tags = np.where((first & 0xF0) == 0x90, second, np.where(first == 0xDC, fourth, 0xFF)).astype(np.int64)
    return np.where(tags < 0x80, tags, -1)


def _add(kinds: Kinds, tags: _Ints, numbers: npt.NDArray[np.uint64], places: _Ints, lengths: _Ints) -> None:
    for tag in np.unique(tags).tolist():
        rows = tags == tag
        column = kinds.by_tag.get(tag) or kinds.tag(tag)
        column.numbers.frombytes(numbers[rows].tobytes())
        column.places.frombytes(places[rows].astype(np.uint64).tobytes())
        column.lengths.frombytes(lengths[rows].astype(np.uint32).tobytes())
