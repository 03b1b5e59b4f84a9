"""Where things lie in an arena's file, and the tables through which ranks tell each other what is over.

::

    header | per rank: what it began and ended, by step | parked tickets | per shard: generations of its slots | per shard: slots

Every number is computed alike on every rank from what was gathered, so none is read from the file. All words are of 8 bytes and
aligned: one is written or read at once. Each has one writer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, IntEnum
from typing import NamedTuple

from tracekv_fsspec.arena_file import ArenaTooSmall, Whereabouts
from tracekv_fsspec.format import ALIGNMENT, padded
from tracekv_fsspec.index import Shard

#: Steps that a rank's rings remember. Whoever asks later is told that the step was passed.
RING = 1024
#: Tickets that the table remembers.
TICKETS = 4096
_WORD = 8
_RANK_WORDS = 2 * (1 + 2 * RING)
_FAILED = 1 << 63


class StaleSlot(RuntimeError):
    """A slot was used after it had been given to another block. Its bytes must not be touched."""


class Kind(IntEnum):
    """Which of a pass's copies."""

    LOADS = 0
    SAVES = 1


class Progress(Enum):
    """How far a rank is with a step's copies.

    Attributes:
        UNTOUCHED: It didn't begin them; it may have gone past them.
        BEGUN: They are on their way.
        DONE: They are over.
        FAILED: They were begun and nobody knows what became of them.
    """

    UNTOUCHED = "untouched"
    BEGUN = "begun"
    DONE = "done"
    FAILED = "failed"


class Parked(IntEnum):
    """What became of a parked request's ticket.

    Attributes:
        FORGOTTEN: The table no longer knows it: it was closed, or so many came after it.
        PENDING: Its blocks are on their way into the arena.
        STAGED: They are there.
        FAILED: They won't come.
    """

    FORGOTTEN = 0
    PENDING = 1
    STAGED = 2
    FAILED = 3


class RankTable:
    """What one rank says of its copies. Written by the rank, read by the leader.

    By step and not only "up to which", since a pass may be skipped (its forward raised) while the next one is done.
    """

    def __init__(self, words: memoryview) -> None:
        self._latest = words[:2]
        ring = words[2:]
        self._begun = [ring[:RING], ring[RING : 2 * RING]]
        self._ended = [ring[2 * RING : 3 * RING], ring[3 * RING :]]

    def begin(self, kind: Kind, step: int) -> None:
        """The rank acts on this step from now on."""
        self._begun[kind][step % RING] = step
        self._latest[kind] = step

    def end(self, kind: Kind, step: int, *, failed: bool = False) -> None:
        """The step's copies are over."""
        self._ended[kind][step % RING] = step | _FAILED if failed else step

    def latest(self, kind: Kind) -> int:
        """The step that the rank began last."""
        step: int = self._latest[kind]
        return step

    def progress(self, kind: Kind, step: int) -> Progress:
        """How far the rank is. A step that the ring no longer knows was followed by so many that nothing of it can be under way."""
        ended, begun = self._ended[kind][step % RING], self._begun[kind][step % RING]
        if ended == step:
            return Progress.DONE
        if ended == step | _FAILED:
            return Progress.FAILED
        return Progress.BEGUN if begun == step else Progress.UNTOUCHED


class ParkedTable:
    """The states of parked requests' tickets. Written by the leader, read by every rank's ``get_finished``."""

    def __init__(self, words: memoryview) -> None:
        self._words = words
        self._next = 1

    def open(self) -> int | None:
        """A new ticket's number, its state :attr:`Parked.PENDING`; None where as many are pending as the table holds."""
        for number in range(self._next, self._next + TICKETS):
            if self._words[number % TICKETS] & 3 != Parked.PENDING:
                self._next = number + 1
                self.set(number, Parked.PENDING)
                return number
        return None

    def set(self, number: int, state: Parked) -> None:
        """Say what became of a ticket."""
        self._words[number % TICKETS] = number << 2 | state

    def state(self, number: int) -> Parked:
        """What became of it."""
        word = self._words[number % TICKETS]
        return Parked(word & 3) if word >> 2 == number else Parked.FORGOTTEN


class _Place(NamedTuple):
    generations: int
    slots: int
    stride: int


class Geometry:
    """The division of a file. Every shard has the same number of slots, aligned to 4 KiB.

    Args:
        page_bytes: Bytes of a page, by shard, for every layer group on every rank.
        world: Number of ranks.

    Raises:
        ArenaTooSmall: No block fits.
    """

    def __init__(self, page_bytes: Mapping[Shard, int], world: int, whereabouts: Whereabouts) -> None:
        self.page_bytes = dict(sorted(page_bytes.items()))
        self.world = world
        per_block = sum(map(padded, self.page_bytes.values()))
        capacity = whereabouts.capacity
        self.slots_per_shard = capacity // per_block if per_block else 0
        if not self.slots_per_shard:
            raise ArenaTooSmall(
                f"tracekv: an arena of {capacity} bytes (TRACEKV_FSSPEC__ARENA_BYTES, at {whereabouts.path}) holds no block of "
                f"{per_block} bytes ({len(self.page_bytes)} layer groups and ranks). Give it room for at least a few prompts."
            )
        self._places: dict[Shard, _Place] = {}
        slots = tables_bytes(world, capacity)
        generations = _fixed_bytes(world)
        for shard, size in self.page_bytes.items():
            self._places[shard] = _Place(generations, slots, padded(size))
            generations += self.slots_per_shard * _WORD
            slots += self.slots_per_shard * padded(size)

    def place(self, shard: Shard) -> tuple[int, int]:
        """Where a shard's first slot begins, and the bytes from one slot to the next."""
        _, slots, stride = self._places[shard]
        return slots, stride

    def generations(self, buffer: memoryview, shard: Shard) -> memoryview:
        """A shard's generations, one word per slot. Written by the leader."""
        return _words(buffer, self._places[shard].generations, self.slots_per_shard)

    def ranks(self, buffer: memoryview) -> Sequence[RankTable]:
        """The ranks' tables, by rank."""
        return [
            RankTable(_words(buffer, ALIGNMENT + rank * _RANK_WORDS * _WORD, _RANK_WORDS)) for rank in range(self.world)
        ]

    def parked(self, buffer: memoryview) -> ParkedTable:
        """The table of parked tickets."""
        return ParkedTable(_words(buffer, ALIGNMENT + self.world * _RANK_WORDS * _WORD, TICKETS))


def tables_bytes(world: int, capacity: int) -> int:
    """How much of a file isn't for slots. It is made before the sizes of pages are gathered, so there is room for the most slots."""
    return padded(_fixed_bytes(world) + capacity // ALIGNMENT * _WORD)


def _fixed_bytes(world: int) -> int:
    return ALIGNMENT + (world * _RANK_WORDS + TICKETS) * _WORD


def _words(buffer: memoryview, start: int, count: int) -> memoryview:
    return buffer[start : start + count * _WORD].cast("Q")
