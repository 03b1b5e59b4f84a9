"""What a query, a hint or a parked request asked the reader for, and how much of it is staged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from tracekv.journal.vocabulary import MissReason
from tracekv_fsspec.arena import Arena, Slot
from tracekv_fsspec.index import Shard

if TYPE_CHECKING:
    from tracekv_fsspec.read_queue import Piece


class ReadTimes:
    """What reading cost a ticket, summed over its blocks of a shard."""

    def __init__(self) -> None:
        self.queued_ns = 0
        self.read_ns = 0
        self.verify_ns = 0

    def add(self, share: float, queued_ns: int, read_ns: int, verify_ns: int) -> None:
        """Add a shard's share of what a batch cost."""
        self.queued_ns += int(share * queued_ns)
        self.read_ns += int(share * read_ns)
        self.verify_ns += int(share * verify_ns)


class Ticket:
    """A run of a chain's blocks on its way into the arena. Only the reader changes it, under its lock.

    Slots are kept as their numbers: a query pins thousands of them and looks at few.

    Attributes:
        start: Ordinal of the first block.
        skipped: By shard, how many of the first blocks aren't asked for.
        numbers: By shard, the slot of each block, pinned; None where it isn't staged, or not asked for.
        is_read: By shard, whether a block was read from the store for this ticket.
        times: By shard, for the blocks that this ticket had read.
        reasons: By number of a block, why it doesn't come.
        outstanding: Blocks of any shard that are on their way.
        pieces: What they are read in.
        taken: How many blocks from ``start`` on the caller has the pins of, once the ticket is closed.
        when_done: See ``Reader.when_done``.
    """

    def __init__(
        self,
        arena: Arena,
        request_id: int | None,
        keys: Sequence[bytes],
        start: int,
        skipped: Mapping[Shard, int] | None = None,
    ) -> None:
        self._arena = arena
        self.request_id = request_id
        self.keys = keys
        self.start = start
        self.skipped = skipped or {}
        self.numbers: dict[Shard, list[int | None]] = {}
        self.is_read: dict[Shard, bytearray] = {}
        self.times: dict[Shard, ReadTimes] = {}
        for shard in arena.shards:
            self.numbers[shard] = []
            self.is_read[shard] = bytearray(len(keys))
            self.times[shard] = ReadTimes()
        self.reasons: dict[int, MissReason] = {}
        self.outstanding = 0
        self.pieces: list[Piece] = []
        self.taken = 0
        self.is_closed = False
        self.when_done: Callable[[], None] | None = None
        self._frontier = 0

    @property
    def slots(self) -> dict[Shard, list[Slot | None]]:
        """The pinned slots by shard, one per block; made anew with each call."""
        return {
            shard: [None if number is None else self._arena.slot(shard, number) for number in numbers]
            for shard, numbers in self.numbers.items()
        }

    def slot(self, shard: Shard, ordinal: int) -> Slot | None:
        """The pinned slot of a block, by its ordinal in the chain; None where there is none."""
        number = self.numbers[shard][ordinal - self.start]
        return None if number is None else self._arena.slot(shard, number)

    def pinned(self, first: int, end: int) -> dict[Shard, list[int]]:
        """Numbers of the pinned slots of blocks ``[first, end)`` (ordinals) by shard, the end of the chain first."""
        first, end = first - self.start, end - self.start
        return {
            shard: [number for number in reversed(numbers[first:end]) if number is not None]
            for shard, numbers in self.numbers.items()
        }

    def found_whole(self) -> None:
        """Every block that was asked for is staged; it needn't be found out again."""
        self._frontier = len(self.keys)

    def staged_blocks(self) -> int:
        """How many blocks from ``start`` on are staged for every shard that they were asked for, without a gap."""
        ends = []
        for shard, numbers in self.numbers.items():
            try:
                ends.append(numbers.index(None, max(self._frontier, self.skipped.get(shard, 0)), len(self.keys)))
            except ValueError:
                ends.append(len(self.keys))
        self._frontier = min(ends, default=0)
        return self._frontier

    def is_settled(self) -> bool:
        """Whether more waiting can't lengthen the staged run."""
        if not self.outstanding:
            return True
        return bool(self.reasons) and self.staged_blocks() in self.reasons

    def reason(self) -> MissReason | None:
        """Why the staged run ends where it does; None where it is whole."""
        staged = self.staged_blocks()
        if staged == len(self.keys):
            return None
        return self.reasons.get(staged, MissReason.NOT_STAGED)
