"""The byte ranges of a paged KV cache, of the same shape as TensorRT-LLM's ``KvCacheLayout``."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

#: A block that has no page in a layer group. It is a valid subscript, so it must never index a pool.
BAD_PAGE_INDEX = -1


def valid_page_slots(page_indices: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield ``(block_ordinal, page_slot)`` for the entries that address a page.

    A block without a page is reported as ``BAD_PAGE_INDEX`` in place, and -1 is a valid subscript: indexing a pool
    with it reads another request's KV. So every transfer target is built through this function.

    Args:
        page_indices: Page slots of one layer group, one entry per block ordinal.

    Source: the connector document, "Blocks with no page".
    """
    for ordinal, slot in enumerate(page_indices):
        if slot >= 0:
            yield ordinal, slot


class KvCacheBufferRef(NamedTuple):
    """One buffer inside a region: ``role`` is the cache manager's own name, e.g. ``"key"`` or ``"value"``."""

    layer_id: int
    role: str
    expansion: int = 1


@dataclass(frozen=True)
class KvCacheRegion:
    """A contiguous byte range that repeats once per page slot.

    Attributes:
        base: Address of page slot 0, in device memory or (``device="cpu"``) host memory.
        size: Bytes covered within one slot.
        stride: Bytes between consecutive slots.
        num_slots: Number of page slots.
        buffers: What the region covers, in memory order.
        device: Where ``base`` points; TensorRT-LLM's own type has no such field and always means the GPU.

    Source: the connector document, "KvCacheLayout reference".
    """

    base: int
    size: int
    stride: int
    num_slots: int
    buffers: tuple[KvCacheBufferRef, ...] = ()
    device: str = "cuda"

    def address_of(self, slot: int) -> int:
        """Address of ``slot``; IndexError outside ``[0, num_slots)``."""
        self._check(slot)
        return self.base + self.stride * slot

    def as_tensor(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A strided ``[num_slots, size // itemsize]`` view (default uint8); row i is page slot i.

        Unguarded: any subscript is accepted, -1 included. Use :meth:`slot_tensor` for a single page.
        The view doesn't own the memory; it is valid as long as the pool is.
        """
        import torch

        dtype = dtype or torch.uint8
        if self.size % dtype.itemsize or self.stride % dtype.itemsize:
            raise ValueError(
                f"tracekv: a region of {self.size} bytes with stride {self.stride} has no view as {dtype}; "
                "use torch.uint8"
            )
        extent = (self.num_slots - 1) * self.stride + self.size if self.num_slots else 0
        flat = _bytes_at(self.base, extent, self.device).view(dtype)
        shape = (self.num_slots, self.size // dtype.itemsize)
        return flat.as_strided(shape, (self.stride // dtype.itemsize, 1))

    def slot_tensor(self, slot_id: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The bytes of one page slot as a 1-D view; IndexError outside ``[0, num_slots)``."""
        self._check(slot_id)
        return self.as_tensor(dtype)[slot_id]

    def _check(self, slot: int) -> None:
        if not 0 <= slot < self.num_slots:
            raise IndexError(f"page slot {slot} is outside [0, {self.num_slots})")


@dataclass(frozen=True)
class KvCacheLayerGroupLayout:
    """The layers that share one attention window, and with it one space of page slots.

    Attributes:
        layer_group_id: The index page slots are scoped to.
        layer_ids: Global model layer indices, as the per-layer hooks receive them.
        window_size: Attention window in tokens, or None for full attention.
        regions: What makes up one page.

    Source: the connector document, "KvCacheLayout reference".
    """

    layer_group_id: int
    layer_ids: tuple[int, ...]
    window_size: int | None
    regions: tuple[KvCacheRegion, ...]

    @property
    def bytes_per_page(self) -> int:
        """Bytes the group occupies for one page slot."""
        return sum(region.size for region in self.regions)


@dataclass(frozen=True)
class KvCacheLayout:
    """The pools of one rank.

    Attributes:
        tokens_per_block: Tokens covered by one page.
        groups: The layer groups. Look one up by id: empty groups are left out, so position and id can differ.
        dtype: Element type of the KV data; None means uint8.

    Source: the connector document, "KvCacheLayout reference"; contract.md section 2.
    """

    tokens_per_block: int
    groups: tuple[KvCacheLayerGroupLayout, ...]
    dtype: torch.dtype | None = None

    def group(self, layer_group_id: int) -> KvCacheLayerGroupLayout:
        """One group by id; KeyError if absent."""
        for group in self.groups:
            if group.layer_group_id == layer_group_id:
                return group
        raise KeyError(layer_group_id)

    def group_of_layer(self, layer_id: int) -> KvCacheLayerGroupLayout:
        """The group that owns a model layer; KeyError if none does."""
        for group in self.groups:
            if layer_id in group.layer_ids:
                return group
        raise KeyError(layer_id)

    def as_single_pool_tensor(self) -> torch.Tensor | None:
        """The ``[num_blocks, num_layers, kv_factor, block_size]`` view, or None.

        None where one tensor can't describe the cache: several groups or regions, or layers of different make.
        """
        import torch

        if len(self.groups) != 1 or len(self.groups[0].regions) != 1:
            return None
        group, region = self.groups[0], self.groups[0].regions[0]
        layers = len(group.layer_ids)
        if not layers or not region.buffers or len(region.buffers) % layers or region.size != region.stride:
            return None
        kv_factor = len(region.buffers) // layers
        dtype = self.dtype or torch.uint8
        return region.as_tensor(dtype).view(region.num_slots, layers, kv_factor, -1)


class _CudaBytes:
    """Raw device bytes for ``torch.as_tensor``, through the CUDA array interface."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _bytes_at(address: int, nbytes: int, device: str) -> torch.Tensor:
    import torch

    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device=device)
    if device == "cpu":
        raw: Any = (ctypes.c_uint8 * nbytes).from_address(address)
        return torch.frombuffer(raw, dtype=torch.uint8)
    return torch.as_tensor(_CudaBytes(address, nbytes), device=device)
