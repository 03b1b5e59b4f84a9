"""Host memory for blocks: bounded, divided into page-sized slots, addressed by (shard, slot, generation).

A slot is free, being filled (by a reader of the store, or by a worker that saves), or staged: it then holds the verified bytes
of a key and can be found by it. Staged slots that nobody pins are evicted, least recently used first, when a slot is wanted.

Everything but the bytes and the generations is the leader's own; the other ranks are told slots by the metadata (``worker_arena``).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tracekv_fsspec.arena_file import ArenaFile, ArenaTooSmall, create
from tracekv_fsspec.arena_tables import Geometry, StaleSlot, tables_bytes
from tracekv_fsspec.format import padded
from tracekv_fsspec.index import Shard, first_missing

__all__ = ["Arena", "ArenaTooSmall", "Slot", "StaleSlot"]


class Slot(NamedTuple):
    """A place in the arena; ``generation`` tells one use of it from the next."""

    shard: Shard
    number: int
    generation: int


class _Pool:
    """The slots of one shard."""

    __slots__ = (
        "base",
        "by_key",
        "free",
        "generations",
        "is_filling",
        "keys",
        "page_bytes",
        "pins",
        "recency",
        "shared_generations",
        "stride",
    )

    def __init__(self, base: int, page_bytes: int, slots: int, shared_generations: memoryview) -> None:
        self.base = base
        self.page_bytes = page_bytes
        self.stride = padded(page_bytes)
        self.free = list(range(slots - 1, -1, -1))
        self.generations = [0] * slots
        #: The same for the other ranks; written with each change, and never read here: a list is faster.
        self.shared_generations = shared_generations
        self.pins = [0] * slots
        self.is_filling = bytearray(slots)
        self.keys: list[bytes | None] = [None] * slots
        self.by_key: dict[bytes, int] = {}
        #: Staged slots, the one to be evicted first at the front. A pinned one may be among them: whoever evicts takes it out, and
        #: it comes back with its last pin. So a query pins a thousand blocks without touching this.
        self.recency: OrderedDict[int, None] = OrderedDict()

    def evict(self, evicted: list[bytes]) -> int | None:
        """The staged slot that was used least recently, no longer to be found by its key; None where all are pinned."""
        while self.recency:
            number, _ = self.recency.popitem(last=False)
            if not self.pins[number]:
                key = self.keys[number]
                if key is not None:
                    del self.by_key[key]
                    evicted.append(key)
                self.keys[number] = None
                return number
        return None

    def fill(self, number: int) -> int:
        """Begin a slot's next use; its generation."""
        generation = self.generations[number] + 1
        self.is_filling[number] = 1
        self.generations[number] = self.shared_generations[number] = generation
        return generation

    def unpin(self, number: int) -> None:
        self.pins[number] -= 1
        if not self.pins[number]:
            self.recency.pop(number, None)
            self.recency[number] = None


class Arena:
    """The leader's directory of a node's arena file. Any thread may call.

    Args:
        file: Owned from here on: :meth:`close` removes it.
        geometry: How the file is divided.

    Attributes:
        buffer: The whole file.
        on_evict: Called with the keys of staged blocks that made room for others; it may only take note.

    Source: DESIGN.md "Tiers".
    """

    def __init__(self, file: ArenaFile, geometry: Geometry) -> None:
        self.file = file
        self.geometry = geometry
        self.buffer = file.buffer
        self.slots_per_shard = geometry.slots_per_shard
        self._pools: dict[Shard, _Pool] = {}
        self._lock = threading.Lock()
        self.on_evict: Callable[[Shard, Sequence[bytes]], None] | None = None
        for shard, size in geometry.page_bytes.items():
            base, _ = geometry.place(shard)
            self._pools[shard] = _Pool(base, size, geometry.slots_per_shard, geometry.generations(file.buffer, shard))

    @classmethod
    def alone(cls, page_bytes: Mapping[Shard, int], capacity: int, directory: Path | None = None) -> Arena:
        """An arena that no other process maps, for as many ranks as ``page_bytes`` names.

        Args:
            page_bytes: Bytes of a page, by shard.
            capacity: Bytes for slots; what doesn't make a whole slot for every shard is left out.
            directory: See :func:`tracekv_fsspec.arena_file.create`.

        Raises:
            ArenaTooSmall: No slot fits, or the directory has no room.
        """
        world = 1 + max((shard.rank for shard in page_bytes), default=0)
        least = sum(map(padded, page_bytes.values()))
        file = create(directory, capacity, tables_bytes(world, capacity), least)
        try:
            return cls(file, Geometry(page_bytes, world, file.whereabouts))
        except ArenaTooSmall:
            file.close()
            raise

    def close(self) -> None:
        """Remove the file. Its bytes can be used for as long as they are held."""
        self.file.close()

    @property
    def shards(self) -> Sequence[Shard]:
        """Every layer group on every rank."""
        return tuple(self._pools)

    def page_bytes(self, shard: Shard) -> int:
        """Bytes of a page, without padding."""
        return self._pools[shard].page_bytes

    def slot_bytes(self, shard: Shard) -> int:
        """Bytes of a slot, padding included."""
        return self._pools[shard].stride

    def free_slots(self, shard: Shard) -> int:
        """Slots that could be had now: free, or staged and unpinned."""
        with self._lock:
            pool = self._pools[shard]
            return len(pool.free) + sum(not pool.pins[number] for number in pool.recency)

    def allocate(self, shard: Shard) -> Slot | None:
        """A slot to fill, evicting the staged block that was used least recently; None where all are pinned."""
        pool = self._pools[shard]
        evicted: list[bytes] = []
        with self._lock:
            number = pool.free.pop() if pool.free else pool.evict(evicted)
            if number is None:
                return None
            generation = pool.fill(number)
        if evicted and self.on_evict is not None:
            self.on_evict(shard, evicted)
        return Slot(shard, number, generation)

    def allocate_run(self, shard: Shard, count: int) -> list[int]:
        """:meth:`allocate` for several of one shard, as numbers of slots; fewer where they can't be had.

        They are in rising order: those of a prompt were mostly filled and are evicted together, so most are neighbours again, and
        bytes that follow each other in the store arrive in one piece (:meth:`pieces`).
        """
        pool = self._pools[shard]
        evicted: list[bytes] = []
        with self._lock:
            numbers = pool.free[-count:] if count else []
            del pool.free[len(pool.free) - len(numbers) :]
            while len(numbers) < count:
                number = pool.evict(evicted)
                if number is None:
                    break
                numbers.append(number)
            for number in numbers:
                pool.fill(number)
        if evicted and self.on_evict is not None:
            self.on_evict(shard, evicted)
        numbers.sort()
        return numbers

    def pieces(self, shard: Shard, numbers: Sequence[int]) -> list[tuple[int, memoryview]]:
        """Slots that are being filled, neighbours as one: how many each piece is, and its bytes with their padding."""
        pool = self._pools[shard]
        found = []
        first = 0
        for end in range(1, len(numbers) + 1):
            if end == len(numbers) or numbers[end] != numbers[end - 1] + 1:
                start = pool.base + numbers[first] * pool.stride
                found.append((end - first, self.buffer[start : start + (end - first) * pool.stride]))
                first = end
        return found

    def commit(self, slot: Slot, key: bytes) -> Slot:
        """Say that a filled slot holds the verified bytes of ``key``. It stays pinned once, for the caller.

        Returns:
            The slot that holds the key, pinned: another one, where the key was staged meanwhile.
        """
        return self.commit_each((slot,), (key,))[0]

    def commit_each(self, slots: Sequence[Slot], keys: Sequence[bytes]) -> list[Slot]:
        """:meth:`commit` for several under one lock."""
        held: list[Slot] = []
        with self._lock:
            for slot, key in zip(slots, keys, strict=True):
                pool = self._checked(slot, filling=True)
                number = slot.number
                pool.is_filling[number] = 0
                holder = pool.by_key.setdefault(key, number)
                if holder == number:
                    pool.keys[number] = key
                    held.append(slot)
                else:
                    pool.free.append(number)
                    held.append(self.slot(slot.shard, holder))
                pool.pins[holder] += 1
        return held

    def commit_run(self, shard: Shard, numbers: Sequence[int], keys: Sequence[bytes]) -> list[int]:
        """:meth:`commit` for slots of one shard, by their numbers; the numbers of those that hold the keys, each pinned once more."""
        pool = self._pools[shard]
        by_key, pins, is_filling = pool.by_key, pool.pins, pool.is_filling
        held: list[int] = []
        with self._lock:
            for number, key in zip(numbers, keys, strict=True):
                is_filling[number] = 0
                holder = by_key.setdefault(key, number)
                if holder == number:
                    pool.keys[number] = key
                else:
                    pool.free.append(number)
                pins[holder] += 1
                held.append(holder)
        return held

    def abandon_run(self, shard: Shard, numbers: Iterable[int]) -> None:
        """:meth:`abandon` for slots of one shard, by their numbers."""
        pool = self._pools[shard]
        with self._lock:
            for number in numbers:
                pool.is_filling[number] = 0
                pool.free.append(number)

    def abandon(self, slot: Slot) -> None:
        """Give back a slot that wasn't filled."""
        with self._lock:
            pool = self._checked(slot, filling=True)
            pool.is_filling[slot.number] = 0
            pool.free.append(slot.number)

    def holds(self, shard: Shard, key: bytes) -> bool:
        """Whether a block is staged. It may be evicted the moment after; :meth:`pin` is what counts."""
        return key in self._pools[shard].by_key

    def pin(self, shard: Shard, key: bytes) -> Slot | None:
        """The staged slot of a key, kept from eviction until :meth:`unpin_each`; None where it isn't staged."""
        return self.pin_each(shard, (key,))[0]

    def pin_each(self, shard: Shard, keys: Sequence[bytes]) -> list[Slot | None]:
        """:meth:`pin` for several keys under one lock."""
        return [None if number is None else self.slot(shard, number) for number in self.pin_run(shard, keys)]

    def pin_run(self, shard: Shard, keys: Sequence[bytes]) -> list[int | None]:
        """:meth:`pin` for several keys, as numbers of slots: a query does nothing else as often, and rarely needs more of them."""
        pool = self._pools[shard]
        pins = pool.pins
        with self._lock:
            numbers = list(map(pool.by_key.get, keys))
            for number in numbers:
                if number is not None:
                    pins[number] += 1
        return numbers

    def pin_whole(self, shard: Shard, keys: Sequence[bytes]) -> list[int] | None:
        """:meth:`pin_run` where all of them are staged, which is a hit's way; None, and nothing is pinned, where one isn't."""
        pool = self._pools[shard]
        pins = pool.pins
        with self._lock:
            try:
                numbers = list(map(pool.by_key.__getitem__, keys))
            except KeyError:
                return None
            for number in numbers:
                pins[number] += 1
        return numbers

    def pin_again(self, shard: Shard, numbers: Iterable[int]) -> None:
        """One pin more on each of some slots that the caller has pinned."""
        pins = self._pools[shard].pins
        with self._lock:
            for number in numbers:
                pins[number] += 1

    def slot(self, shard: Shard, number: int) -> Slot:
        """A slot that the caller has pinned, as it is used now."""
        return Slot(shard, number, self._pools[shard].generations[number])

    def staged_run(self, shard: Shard, keys: Sequence[bytes], start: int = 0) -> int:
        """The ordinal of the first key from ``start`` on that isn't staged, or ``len(keys)``; takes no lock, as :meth:`holds`."""
        return first_missing(self._pools[shard].by_key, keys, start)

    def unpin_each(self, slots: Iterable[Slot]) -> None:
        """Give pins back. The slot given last is the last to be evicted: give the tail of a prompt first."""
        with self._lock:
            for slot in slots:
                pool = self._checked(slot, filling=False)
                if pool.pins[slot.number] <= 0:
                    raise StaleSlot(f"slot {slot.number} of {slot.shard} is unpinned more often than pinned")
                pool.unpin(slot.number)

    def unpin_run(self, shard: Shard, numbers: Iterable[int]) -> None:
        """:meth:`unpin_each` for slots of one shard, by their numbers. Only for pins that the caller surely holds."""
        pool = self._pools[shard]
        with self._lock:
            for number in numbers:
                if pool.pins[number] <= 0:
                    raise StaleSlot(f"slot {number} of {shard} is unpinned more often than pinned")
                pool.unpin(number)

    def view(self, slot: Slot) -> memoryview:
        """The slot's bytes, padding included. Valid while the slot is being filled or pinned.

        Raises:
            StaleSlot: The slot belongs to another block by now.
        """
        start, stop = self.extent(slot)
        return self.buffer[start:stop]

    def extent(self, slot: Slot) -> tuple[int, int]:
        """Where a slot lies in :attr:`buffer`; StaleSlot as :meth:`view`."""
        pool = self._pools[slot.shard]
        if pool.generations[slot.number] != slot.generation:
            raise StaleSlot(f"slot {slot.number} of {slot.shard} is in its generation {pool.generations[slot.number]}")
        start = pool.base + slot.number * pool.stride
        return start, start + pool.stride

    def _checked(self, slot: Slot, filling: bool) -> _Pool:
        pool = self._pools[slot.shard]
        if pool.generations[slot.number] != slot.generation or bool(pool.is_filling[slot.number]) != filling:
            raise StaleSlot(f"slot {slot.number} of {slot.shard}, generation {slot.generation}, is in other use")
        return pool
