"""Which bytes of the registered caches a torch operation reads and writes, by its schema and arguments.

Everything that moves bytes between tensors goes through an operation with a schema, which says of each argument whether it is
written, aliased (a view: nothing moves) or read. Operations that pick elements by an index tensor are followed index by index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tracekv.capture.watch_extents import Extents, Pages, Pool, add_pages, pages_of, pages_of_tensor

#: They look at a tensor, not at its bytes.
_LOOKS_ONLY = frozenset({
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like",
    "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided", "is_pinned", "is_same_size", "record_stream",
    "resize_", "set_", "sym_size", "sym_stride", "sym_numel", "sym_storage_offset", "lift_fresh",
})  # fmt: skip
#: Which elements a mask lets through isn't followed: all of them are counted, and that is said.
_MASKED = frozenset({"masked_select", "masked_scatter_", "masked_scatter", "masked_fill_", "take", "put_"})


@dataclass
class Moved:
    """What one operation did to the caches.

    Attributes:
        read, written: Bytes by (layer group, page slot).
        negative: Page slots that a negative index gave, by (layer group, page slot).
        is_exact: False where more may be counted than moved.
    """

    read: Pages = field(default_factory=dict)
    written: Pages = field(default_factory=dict)
    negative: Pages = field(default_factory=dict)
    is_exact: bool = True

    def __bool__(self) -> bool:
        return bool(self.read or self.written or self.negative)


class _Schema:
    """An operation's arguments, by what it does with them."""

    __slots__ = ("is_view", "looks_only", "name", "names", "written")

    def __init__(self, operation: Any) -> None:
        arguments = operation._schema.arguments
        self.name: str = operation._schema.name.rpartition("::")[2]
        self.names = [argument.name for argument in arguments]
        aliased = {argument.name: argument.alias_info for argument in arguments if argument.alias_info is not None}
        self.written = {name for name, alias in aliased.items() if alias.is_write}
        self.is_view = bool(aliased) and not self.written
        self.looks_only = self.name in _LOOKS_ONLY


_schemas: dict[Any, _Schema] = {}


def moved_by(
    extents: Extents, operation: Any, args: Sequence[Any], kwargs: dict[str, Any], answer: Any
) -> Moved | None:
    """What an operation that has just run moved from and to the caches; None where it didn't touch them."""
    schema = _schemas.get(operation)
    if schema is None:
        schema = _schemas[operation] = _Schema(operation)
    if schema.looks_only:
        return None
    if schema.is_view and schema.name != "select":
        return None
    arguments = {**dict(zip(schema.names, args, strict=False)), **kwargs}
    if schema.is_view and arguments["index"] >= 0:
        return None
    touched = [
        (name, tensor, pool)
        for name, value in arguments.items()
        for tensor in _tensors(value)
        if (pool := pool_of(extents, tensor)) is not None
    ]
    if not touched:
        return None
    moved = Moved()
    if schema.is_view:
        _note_negative(moved, touched[0][1], touched[0][2], arguments["dim"], [arguments["index"]])
        return moved
    moved.is_exact = schema.name not in _MASKED
    made = sum(tensor.numel() for tensor in _tensors(answer))
    made = max(made, sum(t.numel() for name in schema.written for t in _tensors(arguments.get(name))))
    for name, tensor, pool in touched:
        pages, elements = _touched_pages(schema.name, name, tensor, pool, arguments, moved)
        if name in schema.written:
            add_pages(moved.written, pages)
        elif made >= elements:  # a sum, a comparison: it reads, but takes nothing away
            add_pages(moved.read, pages)
    return moved


def pool_of(extents: Extents, tensor: Any) -> Pool | None:
    """The pool in which a tensor's first byte lies; None for tensors elsewhere, and for those without strided memory."""
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return None
    try:
        return extents.pool_at(tensor.data_ptr()) if tensor.numel() else None
    except RuntimeError:  # a tensor without storage (fake, functional): it has no bytes
        return None


def _tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            if isinstance(item, torch.Tensor):
                yield item


def _touched_pages(
    operation: str, argument: str, tensor: Any, pool: Pool, arguments: dict[str, Any], moved: Moved
) -> tuple[Pages, int]:
    picked = _PICKS.get(operation)
    if picked is None or argument not in ("self", "input"):
        return pages_of_tensor(pool, tensor), tensor.numel()
    places, shape, strides = picked(tensor, arguments, moved, pool)
    size = tensor.element_size()
    pages: Pages = {}
    for place in places:
        add_pages(pages, pages_of(pool, tensor.data_ptr() + place * size, shape, strides, size))
    elements = len(places)
    for extent in shape:
        elements *= extent
    return pages, elements


#: Offsets (in elements) at which equal parts of the tensor begin, and the parts' shape and strides.
_Picked = tuple[list[int], list[int], list[int]]


def _along(tensor: Any, arguments: dict[str, Any], moved: Moved, pool: Pool) -> _Picked:
    """``index_select`` and its like: whole slices along a dimension."""
    return _slices(tensor, {arguments["dim"] % tensor.dim(): _numbers(arguments["index"])}, moved, pool)


def _by_tensors(tensor: Any, arguments: dict[str, Any], moved: Moved, pool: Pool) -> _Picked:
    """``index`` and ``index_put_``: index tensors for some of the dimensions, broadcast against each other; masks too."""
    columns: dict[int, Any] = {}
    dim = 0
    for index in arguments["indices"]:
        if index is None:
            dim += 1
        elif index.dtype in (torch.bool, torch.uint8):
            for column in index.nonzero().unbind(1):
                columns[dim] = column
                dim += 1
        else:
            columns[dim] = index
            dim += 1
    together = torch.broadcast_tensors(*columns.values())  # type: ignore[no-untyped-call]
    return _slices(tensor, {dim: _numbers(column) for dim, column in zip(columns, together, strict=True)}, moved, pool)


def _element_by_element(tensor: Any, arguments: dict[str, Any], moved: Moved, pool: Pool) -> _Picked:
    """``gather`` and ``scatter_``: along one dimension by index, along the others by the index tensor's own coordinates."""
    index, dim = arguments["index"], arguments["dim"] % tensor.dim()
    columns = {
        other: torch.arange(size)
        .view([-1 if place == other else 1 for place in range(index.dim())])
        .expand(index.shape)
        for other, size in enumerate(index.shape)
    }
    columns[dim] = index
    return _slices(tensor, {other: _numbers(column) for other, column in columns.items()}, moved, pool)


_PICKS: dict[str, Callable[[Any, dict[str, Any], Moved, Pool], _Picked]] = {
    "index": _by_tensors,
    "index_put_": _by_tensors,
    "_index_put_impl_": _by_tensors,
    "_unsafe_index": _by_tensors,
    "_unsafe_index_put_": _by_tensors,
    "index_select": _along,
    "index_copy_": _along,
    "index_add_": _along,
    "index_fill_": _along,
    "gather": _element_by_element,
    "scatter_": _element_by_element,
    "scatter_add_": _element_by_element,
}


def _numbers(index: Any) -> list[int]:
    numbers: list[int] = index.reshape(-1).tolist()
    return numbers


def _slices(tensor: Any, columns: dict[int, list[int]], moved: Moved, pool: Pool) -> _Picked:
    shape, strides = tensor.shape, tensor.stride()
    for dim, numbers in columns.items():
        _note_negative(moved, tensor, pool, dim, numbers)
    places = [
        sum(number % shape[dim] * strides[dim] for dim, number in zip(columns, row, strict=True))
        for row in zip(*columns.values(), strict=True)
    ]
    others = [dim for dim in range(len(shape)) if dim not in columns]
    return places, [shape[dim] for dim in others], [strides[dim] for dim in others]


def _note_negative(moved: Moved, tensor: Any, pool: Pool, dim: int, numbers: Iterable[int]) -> None:
    """A negative index into the dimension that steps from page slot to page slot."""
    step = tensor.stride(dim) * tensor.element_size()
    if step == 0 or step % pool.stride:
        return
    for number in numbers:
        if number < 0:
            offset = tensor.data_ptr() - pool.start + (number + tensor.shape[dim]) * step
            for group, slot, _ in pool.bytes_in(offset, 1):
                add_pages(moved.negative, {(group, slot): 1})
