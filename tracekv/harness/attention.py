"""The attention function through which a Transformers model reads and writes pages.

A model calls it once per layer, with the tokens of all requests of the pass flattened to one row. It writes their keys and
values to the pages of the layer's group, then attends over what it gathers from the pages: so the KV that a connector put
there is the KV that the model attends to. Plain matrix products throughout: equal shapes give bit-equal results.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tracekv.harness.pages import PagePool
from tracekv.harness.rules import blocks_for

#: The name under which the function is registered with Transformers.
IMPLEMENTATION = "tracekv_paged"


class Attention(Protocol):
    """What computes attention while a model is driven."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """``[heads, tokens, head_dim]`` each; answers ``[tokens, heads, head_dim]``."""
        ...


class _Active(threading.local):
    attention: Attention | None = None


_active = _Active()


def _attention_function(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,  # noqa: ARG001  # some models pass it by name
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Any = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' side of the seam: ``[1, heads, tokens, head_dim]`` in, ``[1, tokens, heads, head_dim]`` out."""
    if _active.attention is None:
        raise RuntimeError(f"tracekv: {IMPLEMENTATION} attention runs only while an executor drives the model")
    if s_aux is not None:
        raise NotImplementedError(
            f"tracekv: attention sinks ({type(module).__name__}) are not supported by the harness"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = _active.attention.attend(module.layer_idx, query[0], key[0], value[0], scale, softcap)
    return output.unsqueeze(0), None


def _no_mask(*_: Any, **__: Any) -> None:
    """The pages decide what is attended to."""


def _register() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(IMPLEMENTATION, _attention_function)
    AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)


@contextlib.contextmanager
def driven(model: Any, attention: Attention) -> Iterator[None]:
    """Let ``attention`` compute the model's attention on this thread; afterwards the model is as it was."""
    _register()
    before = model.config._attn_implementation
    model.set_attn_implementation(IMPLEMENTATION)
    if model.config._attn_implementation != IMPLEMENTATION:
        raise NotImplementedError(
            f"tracekv: {type(model).__name__} does not take its attention from Transformers' AttentionInterface; "
            "the harness can't give it paged attention"
        )
    outer, _active.attention = _active.attention, attention
    try:
        yield
    finally:
        _active.attention = outer
        model.set_attn_implementation(before)


@dataclass(frozen=True)
class LayerPlace:
    """Where a layer's KV lies: its group, its place among the group's layers, and its window in tokens."""

    group: int
    index: int
    window: int | None


@dataclass(frozen=True)
class Segment:
    """One request's tokens of a pass: rows ``[row, row + end - start)``, positions ``[start, end)``.

    ``slots[g][ordinal]`` is the page slot in layer group g.
    """

    row: int
    start: int
    end: int
    slots: Sequence[Sequence[int]]

    @property
    def tokens(self) -> int:
        """How many there are."""
        return self.end - self.start


class PagedAttention:
    """Attention of one pass over the pages of its requests.

    Args:
        pools: The layer groups' pools, by group.
        places: Where each layer's KV lies.
        segments: The pass's requests, in the order of their rows.
        tokens_per_block: Tokens per page.
    """

    def __init__(
        self,
        pools: Sequence[PagePool],
        places: dict[int, LayerPlace],
        segments: Sequence[Segment],
        tokens_per_block: int,
    ) -> None:
        self._pools = pools
        self._places = places
        self._segments = segments
        self._block = tokens_per_block
        self._device = pools[0].tensor.device
        self._writes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._reads: dict[tuple[int, int | None], list[_Read]] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """Write this pass's KV of a layer, then attend over what the pages hold."""
        place = self._places[layer]
        pages = self._pools[place.group].kv[:, place.index]  # [slots, 2, kv_heads, block, head_dim]
        slots, offsets = self._write_places(place.group)
        pages[:, 0][slots, :, offsets] = key.transpose(0, 1)
        pages[:, 1][slots, :, offsets] = value.transpose(0, 1)

        kv_heads, repeat = key.shape[0], query.shape[0] // key.shape[0]
        parts = []
        for segment, read in zip(self._segments, self._read_places(place.group, place.window), strict=True):
            keys, values = (_gather(pages[:, role], read) for role in (0, 1))
            rows = query[:, segment.row : segment.row + segment.tokens].reshape(kv_heads, repeat * segment.tokens, -1)
            scores = torch.matmul(rows, keys.transpose(1, 2)).float() * scaling
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            scores = scores.view(kv_heads, repeat, segment.tokens, -1).masked_fill(~read.visible, float("-inf"))
            weights = torch.softmax(scores, dim=-1).to(values.dtype)
            mixed = torch.matmul(weights.view(kv_heads, repeat * segment.tokens, -1), values)
            parts.append(mixed.view(kv_heads * repeat, segment.tokens, -1).transpose(0, 1))
        return torch.cat(parts)

    def _write_places(self, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        if group not in self._writes:
            slots: list[int] = []
            offsets: list[int] = []
            for segment in self._segments:
                for position in range(segment.start, segment.end):
                    ordinal, offset = divmod(position, self._block)
                    slots.append(_page(segment, group, ordinal))
                    offsets.append(offset)
            self._writes[group] = (self._tensor(slots), self._tensor(offsets))
        return self._writes[group]

    def _read_places(self, group: int, window: int | None) -> list[_Read]:
        if (group, window) not in self._reads:
            self._reads[group, window] = [self._read_place(segment, group, window) for segment in self._segments]
        return self._reads[group, window]

    def _read_place(self, segment: Segment, group: int, window: int | None) -> _Read:
        first = 0 if window is None else max(0, segment.start + 1 - window)
        ordinals = range(first // self._block, blocks_for(segment.end, self._block))
        slots = self._tensor([_page(segment, group, ordinal) for ordinal in ordinals])
        at = torch.arange(segment.start, segment.end, device=self._device).unsqueeze(1)
        seen = torch.arange(first, segment.end, device=self._device).unsqueeze(0)
        visible = seen <= at
        if window is not None:
            visible &= seen > at - window
        skip = first - ordinals.start * self._block
        return _Read(slots, skip, skip + segment.end - first, visible)

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)


@dataclass(frozen=True)
class _Read:
    """Pages to gather, the tokens of them to keep, and which of those each row sees (``[tokens, kept]``)."""

    slots: torch.Tensor
    first: int
    last: int
    visible: torch.Tensor


def _page(segment: Segment, group: int, ordinal: int) -> int:
    slot = segment.slots[group][ordinal]
    if slot < 0:
        # -1 is a valid subscript: it would read another request's page.
        raise RuntimeError(f"tracekv: block {ordinal} of layer group {group} has no page, but the pass needs it")
    return slot


def _gather(pages: torch.Tensor, read: _Read) -> torch.Tensor:
    """``[slots, heads, block, head_dim]`` -> ``[heads, tokens, head_dim]``, without what lies beyond the tokens written."""
    picked = pages[read.slots].permute(1, 0, 2, 3)
    return picked.reshape(picked.shape[0], -1, picked.shape[3])[:, read.first : read.last].contiguous()
