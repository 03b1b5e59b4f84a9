"""KV caches of the recorded geometry, in host memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tracekv.contract import KvCacheBufferRef, KvCacheLayerGroupLayout, KvCacheLayout, KvCacheRegion
from tracekv.testing.replay_recording import Life

#: Beyond so many bytes all slots of a region share one row: the pages' contents then mean nothing.
MOST_BYTES = 1 << 30


class Caches(NamedTuple):
    """What is registered.

    Attributes:
        tensor: The single tensor, where there is one.
        layout: The layout, for a V2 cache.
        has_shared_rows: Whether all slots lie in the same memory.
        memory: Keeps the layout's memory alive.
    """

    tensor: torch.Tensor | None
    layout: KvCacheLayout | None
    has_shared_rows: bool
    memory: list[torch.Tensor]


def make_caches(life: Life, most_bytes: int) -> Caches:
    """The caches of a recorded life, in at most about ``most_bytes``."""
    assert life.register is not None
    dtype = getattr(torch, life.register.dtype.removeprefix("torch."), torch.uint8)
    shape = life.caches.shape if life.caches else []
    if shape:
        return _of_tensor(life, shape, dtype, most_bytes)
    total = sum(region.stride * region.num_slots for group in life.register.groups for region in group.regions)
    shares = total > most_bytes
    memory: list[torch.Tensor] = []
    groups = []
    for position, group in enumerate(life.register.groups):
        told = life.caches.buffers[position] if life.caches and position < len(life.caches.buffers) else []
        regions = []
        for number, region in enumerate(group.regions):
            stride = 0 if shares else region.stride
            memory.append(torch.zeros(region.size if shares else region.stride * region.num_slots, dtype=torch.uint8))
            buffers = tuple(KvCacheBufferRef(*buffer) for buffer in told[number]) if number < len(told) else ()
            regions.append(
                KvCacheRegion(memory[-1].data_ptr(), region.size, stride, region.num_slots, buffers, device="cpu")
            )
        groups.append(
            KvCacheLayerGroupLayout(group.layer_group_id, tuple(group.layer_ids), group.window_size, tuple(regions))
        )
    layout = KvCacheLayout(life.register.tokens_per_block, tuple(groups), None if dtype is torch.uint8 else dtype)
    return Caches(None, layout, shares, memory)


def _of_tensor(life: Life, shape: list[int], dtype: torch.dtype, most_bytes: int) -> Caches:
    row = torch.zeros(shape[1:], dtype=dtype)
    shares = row.nbytes * shape[0] > most_bytes
    tensor = row.expand(shape) if shares else torch.zeros(shape, dtype=dtype)
    layout = None
    if life.is_v2:
        # A flat-only connector on a V2 cache was given the tensor that the base class makes of the layout.
        roles = ("key", "value") if shape[2] == 2 else tuple(f"kv{i}" for i in range(shape[2]))
        buffers = tuple(KvCacheBufferRef(layer, role) for layer in range(shape[1]) for role in roles)
        stride = 0 if shares else row.nbytes
        region = KvCacheRegion(tensor.data_ptr(), row.nbytes, stride, shape[0], buffers, device="cpu")
        group = KvCacheLayerGroupLayout(0, tuple(range(shape[1])), None, (region,))
        layout = KvCacheLayout(life.start.tokens_per_block or 0, (group,), dtype)
    return Caches(tensor, layout, shares, [tensor])


def registration(caches: Caches, *, takes_layout: bool) -> tuple[str, Any]:
    """The callback by which the worker gets the caches, and its argument: the layout under V2, the tensor under V1."""
    if caches.layout is None or (caches.tensor is not None and not takes_layout):
        return "register_kv_caches", caches.tensor
    return "register_kv_cache_layout", caches.layout
