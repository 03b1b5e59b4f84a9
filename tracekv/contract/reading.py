"""Read the runtime's objects across versions, by duck typing and nowhere else.

Every function takes what a callback was given and answers in plain ints, strings and lists; none keeps a reference to a
runtime object. Source of the differences: contract.md sections 1.3, 2 and 5.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class UnreadableRequest(ValueError):
    """A request names something that changes its KV (an image, say) but not which one."""


def prompt_tokens(request: Any) -> Sequence[int]:
    """The token ids of beam 0: the prompt, and after the first pass the generated tokens too."""
    tokens: Sequence[int] = request.get_tokens(0)
    return tokens


def prompt_length(request: Any) -> int | None:
    """Prompt tokens, or None where the object doesn't say (``prompt_len``, ``py_prompt_len``, ``orig_prompt_len``)."""
    for name in ("prompt_len", "py_prompt_len", "orig_prompt_len"):
        value = getattr(request, name, None)
        if isinstance(value, int):
            return value
    return None


def client_id(request: Any) -> int | None:
    """The id by which the front process knows the request."""
    for name in ("py_client_id", "client_id"):
        value = getattr(request, name, None)
        if isinstance(value, int):
            return value
    return None


def honoured_tokens(request: Any) -> int | None:
    """Offered tokens that the runtime took, set before the alloc callback; None where the object has no such value.

    On V1 the batch's object may lack it, since the query saw another one (contract-v2.md section 11, 7).
    """
    for name in ("py_num_connector_matched_tokens", "num_connector_matched_tokens"):
        value = getattr(request, name, None)
        if isinstance(value, int):
            return value
    return None


def is_never_asked(request: Any) -> bool | None:
    """Whether the runtime tells this request's pages without asking about it: a dummy, or one that only generates; None where the
    object doesn't say whether it is one.

    Source: contract-v2.md section 1.2; ``is_generation_only_request`` is a property on some classes, a method on others.
    """
    is_dummy = getattr(request, "is_dummy_request", None)
    only_generates = getattr(request, "is_generation_only_request", False)
    if is_dummy is None:
        return None
    state = getattr(getattr(request, "state", None), "name", "")
    return bool(
        is_dummy
        or (only_generates() if callable(only_generates) else only_generates)
        or state == "DISAGG_GENERATION_INIT"
    )


def scheduled_chunk(request: Any) -> int | None:
    """Prompt tokens that the pass was going to compute before the query; None where the object has no ``context_chunk_size``."""
    value = getattr(request, "context_chunk_size", None)
    return value if isinstance(value, int) else None


def cache_salt(request: Any) -> str | None:
    """The tenant salt as a string: ``cache_salt`` (str), or ``cache_salt_id`` (int, older versions)."""
    for name in ("cache_salt", "cache_salt_id"):
        value = getattr(request, name, None)
        if value is not None:
            return str(value)
    return None


def lora_id(request: Any) -> int | None:
    """The LoRA task id, or None."""
    value = getattr(request, "lora_task_id", None)
    return None if value is None else int(value)


def multimodal_digest(request: Any) -> str | None:
    """One digest over a request's images and other items, with their places; None for text only.

    Raises:
        UnreadableRequest: The request has multimodal positions but no hashes. Its KV has no key.
    """
    # Plain first: of a tensor of several numbers can't be asked whether it is empty.
    parts = [_plain(getattr(request, f"multimodal_{name}", None)) for name in ("hashes", "positions", "lengths")]
    hashes, positions, _ = parts
    if not hashes:
        if positions:
            raise UnreadableRequest("multimodal positions without hashes")
        return None
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value).hex()
    return value


def new_block_ids(data: Any) -> list[list[int]]:
    """Page slots appended since the last report, ``[layer_group_id][i]``, from a ``RequestData`` of any version."""
    grouped = getattr(data, "new_block_ids_by_layer_group", None)
    if not grouped:
        return [list(data.new_block_ids)]
    if isinstance(grouped, dict):
        return [list(grouped.get(group, ())) for group in range(max(grouped) + 1)]
    return [list(ids) for ids in grouped]


def has_new_blocks(data: Any) -> bool:
    """Whether :func:`new_block_ids` names any."""
    grouped = getattr(data, "new_block_ids_by_layer_group", None)
    if not grouped:
        return bool(data.new_block_ids)
    return any(grouped.values() if isinstance(grouped, dict) else grouped)


@dataclass(frozen=True)
class RegionView:
    """A byte range per page slot; ``slots(dtype)`` is a ``[num_slots, size]`` uint8 view of the memory.

    ``layer_ids`` names the layer of each of ``roles``, in memory order; it is empty where the runtime doesn't tell.
    """

    size: int
    stride: int
    num_slots: int
    roles: tuple[str, ...]
    region: Any
    layer_ids: tuple[int, ...] = ()

    def slots(self) -> torch.Tensor:
        """``[num_slots, size]`` uint8; row i is page slot i. Check the slot before indexing: -1 is a valid subscript."""
        import torch

        view: torch.Tensor = self.region.as_tensor(torch.uint8)
        return view

    def layer_spans(self) -> list[tuple[int, int, int]]:
        """``(layer_id, start, stop)`` for each layer's bytes within a slot, in rising order of layers; empty where that isn't sure.

        It is sure where each layer's buffers are neighbours and all layers have the same ones: layers of differing size never
        share a region (the connector document, "KvCacheLayout reference").
        """
        kinds: dict[int, list[str]] = {}
        last: int | None = None
        for layer, role in zip(self.layer_ids, self.roles, strict=False):
            if layer != last and layer in kinds:
                return []
            kinds.setdefault(layer, []).append(role.split(":", 1)[-1])
            last = layer
        if not kinds or self.size % len(kinds) or len({tuple(roles) for roles in kinds.values()}) > 1:
            return []
        span = self.size // len(kinds)
        return sorted((layer, place * span, (place + 1) * span) for place, layer in enumerate(kinds))


@dataclass(frozen=True)
class GroupView:
    """One layer group: its window in tokens (None: full), its layers, and what makes up a page."""

    layer_group_id: int
    window_size: int | None
    layer_ids: tuple[int, ...]
    regions: tuple[RegionView, ...]

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page, replicated regions included."""
        return sum(region.size for region in self.regions)

    @property
    def num_slots(self) -> int:
        """Page slots of the group."""
        return min((region.num_slots for region in self.regions), default=0)


@dataclass(frozen=True)
class LayoutView:
    """A rank's caches in one shape, whatever the version and whichever of the two registrations was used.

    Attributes:
        tokens_per_block: 0 where the single tensor doesn't tell (V1 gives no such number: it is the engine's argument).
        is_single_tensor: Registered as V1 does it, which knows neither layer groups nor windows.
    """

    tokens_per_block: int
    dtype: str
    groups: tuple[GroupView, ...]
    is_single_tensor: bool = False

    def group_of_layer(self, layer_id: int) -> GroupView | None:
        """The group that owns a layer, or None."""
        return next((group for group in self.groups if layer_id in group.layer_ids), None)

    def fingerprint(self) -> bytes:
        """Digest (32 bytes) of everything that decides how a page's bytes are laid out; not of how many there are."""
        parts = [
            (
                group.layer_group_id,
                group.window_size,
                group.layer_ids,
                [(region.size, region.roles) for region in group.regions],
            )
            for group in self.groups
        ]
        return hashlib.sha256(repr((self.tokens_per_block, self.dtype, parts)).encode()).digest()


class _TensorRegion:
    """The single tensor as one region."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def as_tensor(self, dtype: torch.dtype) -> torch.Tensor:
        return self._tensor.view(self._tensor.shape[0], -1).view(dtype)


def layout_of_tensor(tensor: torch.Tensor, tokens_per_block: int = 0) -> LayoutView:
    """The view of ``register_kv_caches``' tensor, ``[num_blocks, num_layers, kv_factor, block_size]``: one group, full."""
    num_blocks, num_layers, kv_factor, block_size = tensor.shape
    row = num_layers * kv_factor * block_size * tensor.element_size()
    roles = ("key", "value") if kv_factor == 2 else tuple(f"kv{i}" for i in range(kv_factor))
    # Dim 1 is the position among this rank's layers, which is their id where no rank lacks layers and none goes without KV;
    # it is never greater than the id, so who waits for all layers up to an id has waited for that layer too.
    layers = tuple(layer for layer in range(num_layers) for _ in roles)
    region = RegionView(
        row,
        tensor.stride(0) * tensor.element_size(),
        num_blocks,
        roles * num_layers,
        _TensorRegion(tensor),
        layers,
    )
    group = GroupView(0, None, tuple(range(num_layers)), (region,))
    return LayoutView(tokens_per_block, str(tensor.dtype), (group,), is_single_tensor=True)


def _buffer(buffer: Any) -> tuple[int, str, int]:
    return (buffer.layer_id, buffer.role, buffer.expansion) if hasattr(buffer, "layer_id") else tuple(buffer)


def _region(region: Any) -> RegionView:
    buffers = [_buffer(buffer) for buffer in region.buffers]
    roles = tuple(f"{layer_id}:{role}:{expansion}" for layer_id, role, expansion in buffers)
    layers = tuple(int(layer_id) for layer_id, _, _ in buffers)
    return RegionView(region.size, region.stride, region.num_slots, roles, region, layers)


def layout_of(layout: Any) -> LayoutView:
    """The view of a ``KvCacheLayout`` of any version (replicated regions included, dtype uint8 where it is absent)."""
    groups = []
    for group in layout.groups:
        regions: Iterable[Any] = (*group.regions, *(getattr(group, "replicated_regions", None) or ()))
        groups.append(
            GroupView(
                int(group.layer_group_id),
                group.window_size,
                tuple(group.layer_ids),
                tuple(map(_region, regions)),
            )
        )
    dtype = getattr(layout, "dtype", None)
    return LayoutView(int(layout.tokens_per_block), str(dtype or "torch.uint8"), tuple(groups))


def tokens_per_block(llm_args: Any) -> int | None:
    """Tokens per block from the engine's arguments, for V1, whose tensor doesn't tell."""
    config = getattr(llm_args, "kv_cache_config", None)
    for owner in (config, llm_args):
        value = getattr(owner, "tokens_per_block", None)
        if isinstance(value, int):
            return value
    return None
