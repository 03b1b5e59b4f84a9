"""One forward of a Transformers model over the pages of several requests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch

from tracekv.harness.attention import LayerPlace, PagedAttention, Segment, driven
from tracekv.harness.models import ModelShape
from tracekv.harness.pages import GroupShape, PagePool

#: Called with the layer's attention module, which has a ``layer_idx``.
LayerHook = Callable[[Any], None]


def layer_groups(shape: ModelShape, mode: Literal["v1", "v2"]) -> list[GroupShape]:
    """The layer groups of a model: one per window in order of first appearance (V2), or one over all layers (V1).

    Raises:
        NotImplementedError: Layers of one group that differ in what they store.
    """
    by_window: dict[int | None, list[int]] = {}
    for layer in shape.layers:
        by_window.setdefault(layer.window if mode == "v2" else None, []).append(layer.layer)
    groups = []
    for group, (window, members) in enumerate(by_window.items()):
        sizes = {(shape.layers[layer].kv_heads, shape.layers[layer].head_dim) for layer in members}
        if len(sizes) > 1:
            raise NotImplementedError(
                f"tracekv: the layers of group {group} differ in KV heads or head size: {sorted(sizes)}"
            )
        kv_heads, head_dim = sizes.pop()
        groups.append(GroupShape(group, tuple(members), window, kv_heads, head_dim, shape.dtype))
    return groups


class ModelRunner:
    """Runs a model's forward with paged attention.

    The model itself stays as it is between two forwards, so several executors can take turns with it.

    Args:
        model: Any causal LM of Transformers 5.
        shape: What :func:`~tracekv.harness.models.model_shape` read from it.
        pools: The layer groups' pools.
        tokens_per_block: Tokens per page.
    """

    def __init__(self, model: Any, shape: ModelShape, pools: Sequence[PagePool], tokens_per_block: int) -> None:
        self._model = model
        self._shape = shape
        self._pools = pools
        self._tokens_per_block = tokens_per_block
        self._places = {
            layer: LayerPlace(pool.shape.layer_group_id, index, shape.layers[layer].window)
            for pool in pools
            for index, layer in enumerate(pool.shape.layer_ids)
        }
        self._layers = decoder_layers(model, len(shape.layers))

    def forward(
        self,
        tokens: Sequence[int],
        segments: Sequence[Segment],
        rows: Sequence[int],
        hooks: tuple[LayerHook, LayerHook] | None = None,
    ) -> torch.Tensor:
        """Compute the tokens of all segments, flattened to one row.

        Args:
            tokens: Token ids, segment after segment.
            segments: Whose they are, at which positions, on which pages.
            rows: Of which rows the logits are wanted.
            hooks: Called before and after each decoder layer.

        Returns:
            ``[len(rows), vocabulary]``.
        """
        positions = [position for segment in segments for position in range(segment.start, segment.end)]
        attention = PagedAttention(self._pools, self._places, segments, self._tokens_per_block)
        with torch.no_grad(), driven(self._model, attention), self._hooked(hooks):
            output = self._model(
                input_ids=self._row(tokens),
                position_ids=self._row(positions),
                use_cache=False,
                # No row at all is no shape that every model takes.
                logits_to_keep=self._row(list(rows) or [len(tokens) - 1])[0],
            )
        logits: torch.Tensor = output.logits[0]
        return logits[: len(rows)]

    @contextlib.contextmanager
    def _hooked(self, hooks: tuple[LayerHook, LayerHook] | None) -> Iterator[None]:
        handles = []
        try:
            for decoder_layer, attention in self._layers if hooks else ():
                before, after = hooks or (None, None)
                assert before is not None
                assert after is not None
                handles.append(decoder_layer.register_forward_pre_hook(lambda *_, m=attention, hook=before: hook(m)))
                handles.append(decoder_layer.register_forward_hook(lambda *_, m=attention, hook=after: hook(m)))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _row(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor([list(values)], dtype=torch.long, device=self._shape.device)


def decoder_layers(model: Any, count: int) -> list[tuple[Any, Any]]:
    """Each decoder layer with its attention module, in the order of the layers.

    A decoder layer is the member of a module list that has an attention module (one that knows its ``layer_idx``) inside.
    """
    found: dict[int, tuple[Any, Any]] = {}
    for container in model.modules():
        if not isinstance(container, torch.nn.ModuleList) or len(container) != count:
            continue
        for index, decoder_layer in enumerate(container):
            attention = next(
                (
                    m
                    for m in decoder_layer.modules()
                    if m is not decoder_layer and getattr(m, "layer_idx", None) == index
                ),
                None,
            )
            if attention is not None:
                found[index] = (decoder_layer, attention)
    if len(found) != count:
        raise NotImplementedError(f"tracekv: {type(model).__name__}: found {len(found)} of {count} decoder layers")
    return [found[index] for index in range(count)]
