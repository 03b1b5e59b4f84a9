"""A journal in this process's memory: a bounded ring of encoded records, behind the interface of any journal.

A record is encoded when it is written, so nothing of the runtime's stays alive, and a reader on another thread never sees a
half-written one. Oldest records are overwritten; a reader learns how many it missed from the sequence numbers.
"""

from __future__ import annotations

import itertools
from array import array

import msgspec

from tracekv.journal.layout import MAX_LAYERS
from tracekv.journal.records import Record, decode

DEFAULT_RECORDS = 1 << 16


class MemoryJournal:
    """Holds the last ``capacity`` records. Any thread may write.

    Attributes:
        waits, saves: float64 slots for the per-layer hooks of the pass in progress: (started, ended) at 2 x layer, in seconds of
            ``time.perf_counter``, which is cheaper to take and to store than an int.
        in_progress: ``(callback, since_ns)`` of the callback entered and not left; callback 0 when there is none. A layer
            hook in progress is a pair in ``waits`` or ``saves`` that has a start and no end.
    """

    def __init__(self, capacity: int = DEFAULT_RECORDS) -> None:
        self._slots: list[tuple[int, bytes] | None] = [None] * capacity
        self._sequence = itertools.count()
        self._encode = msgspec.msgpack.Encoder().encode
        self.waits = memoryview(bytearray(MAX_LAYERS * 16)).cast("d")
        self.saves = memoryview(bytearray(MAX_LAYERS * 16)).cast("d")
        self.in_progress = memoryview(array("q", bytes(16)))

    def write(self, record: Record) -> None:
        """Append a record. No lock: the counter and the slot's store are each one step under the GIL."""
        payload = self._encode(record)
        sequence = next(self._sequence)
        self._slots[sequence % len(self._slots)] = (sequence, payload)

    def claim_engine_thread(self) -> bool:
        """Nothing to claim: all threads write alike."""
        return True

    def at_step(self, now_ns: int) -> int:
        """No clock anchors in memory, and nobody to set a control word: 0."""
        return 0

    def close(self) -> None:
        """Nothing to end."""

    def read(self, cursor: int) -> tuple[list[Record], int, int]:
        """Records from sequence ``cursor`` on.

        Returns:
            The records in order, the cursor to go on from, and how many were overwritten before they were read.
        """
        slots, capacity = self._slots, len(self._slots)
        records: list[Record] = []
        lost = 0
        while (slot := slots[cursor % capacity]) is not None and slot[0] >= cursor:
            sequence, payload = slot
            if sequence > cursor:
                oldest = sequence - capacity + 1
                lost += oldest - cursor
                cursor = oldest
                continue
            records.append(decode(payload))
            cursor += 1
        return records, cursor, lost
