"""Writer of the ring file: what a callback's path runs through.

A record is encoded, framed with its length, position, sequence number and CRC, and copied over the oldest slots of a ring. There
are three rings: the engine thread's own, written without a lock; one behind a lock, for every other thread; and a small one for the
few records that explain all others (who wrote this, which run, which layout), which the many others must not push out.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import struct
import threading
import zlib
from pathlib import Path
from threading import get_ident
from time import perf_counter_ns
from typing import TYPE_CHECKING

import msgspec

from tracekv.journal import forked
from tracekv.journal.layout import (
    ANCHOR,
    ANCHOR_OFFSETS,
    CONTROL_OFFSET,
    CRC_PIECE_BYTES,
    ENDED_OFFSET,
    FRAME,
    FRAME_BYTES,
    FRAME_REST,
    HEADER_BYTES,
    IN_PROGRESS_OFFSET,
    MAGIC,
    SLOT_BYTES,
    Area,
    JournalFacts,
    Layout,
    crc_in_pieces,
    pack_header,
)
from tracekv.journal.process import describe_self, read_clocks
from tracekv.journal.records import (
    ClockAnchor,
    ConnectorWrapped,
    ProcessStarted,
    Record,
    RegisterCall,
    ReplayCaches,
    ReplayStart,
    RunJoined,
    SettingsSeen,
    TracerFault,
)

if TYPE_CHECKING:
    from tracekv.journal.reader import RingReader

#: Few, and needed to understand the rest.
KEPT_RECORDS = frozenset(
    {ProcessStarted, ConnectorWrapped, RunJoined, SettingsSeen, RegisterCall, TracerFault, ReplayStart, ReplayCaches}
)
ANCHOR_EVERY_NS = 10_000_000_000

_encode = msgspec.msgpack.Encoder().encode
_crc32 = zlib.crc32
_pack_frame_into = FRAME.pack_into
_pack_frame_rest = FRAME_REST.pack
_ROUND_UP = FRAME_BYTES + SLOT_BYTES - 1


class _Ring:
    """One ring of the file. ``append`` is for one thread at a time."""

    __slots__ = ("_base", "_bytes", "_cells", "_head", "_head_cell", "_longest", "_mapping", "_next_sequence", "_slots")

    def __init__(self, mapping: mmap.mmap, cells: memoryview, area: Area, sequence: itertools.count[int]) -> None:
        self._mapping = mapping
        self._cells = cells
        self._head_cell = area.cells // 8
        self._base = area.offset
        self._slots = area.slots
        self._bytes = area.slots * SLOT_BYTES
        self._longest = self._bytes // 2 - FRAME_BYTES
        self._head = 0
        self._next_sequence = sequence.__next__

    def append(self, record: Record) -> None:
        """Write ``record`` over the oldest slots; one that is longer than half of the ring is dropped and counted."""
        payload = _encode(record)
        length = len(payload)
        head = self._head
        begin = head % self._slots * SLOT_BYTES
        end = begin + FRAME_BYTES + length
        if length <= CRC_PIECE_BYTES and end <= self._bytes:
            sequence = self._next_sequence()
            crc = _crc32(payload, _crc32(_pack_frame_rest(length, head, sequence)))
            begin += self._base
            mapping = self._mapping
            _pack_frame_into(mapping, begin, crc, length, head, sequence)
            mapping[begin + FRAME_BYTES : end + self._base] = payload
        elif length > self._longest:
            self._cells[self._head_cell + 1] += 1
            return
        else:
            self._append_long(payload, head, begin, end)
        self._head = head = head + ((length + _ROUND_UP) >> 6)
        self._cells[self._head_cell] = head

    def _append_long(self, payload: bytes, head: int, begin: int, end: int) -> None:
        """A record whose CRC is taken in pieces, or that goes on at the ring's beginning."""
        sequence = self._next_sequence()
        length = len(payload)
        crc = crc_in_pieces(payload, _crc32(_pack_frame_rest(length, head, sequence)))
        base = self._base
        # A slot is longer than a frame's head, so that never goes over the edge.
        _pack_frame_into(self._mapping, base + begin, crc, length, head, sequence)
        if end <= self._bytes:
            self._mapping[base + begin + FRAME_BYTES : base + end] = payload
            return
        before_edge = self._bytes - begin - FRAME_BYTES
        self._mapping[base + begin + FRAME_BYTES : base + self._bytes] = payload[:before_edge]
        self._mapping[base : base + end - self._bytes] = payload[before_edge:]


class RingJournal:
    """The journal of this process, in a file that outlives it. Any thread may write.

    Attributes:
        path: The file.
        facts: Who writes it, as its header says.
        waits, saves: float64 slots for the per-layer hooks of the pass in progress: (started, ended) at 2 x layer, in seconds of
            ``time.perf_counter``, which is cheaper to take and to store than an int.
        in_progress: ``(callback, since_ns)`` of the callback entered and not left; callback 0 when there is none.
    """

    def __init__(self, path: Path, mapping: mmap.mmap, facts: JournalFacts, layout: Layout) -> None:
        self.path = path
        self.facts = facts
        self.layout = layout
        self._mapping = mapping
        view = memoryview(mapping)
        self._cells = view[:HEADER_BYTES].cast("q")
        self.in_progress = view[IN_PROGRESS_OFFSET : IN_PROGRESS_OFFSET + 16].cast("q")
        hook_bytes = layout.max_layers * 16
        self.waits = view[layout.waits_offset : layout.waits_offset + hook_bytes].cast("d")
        self.saves = view[layout.saves_offset : layout.saves_offset + hook_bytes].cast("d")
        sequence = itertools.count()
        self._append_kept = _Ring(mapping, self._cells, layout.kept, sequence).append
        self._append_shared = _Ring(mapping, self._cells, layout.shared, sequence).append
        self._append_engine = _Ring(mapping, self._cells, layout.engine, sequence).append
        # Re-entrant: a finalizer or a signal's handler may report within a report. One of the two is then a gap.
        self._lock = threading.RLock()
        self._engine_thread = 0
        self._closed = False
        self._anchors = 0
        self._anchor_due_ns = facts.monotonic_ns + ANCHOR_EVERY_NS
        self._reader: RingReader | None = None
        forked.watch(self)

    @classmethod
    def create(cls, path: Path, file_bytes: int, facts: JournalFacts | None = None) -> RingJournal:
        """Reserve, map and describe a new file, and write its first record.

        The file is locked (flock) for as long as this process has it mapped: that tells of its life across PID namespaces.

        Raises:
            OSError: No room (ENOSPC), a file or link of that name (EEXIST), no such directory. No file is left behind.
            ValueError: A size that no journal can have.
        """
        layout = Layout.of_size(file_bytes)
        facts = facts or describe_self()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # Reserved before it is mapped: a store to a page for which there is no room would be a SIGBUS in the engine.
            os.posix_fallocate(descriptor, 0, file_bytes)
            mapping = mmap.mmap(descriptor, file_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except BaseException:
            path.unlink()
            raise
        finally:
            os.close(descriptor)
        header = pack_header(facts, layout)
        mapping[len(MAGIC) : len(header)] = header[len(MAGIC) :]
        journal = cls(path, mapping, facts, layout)
        journal.write(
            ProcessStarted(
                facts.pid, facts.process_id, facts.host, facts.boot_id, facts.monotonic_ns, facts.wall_ns, facts.version
            )
        )
        mapping[: len(MAGIC)] = MAGIC
        return journal

    def claim_engine_thread(self) -> bool:
        """Give the calling thread the ring without a lock, unless a thread that still lives has it.

        To be called once, from the thread on which the runtime's loop calls back. Before, all records go through the lock.
        """
        with self._lock:
            ident = get_ident()
            owner = self._engine_thread
            if self._closed or (owner and owner != ident and any(t.ident == owner for t in threading.enumerate())):
                return False
            self._engine_thread = ident
            return True

    def write(self, record: Record) -> None:
        """Append a record. On the engine thread there is no lock; a closed journal takes nothing."""
        if get_ident() == self._engine_thread and type(record) not in KEPT_RECORDS:
            self._append_engine(record)
            return
        if self._closed:
            return
        with self._lock:
            if type(record) in KEPT_RECORDS:
                self._append_kept(record)
            else:
                self._append_shared(record)

    def at_step(self, now_ns: int) -> int:
        """To be called once a step: takes a new clock anchor where the last one is 10 s old, returns the control word."""
        if now_ns >= self._anchor_due_ns and not self._closed:
            self._take_anchor()
        control: int = self._cells[CONTROL_OFFSET // 8]
        return control

    def _take_anchor(self) -> None:
        monotonic_ns, wall_ns = read_clocks()
        self._anchor_due_ns = monotonic_ns + ANCHOR_EVERY_NS
        self._anchors += 1
        packed = ANCHOR.pack(self._anchors, monotonic_ns, wall_ns, 0)
        where = ANCHOR_OFFSETS[self._anchors % 2]
        self._mapping[where : where + ANCHOR.size] = packed[:-4] + struct.pack("<I", _crc32(packed[:-4]))
        self.write(ClockAnchor(monotonic_ns, wall_ns))

    def read(self, cursor: int) -> tuple[list[Record], int, int]:
        """Records from sequence ``cursor`` on, for a reader in this process; one thread at a time.

        Returns:
            The records in order, the cursor to go on from, and how many were overwritten before they were read.
        """
        if self._reader is None:
            from tracekv.journal.reader import RingReader

            self._reader = RingReader(self.path)
        return self._reader.read(cursor)

    def close(self) -> None:
        """End in order: nothing more is written. The file stays, for whoever reads it."""
        with self._lock:
            if self._closed:
                return
            self._stop()
            self._cells[ENDED_OFFSET // 8] = perf_counter_ns()

    def _stop(self) -> None:
        self._closed = True
        self._engine_thread = 0

    def abandon_in_child(self) -> None:
        """After a fork: the file is the parent's. Every view that the child still holds becomes memory of its own."""
        self._stop()
        self._lock = threading.RLock()
        self._reader = None
        forked.detach(self._mapping)
