"""Host memory for blocks: bounded, divided into page-sized slots, addressed by (shard, slot, generation).

A slot is free, being filled (by a reader of the store, or by a worker that saves), or staged: it then holds the verified bytes
of a key and can be found by it. Staged slots that nobody pins are evicted, least recently used first, when a slot is wanted.
"""

from __future__ import annotations

import mmap
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from tracekv_fsspec.format import padded
from tracekv_fsspec.index import Shard, first_missing


class StaleSlot(RuntimeError):
    """A slot was used after it had been given to another block. Its bytes must not be touched."""


class ArenaTooSmall(ValueError):
    """Not even one block fits."""


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
        "stride",
    )

    def __init__(self, base: int, page_bytes: int, slots: int) -> None:
        self.base = base
        self.page_bytes = page_bytes
        self.stride = padded(page_bytes)
        self.free = list(range(slots - 1, -1, -1))
        self.generations = [0] * slots
        self.pins = [0] * slots
        self.is_filling = bytearray(slots)
        self.keys: list[bytes | None] = [None] * slots
        self.by_key: dict[bytes, int] = {}
        #: Staged slots, the one to be evicted first at the front. A pinned one may be among them: whoever evicts takes it out, and
        #: it comes back with its last pin. So a query pins a thousand blocks without touching this.
        self.recency: OrderedDict[int, None] = OrderedDict()

    def evict(self) -> int | None:
        """The staged slot that was used least recently, no longer to be found by its key; None where all are pinned."""
        while self.recency:
            number, _ = self.recency.popitem(last=False)
            if not self.pins[number]:
                key = self.keys[number]
                if key is not None:
                    del self.by_key[key]
                self.keys[number] = None
                return number
        return None

    def unpin(self, number: int) -> None:
        self.pins[number] -= 1
        if not self.pins[number]:
            self.recency.pop(number, None)
            self.recency[number] = None


class Arena:
    """One anonymous mapping, divided so that every shard has the same number of slots. Any thread may call.

    Args:
        page_bytes: Bytes of a page, by shard.
        capacity: Bytes of host memory; what doesn't make a whole slot for every shard is left out.

    Raises:
        ArenaTooSmall: No slot fits.

    Source: DESIGN.md "Tiers".
    """

    def __init__(self, page_bytes: Mapping[Shard, int], capacity: int) -> None:
        per_block = sum(map(padded, page_bytes.values()))
        self.slots_per_shard = capacity // per_block if per_block else 0
        if not self.slots_per_shard:
            raise ArenaTooSmall(
                f"tracekv: TRACEKV_FSSPEC__ARENA_BYTES={capacity} holds no block of {per_block} bytes "
                f"({len(page_bytes)} layer groups). Give it room for at least a few prompts."
            )
        self._memory = mmap.mmap(-1, self.slots_per_shard * per_block)
        self.buffer = memoryview(self._memory)
        self._pools: dict[Shard, _Pool] = {}
        self._lock = threading.Lock()
        base = 0
        for shard, size in page_bytes.items():
            self._pools[shard] = _Pool(base, size, self.slots_per_shard)
            base += self.slots_per_shard * padded(size)

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
        return next(iter(self.allocate_each((shard,))), None)

    def allocate_each(self, shards: Iterable[Shard]) -> list[Slot]:
        """:meth:`allocate` for several under one lock; as many as could be had."""
        slots: list[Slot] = []
        with self._lock:
            for shard in shards:
                pool = self._pools[shard]
                number = pool.free.pop() if pool.free else pool.evict()
                if number is None:
                    break
                pool.is_filling[number] = 1
                generation = pool.generations[number] = pool.generations[number] + 1
                slots.append(Slot(shard, number, generation))
        return slots

    def commit(self, slot: Slot, key: bytes) -> Slot:
        """Say that a filled slot holds the verified bytes of ``key``. It stays pinned once, for the caller.

        Returns:
            The slot that holds the key, pinned: another one, where the key was staged meanwhile.
        """
        return self.commit_each(((slot, key),))[0]

    def commit_each(self, filled: Iterable[tuple[Slot, bytes]]) -> list[Slot]:
        """:meth:`commit` for several under one lock."""
        held: list[Slot] = []
        with self._lock:
            for slot, key in filled:
                pool = self._checked(slot, filling=True)
                number = slot.number
                pool.is_filling[number] = 0
                holder = pool.by_key.get(key)
                if holder is not None:
                    pool.free.append(number)
                    pool.pins[holder] += 1
                    held.append(Slot(slot.shard, holder, pool.generations[holder]))
                    continue
                pool.keys[number] = key
                pool.by_key[key] = number
                pool.pins[number] = 1
                held.append(slot)
        return held

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

    def view_each(self, slots: Iterable[Slot]) -> list[memoryview]:
        """:meth:`view` for several."""
        buffer, pools = self.buffer, self._pools
        views = []
        for slot in slots:
            shard, number, generation = slot
            pool = pools[shard]
            if pool.generations[number] != generation:
                self.extent(slot)  # says what is wrong
            start = pool.base + number * pool.stride
            views.append(buffer[start : start + pool.stride])
        return views

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
