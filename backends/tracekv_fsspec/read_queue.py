"""What is to be read next: batches of neighbouring blocks by priority, bounded, taken back when nobody wants them any more.

Not synchronized by itself: whoever owns a queue has a lock around each call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from time import perf_counter_ns
from typing import NamedTuple

from tracekv_fsspec.format import padded
from tracekv_fsspec.index import Run, Segment, Shard, Stretch
from tracekv_fsspec.tickets import Ticket

#: How much one task reads from a segment; several are in flight.
BATCH_BYTES = 4 << 20


class Priority(IntEnum):
    """Why something is read; the smaller is read first."""

    WAITED = 0
    ASKED = 1
    HINTED = 2
    AHEAD = 3


class Waiting(NamedTuple):
    """``blocks`` blocks of a piece from its ``at``-th on are the ticket's from its ``number``-th on."""

    ticket: Ticket
    number: int
    at: int
    blocks: int


class Piece:
    """Blocks of one shard that follow each other in a segment, all of one size, and who waits for them.

    Attributes:
        first: Position of the first key among those that were wanted of the shard.
        is_late: Whether a query was answered while they were on their way.
        late_for: Whose query.
    """

    __slots__ = (
        "batch",
        "checksums",
        "first",
        "is_late",
        "keys",
        "late_for",
        "length",
        "offset",
        "run",
        "shard",
        "stride",
        "waiting",
    )

    def __init__(self, shard: Shard, keys: list[bytes], stretch: Stretch) -> None:
        self.shard = shard
        self.keys = keys
        self.first = stretch.first
        self.run: Run = stretch.run
        self.offset = stretch.offset
        self.length = stretch.length
        self.stride = padded(stretch.length)
        self.checksums = stretch.checksums
        self.waiting: list[Waiting] = []
        self.batch: Batch | None = None
        self.is_late = False
        self.late_for: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes to be read."""
        return self.stride * len(self.keys)

    def without(self, ticket: Ticket) -> None:
        """A ticket doesn't wait any more."""
        self.waiting = [waiting for waiting in self.waiting if waiting.ticket is not ticket]


class Batch:
    """Pieces of one segment that are read by one task, in rising order of offset.

    Attributes:
        owner: Whose report the read is part of.
        is_queued: Whether nobody has begun with it.
    """

    __slots__ = ("is_queued", "nbytes", "owner", "pieces", "priority", "queued_ns", "segment")

    def __init__(self, segment: Segment, owner: Ticket, priority: Priority) -> None:
        self.segment = segment
        self.owner = owner
        self.priority = priority
        self.pieces: list[Piece] = []
        self.nbytes = 0
        self.queued_ns = perf_counter_ns()
        self.is_queued = True

    def add(self, piece: Piece) -> None:
        """One piece more, which lies behind the others."""
        piece.batch = self
        self.pieces.append(piece)
        self.nbytes += piece.nbytes


class ReadQueue:
    """Batches by priority, first come first served within one.

    Args:
        most_bytes: How much may be queued. More than what fits the arena would only evict itself.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._queued: dict[Priority, deque[Batch]] = {priority: deque() for priority in Priority}
        self.nbytes = 0

    def put(self, batch: Batch) -> list[Batch] | None:
        """Add a batch. What a query waits for always has room.

        Returns:
            Batches that had to make room: less urgent ones, the newest first. None where the batch itself has no room.
        """
        making_room: list[Batch] = []
        if self.nbytes:
            less_urgent = sum(
                each.nbytes for priority in Priority if priority > batch.priority for each in self._live(priority)
            )
            if batch.priority is not Priority.WAITED and self.nbytes - less_urgent + batch.nbytes > self._most:
                return None
            for priority in sorted(Priority, reverse=True):
                if priority <= batch.priority:
                    break
                for each in reversed(list(self._live(priority))):
                    if self.nbytes + batch.nbytes <= self._most:
                        break
                    self.drop(each)
                    making_room.append(each)
        self._queued[batch.priority].append(batch)
        self.nbytes += batch.nbytes
        return making_room

    def pop(self) -> Batch | None:
        """The next batch, which is queued no more; None where there is none."""
        for queued in self._queued.values():
            while queued:
                batch = queued.popleft()
                if batch.is_queued and self._queued[batch.priority] is queued:
                    self.drop(batch)
                    return batch
        return None

    def drop(self, batch: Batch) -> None:
        """Take a queued batch out."""
        if batch.is_queued:
            batch.is_queued = False
            self.nbytes -= batch.nbytes

    def shrink(self, batch: Batch, piece: Piece) -> None:
        """Take a piece out of a queued batch, and the batch with its last one."""
        batch.pieces.remove(piece)
        batch.nbytes -= piece.nbytes
        self.nbytes -= piece.nbytes
        if not batch.pieces:
            batch.is_queued = False

    def hurry(self, batch: Batch, priority: Priority) -> None:
        """Read a queued batch sooner; later is not possible."""
        if batch.is_queued and priority < batch.priority:
            batch.priority = priority
            self._queued[priority].append(batch)

    def clear(self) -> list[Batch]:
        """Take everything out."""
        batches = []
        while (batch := self.pop()) is not None:
            batches.append(batch)
        return batches

    def _live(self, priority: Priority) -> Iterator[Batch]:
        return (batch for batch in self._queued[priority] if batch.is_queued and batch.priority is priority)


def batches_of(
    wanted: Iterable[tuple[Shard, Sequence[bytes], Stretch]], owner: Ticket, priority: Priority
) -> list[Batch]:
    """Stretches as pieces in batches of :data:`BATCH_BYTES`: by segment, in rising order of offset.

    Args:
        wanted: A stretch with its shard, and the keys among which it was found.
    """
    by_segment: dict[int, list[tuple[Shard, Sequence[bytes], Stretch]]] = {}
    for each in wanted:
        by_segment.setdefault(id(each[2].run.segment), []).append(each)
    batches: list[Batch] = []
    for group in by_segment.values():
        batch = Batch(group[0][2].run.segment, owner, priority)
        for shard, keys, stretch in sorted(group, key=lambda each: each[2].offset):
            stride, done = padded(stretch.length), 0
            while done < stretch.blocks:
                room = (BATCH_BYTES - batch.nbytes) // stride
                if room < 1 and batch.pieces:
                    batches.append(batch)
                    batch = Batch(batch.segment, owner, priority)
                    continue
                part = stretch.part(done, min(done + max(1, room), stretch.blocks))
                batch.add(Piece(shard, list(keys[part.first : part.first + part.blocks]), part))
                done += part.blocks
        batches.append(batch)
    return batches
