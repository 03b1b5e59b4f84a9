"""Reads the ring file of a process that runs or has ended, without ever being in its way.

A frame is believed when its position is the one looked for and its CRC holds; the head that the writer publishes only says where to
look. So a record that is half written, half overwritten or damaged is passed over, and is seen as a gap in the sequence numbers.
"""

from __future__ import annotations

import mmap
import os
import struct
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from pathlib import Path
from time import perf_counter_ns
from typing import NamedTuple, Protocol, Self
from zlib import crc32

import msgspec

from tracekv.journal.layout import (
    ANCHOR,
    ANCHOR_OFFSETS,
    CONTROL_OFFSET,
    ENDED_OFFSET,
    FRAME,
    FRAME_BYTES,
    HEADER_BYTES,
    IN_PROGRESS_OFFSET,
    SLOT_BYTES,
    Area,
    JournalFacts,
    unpack_header,
)
from tracekv.journal.process import is_locked, is_running
from tracekv.journal.records import ClockAnchor, Record, decode

#: How long a missing number may be in the making before it counts as lost. A writer needs microseconds; one that was
#: stopped between taking a number and storing its record may need longer.
PATIENCE_NS = 1_000_000_000
#: How far behind the newest number one can be in the making: more than the other threads write while a thread that was stopped
#: there waits to get the GIL back. One further back was overwritten.
IN_THE_MAKING = 4096
#: Records that one ``read`` takes from each ring at most.
READ_LIMIT = 4096

_HEAD = struct.Struct("<q")


class Frame(NamedTuple):
    """An encoded record with its number in the process."""

    sequence: int
    payload: bytes


class OpenHook(NamedTuple):
    """A per-layer hook of the pass in progress; ``ended_ns`` 0 while it is inside."""

    layer: int
    started_ns: int
    ended_ns: int


class JournalState(msgspec.Struct, frozen=True):
    """What a journal holds beside records: what the process was doing when it was looked at, or died.

    Attributes:
        callback: The callback entered and not left (``vocabulary.Callback``), 0 for none.
        since_ns: When it was entered.
        waits, saves: Layer hooks of the pass in progress, not yet in a record.
        dropped: Records that were too large for their ring.
    """

    callback: int
    since_ns: int
    waits: list[OpenHook]
    saves: list[OpenHook]
    dropped: int


class JournalReader(Protocol):
    """What views see of a journal, be it a ring file or a process's part of an archive."""

    path: Path
    facts: JournalFacts
    #: Records with a whole frame that this version can't decode.
    undecodable: int

    def read(self, cursor: int, limit: int = READ_LIMIT) -> tuple[list[Record], int, int]:
        """Records from sequence ``cursor`` on: the records in order, the cursor to go on from, how many were lost between."""

    def read_frames(self, cursor: int, limit: int = READ_LIMIT) -> tuple[list[Frame], int, int]:
        """As ``read``, encoded."""

    def is_alive(self) -> bool:
        """Whether more can come."""

    def anchors(self) -> list[ClockAnchor]:
        """Clock anchors of the process, oldest first: the one of its start, and the latest."""

    def state(self) -> JournalState:
        """What the process was doing."""

    def close(self) -> None:
        """Give the file back."""


class _RingView:
    """Follows one ring by position; ``pending`` are the frames that were read and not yet given out."""

    def __init__(self, mapping: mmap.mmap, area: Area) -> None:
        self._mapping = mapping
        self._area = area
        self._position = 0
        self.pending: list[Frame] = []

    @property
    def newest(self) -> int:
        """Number of the last frame that was read and not yet given out; -1 for none."""
        return self.pending[-1].sequence if self.pending else -1

    def rewind(self) -> None:
        """Back to the oldest record."""
        self._position = 0
        self.pending = []

    def go_to(self, position: int) -> None:
        """Read on from a position."""
        self._position = position
        self.pending = []

    def collect(self, limit: int) -> None:
        """Read on until ``limit`` frames are pending, or nothing more is there."""
        pending = self.pending
        while len(pending) < limit:
            frame = self._frame_at(self._position)
            if frame is not None:
                pending.append(frame)
                self._position += (FRAME_BYTES + len(frame.payload) + SLOT_BYTES - 1) // SLOT_BYTES
            elif not self._skip():
                return

    def give_out(self, before: int) -> None:
        """Forget the frames with numbers below ``before``."""
        del self.pending[: bisect_left(self.pending, (before,))]

    def _skip(self) -> bool:
        """Nothing whole is at the position: go to the next whole frame, or to the head. False where that is here."""
        head: int = _HEAD.unpack_from(self._mapping, self._area.cells)[0]
        if head <= self._position:
            return False
        # The position itself is looked at again, now that the head is known to be past it: nothing says in which order the
        # stores of another process become visible.
        for position in range(max(self._position, head - self._area.slots), head):
            if self._frame_at(position) is not None:
                self._position = position
                return True
        self._position = head
        return True

    def _frame_at(self, position: int) -> Frame | None:
        base, slots, _ = self._area
        ring_bytes = slots * SLOT_BYTES
        mapping = self._mapping
        begin = position % slots * SLOT_BYTES
        payload_begin = begin + FRAME_BYTES
        # Copied first: what the CRC is taken over is what is used, whatever the writer does meanwhile.
        head = mapping[base + begin : base + payload_begin]
        crc, length, stored_position, sequence = FRAME.unpack(head)
        if stored_position != position or length > ring_bytes - FRAME_BYTES:
            return None
        end = payload_begin + length
        if end <= ring_bytes:
            payload = mapping[base + payload_begin : base + end]
        else:
            payload = mapping[base + payload_begin : base + ring_bytes] + mapping[base : base + end - ring_bytes]
        return Frame(sequence, payload) if crc32(payload, crc32(head[4:])) == crc else None


class RingReader:
    """Follows a ring file. One thread at a time.

    Attributes:
        path: The file.
        facts: Who writes it.
        undecodable: Records with a whole frame that this version can't decode.
        is_waiting: The last ``read`` left records behind, since one before them may be in the making: they come with a later one.
    """

    def __init__(self, path: Path, *, patience_ns: int = PATIENCE_NS) -> None:
        """Open and check the file.

        Args:
            path: The file; a symbolic link is refused.
            patience_ns: How long a missing number may be in the making before it counts as lost; 0 for who reads once.

        Raises:
            JournalFormatError: It is no journal, or none that this version reads.
            OSError: It can't be opened.
        """
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            # In this order: one that is just being made has its size before its header.
            header = os.pread(self._descriptor, HEADER_BYTES, 0)
            file_bytes = os.fstat(self._descriptor).st_size
            self.facts, self._layout = unpack_header(header, path, file_bytes)
            self._mapping = mmap.mmap(self._descriptor, file_bytes, access=mmap.ACCESS_READ)
        except BaseException:
            os.close(self._descriptor)
            raise
        self._rings = [_RingView(self._mapping, area) for area in self._layout.rings]
        self._cursor = 0
        self._patience_ns = patience_ns
        self._gap_at = -1
        self._gap_since_ns = 0
        self.undecodable = 0
        self.is_waiting = False

    def read(self, cursor: int, limit: int = READ_LIMIT) -> tuple[list[Record], int, int]:
        """Records from sequence ``cursor`` on.

        Going on from the last cursor costs what is new; from another one, a pass over the whole ring.

        Returns:
            The records in order (at most ``limit`` per ring), the cursor to go on from, and how many were lost between.
        """
        frames, cursor, lost = self.read_frames(cursor, limit)
        records, undecodable = decode_frames(frames)
        self.undecodable += undecodable
        return records, cursor, lost

    def read_frames(self, cursor: int, limit: int = READ_LIMIT) -> tuple[list[Frame], int, int]:
        """As :meth:`read`, with the records as they lie in the file."""
        if cursor != self._cursor:
            for ring in self._rings:
                ring.rewind()
            self._cursor = cursor
        frames, lost, self.is_waiting = self._merge(self._collect(limit), wait=True)
        if self.is_waiting and not self.is_alive():
            # What it stored before it ended is all there by now.
            more, lost_too, self.is_waiting = self._merge(self._collect(limit), wait=False)
            frames += more
            lost += lost_too
        return frames, self._cursor, lost

    def _collect(self, limit: int) -> int:
        """Read from each ring; the number up to which all that is stored is now pending."""
        for ring in self._rings:
            ring.collect(limit)
        # A ring is read while the others go on. Numbers below the newest seen by now are stored, but for those in the making:
        # a second look makes them complete.
        newest = max(ring.newest for ring in self._rings)
        for ring in self._rings:
            ring.collect(limit)
        return min([newest, *(ring.newest for ring in self._rings if len(ring.pending) >= limit)])

    def _merge(self, last: int, *, wait: bool) -> tuple[list[Frame], int, bool]:
        """Give out what is pending up to number ``last``: frames, how many were lost, whether a gap has to be waited for."""
        frames: list[Frame] = []
        cursor, lost, is_waiting = self._cursor, 0, False
        for frame in sorted(frame for ring in self._rings for frame in ring.pending):
            gap = frame.sequence - cursor
            if frame.sequence > last:
                break
            if gap < 0:
                continue  # before the cursor, or given up as lost before it came
            if gap and wait and self._may_come(cursor, frame.sequence):
                is_waiting = True
                break
            lost += gap
            frames.append(frame)
            cursor = frame.sequence + 1
        for ring in self._rings:
            ring.give_out(cursor)
        self._cursor = cursor
        return frames, lost, is_waiting

    def _may_come(self, first: int, end: int) -> bool:
        """Whether the numbers ``[first, end)`` may still be in the making: one in each ring that has nothing later yet."""
        newest = max(ring.newest for ring in self._rings)
        if newest - first > IN_THE_MAKING or end - first > sum(ring.newest < end for ring in self._rings):
            return False
        now = perf_counter_ns()
        if self._gap_at != first:
            self._gap_at, self._gap_since_ns = first, now
        return now - self._gap_since_ns < self._patience_ns

    def is_alive(self) -> bool:
        """Whether more can come: the journal was not closed, and its process runs."""
        if _HEAD.unpack_from(self._mapping, ENDED_OFFSET)[0]:
            return False
        running = is_running(self.facts)
        return is_locked(self._descriptor) if running is None else running

    def anchors(self) -> list[ClockAnchor]:
        """Clock anchors of the process, oldest first: the one of its start, and the latest where there is one."""
        found = [(0, self.facts.monotonic_ns, self.facts.wall_ns)]
        for offset in ANCHOR_OFFSETS:
            packed = self._mapping[offset : offset + ANCHOR.size]
            number, monotonic_ns, wall_ns, crc = ANCHOR.unpack(packed)
            if number and crc32(packed[:-4]) == crc:
                found.append((number, monotonic_ns, wall_ns))
        latest = max(found)
        return [ClockAnchor(*anchor[1:]) for anchor in ([found[0]] if latest[0] == 0 else [found[0], latest])]

    def state(self) -> JournalState:
        """What the process was doing: the callback it is in, and the layer hooks of the pass in progress."""
        cells = struct.Struct("<qq")
        callback, since_ns = cells.unpack_from(self._mapping, IN_PROGRESS_OFFSET)
        while (again := cells.unpack_from(self._mapping, IN_PROGRESS_OFFSET)) != (callback, since_ns):
            callback, since_ns = again
        return JournalState(
            callback,
            since_ns if callback else 0,
            self._hooks(self._layout.waits_offset),
            self._hooks(self._layout.saves_offset),
            sum(_HEAD.unpack_from(self._mapping, area.cells + 8)[0] for area in self._layout.rings),
        )

    def _hooks(self, offset: int) -> list[OpenHook]:
        pairs = struct.iter_unpack("<dd", self._mapping[offset : offset + 16 * self._layout.max_layers])
        # A layer that was entered again has the end of the call before.
        return [
            OpenHook(layer, round(1e9 * started), round(1e9 * ended) if ended >= started else 0)
            for layer, (started, ended) in enumerate(pairs)
            if started
        ]

    @property
    def mapping(self) -> mmap.mmap:
        """The file as it is now."""
        return self._mapping

    @property
    def areas(self) -> tuple[Area, Area, Area]:
        """Its rings."""
        return self._layout.rings

    def follow_from(self, cursor: int, positions: Sequence[int]) -> None:
        """Go on behind what was read otherwise: number ``cursor`` comes next, at ``positions`` of the rings."""
        self._cursor = cursor
        for ring, position in zip(self._rings, positions, strict=True):
            ring.go_to(position)

    def written_bytes(self) -> int:
        """Bytes that records have taken since the start, in all rings, overwritten ones too."""
        heads: list[int] = [_HEAD.unpack_from(self._mapping, area.cells)[0] for area in self._layout.rings]
        return sum(heads) * SLOT_BYTES

    def control(self) -> int:
        """The control word (``layout.detail_of``)."""
        word: int = _HEAD.unpack_from(self._mapping, CONTROL_OFFSET)[0]
        return word

    def set_control(self, word: int) -> None:
        """Set the control word, which the writer reads once a step.

        Raises:
            OSError: The file may not be written.
        """
        descriptor = os.open(self.path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.pwrite(descriptor, _HEAD.pack(word), CONTROL_OFFSET)
        finally:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the file back."""
        self._mapping.close()
        os.close(self._descriptor)


def decode_frames(frames: Iterable[Frame]) -> tuple[list[Record], int]:
    """The records, and how many of them this version doesn't know."""
    records: list[Record] = []
    undecodable = 0
    for frame in frames:
        try:
            records.append(decode(frame.payload))
        except msgspec.DecodeError:
            undecodable += 1
    return records, undecodable
