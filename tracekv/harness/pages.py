"""The pages of one layer group: their memory, who holds them, and which may be reused."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Protocol

import torch

from tracekv.contract import KvCacheBufferRef, KvCacheLayerGroupLayout, KvCacheLayout, KvCacheRegion


class PageOwner(Protocol):
    """A block of the reuse tree that has a page."""

    def lost(self, group: int) -> None:
        """The page was evicted."""
        ...


@dataclass(frozen=True)
class GroupShape:
    """The layers that share page slots, and what they store per token."""

    layer_group_id: int
    layer_ids: tuple[int, ...]
    window: int | None
    kv_heads: int
    head_dim: int
    dtype: torch.dtype


class PagePool:
    """Page slots of one layer group.

    A slot is free, held (by requests, counted), or reusable: held by nobody but known to the reuse tree, until it is
    evicted, least recently used first. Only free and reusable slots are ever handed out.

    Attributes:
        tensor: ``[num_slots, layers, 2, kv_heads * tokens_per_block * head_dim]``: keys, then values, layer by layer.
        kv: The same memory as ``[num_slots, layers, 2, kv_heads, tokens_per_block, head_dim]``.
    """

    def __init__(self, shape: GroupShape, num_slots: int, tokens_per_block: int, device: torch.device) -> None:
        self.shape = shape
        self.num_slots = num_slots
        page = (len(shape.layer_ids), 2, shape.kv_heads, tokens_per_block, shape.head_dim)
        self.kv = torch.zeros((num_slots, *page), dtype=shape.dtype, device=device)
        self.tensor = self.kv.view(num_slots, page[0], 2, -1)
        self._holders = [0] * num_slots
        self._owners: list[PageOwner | None] = [None] * num_slots
        self._free = deque(range(num_slots))
        self._reusable: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Slots that :meth:`take` can hand out."""
        return len(self._free) + len(self._reusable)

    def holders(self, slot: int) -> int:
        """How many requests hold a slot."""
        return self._holders[slot]

    def take(self) -> int:
        """A slot of one's own, its content undefined; RuntimeError where none is available."""
        if self._free:
            slot = self._free.popleft()
        elif self._reusable:
            slot, _ = self._reusable.popitem(last=False)
            owner = self._owners[slot]
            self._owners[slot] = None
            if owner is not None:
                owner.lost(self.shape.layer_group_id)
        else:
            raise RuntimeError(f"tracekv: layer group {self.shape.layer_group_id} has no page left; raise num_blocks")
        self._holders[slot] = 1
        return slot

    def hold(self, slot: int) -> None:
        """Share a slot that the reuse tree knows."""
        if self._holders[slot] == 0:
            self._reusable.pop(slot)
        self._holders[slot] += 1

    def drop(self, slot: int) -> None:
        """Stop holding a slot; it becomes reusable if the tree knows it, else free."""
        self._holders[slot] -= 1
        if self._holders[slot] > 0:
            return
        if self._owners[slot] is None:
            self._free.append(slot)
        else:
            self._reusable[slot] = None

    def forget(self, slot: int) -> None:
        """Free a slot that is reusable; the reuse tree no longer knows it."""
        if slot in self._reusable:
            self._reusable.pop(slot)
            owner, self._owners[slot] = self._owners[slot], None
            if owner is not None:
                owner.lost(self.shape.layer_group_id)
            self._free.append(slot)

    def owned_by(self, slot: int, owner: PageOwner) -> None:
        """Enter a held slot into the reuse tree."""
        self._owners[slot] = owner

    def copy(self, source: int, target: int) -> None:
        """Copy a page's content."""
        self.tensor[target].copy_(self.tensor[source])

    def layout(self) -> KvCacheLayerGroupLayout:
        """One region per page slot: the keys and values of all layers lie side by side.

        Source: the connector document, "KvCacheLayout reference".
        """
        row = self.tensor[0].numel() * self.tensor.element_size()
        buffers = tuple(KvCacheBufferRef(layer, role) for layer in self.shape.layer_ids for role in ("key", "value"))
        region = KvCacheRegion(
            base=self.tensor.data_ptr(),
            size=row,
            stride=row,
            num_slots=self.num_slots,
            buffers=buffers,
            device=str(self.tensor.device),
        )
        return KvCacheLayerGroupLayout(self.shape.layer_group_id, self.shape.layer_ids, self.shape.window, (region,))


def layout_of_pools(pools: list[PagePool], tokens_per_block: int) -> KvCacheLayout:
    """The layout that a V2 cache registers."""
    dtypes = {pool.tensor.dtype for pool in pools}
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    return KvCacheLayout(tokens_per_block, tuple(pool.layout() for pool in pools), dtype)
