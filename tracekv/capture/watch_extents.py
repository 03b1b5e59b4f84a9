"""Where the registered caches lie in memory, and which pages a strided access touches."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

from tracekv.contract.reading import LayoutView

#: Bytes touched, by (layer group, page slot).
Pages = dict[tuple[int, int], int]


def add_pages(total: Pages, more: Pages) -> None:
    """Add the bytes of each page."""
    for page, nbytes in more.items():
        total[page] = total.get(page, 0) + nbytes


class Part(NamedTuple):
    """The bytes ``[offset, offset + size)`` of a slot belong to a page of one layer group."""

    offset: int
    size: int
    layer_group: int


@dataclass
class Pool:
    """Slots of ``stride`` bytes from ``start`` to ``end``; regions that lie side by side in a slot share one."""

    start: int
    end: int
    stride: int
    parts: list[Part] = field(default_factory=list)

    def bytes_in(self, first: int, length: int) -> Iterator[tuple[int, int, int]]:
        """``(layer group, page slot, bytes)`` of the run of ``length`` bytes from offset ``first``."""
        end = min(first + length, self.end - self.start)
        for slot in range(max(first, 0) // self.stride, -(-end // self.stride)):
            for part in self.parts:
                at = slot * self.stride + part.offset
                covered = min(end, at + part.size) - max(first, at)
                if covered > 0:
                    yield part.layer_group, slot, covered


class Extents:
    """The memory of every registered region."""

    def __init__(self, pools: Iterable[Pool]) -> None:
        self.pools = sorted(pools, key=lambda pool: pool.start)
        self._starts = [pool.start for pool in self.pools]

    def pool_at(self, address: int) -> Pool | None:
        """The pool that has this byte."""
        index = bisect_right(self._starts, address) - 1
        return self.pools[index] if index >= 0 and address < self.pools[index].end else None

    def pools_between(self, start: int, end: int) -> Iterator[Pool]:
        """The pools of which bytes ``[start, end)`` have a part."""
        return (pool for pool in self.pools if pool.start < end and start < pool.end)


def extents_of(layout: LayoutView) -> Extents:
    """The extents of a layout's regions (it may be the view of a single tensor)."""
    pools: list[Pool] = []
    places = [
        (region.slots().data_ptr(), region, group.layer_group_id)
        for group in layout.groups
        for region in group.regions
        if region.num_slots and region.size
    ]
    for base, region, group in sorted(places, key=lambda place: place[0]):
        end = base + (region.num_slots - 1) * region.stride + region.size
        pool = next((pool for pool in pools if pool.stride == region.stride and pool.start <= base < pool.end), None)
        if pool is None:
            pool = Pool(base, end, region.stride)
            pools.append(pool)
        pool.end = max(pool.end, end)
        pool.parts.append(Part(base - pool.start, region.size, group))
    return Extents(pools)


def pages_of(pool: Pool, address: int, shape: Sequence[int], strides: Sequence[int], itemsize: int) -> Pages:
    """What a tensor at ``address`` covers of a pool; ``strides`` in elements. An expanded dimension counts once."""
    dims = sorted((stride * itemsize, size) for stride, size in zip(strides, shape, strict=True) if size > 1 and stride)
    run = itemsize
    while dims and dims[0][0] == run:
        run *= dims.pop(0)[1]
    across = [(stride // pool.stride, size) for stride, size in dims if stride % pool.stride == 0]
    within = [(stride, size) for stride, size in dims if stride % pool.stride]
    first = address - pool.start
    pages: Pages = {}
    # The runs inside one slot repeat in every slot of the dimensions that step from slot to slot.
    for offset in _offsets(within):
        for group, slot, nbytes in pool.bytes_in(first + offset, run):
            for steps in _offsets(across):
                page = group, slot + steps
                pages[page] = pages.get(page, 0) + nbytes
    return pages


def pages_of_tensor(pool: Pool, tensor: Any) -> Pages:
    """:func:`pages_of` a tensor whose first byte lies in the pool."""
    return pages_of(pool, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.element_size())


def _offsets(dims: Sequence[tuple[int, int]]) -> Iterator[int]:
    if not dims:
        return iter((0,))
    return (sum(steps) for steps in product(*(range(0, stride * size, stride) for stride, size in dims)))
