"""The copies themselves: whole pages, or one layer's part of them, between the caches and the arena's slots.

In a slot a page's regions lie one after the other. Which bytes go where is the same on every device (:class:`Piece`,
:class:`Moves`); how they are copied is not:

- On the host, numpy copies rows on the calling thread, without the interpreter's lock. torch's own copies, ``index_select`` and
  ``index_copy_`` are as fast alone, but share the processors with the model's threads and then wait for each other: beside other work
  on two cores they took 10 to 100 times as long.
- On a GPU, small pages are gathered into a staging buffer and leave it in one copy per run of neighbouring slots (the way back
  alike); from :data:`WHOLE_PAGE_BYTES` on page by page is as good and needs no buffer (storage.md section 10).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from tracekv.contract.reading import GroupView, LayoutView
from tracekv_fsspec.gpu_copies import copy_rows

#: From here on a page is copied by itself.
WHOLE_PAGE_BYTES = 1 << 20
#: Bytes of a staging buffer. At 50 GB/s its copy takes a third of a millisecond, so that more would hide nothing more.
STAGING_BYTES = 16 << 20


class Piece(NamedTuple):
    """Bytes that lie side by side in a page and in its slot.

    Attributes:
        layer: The layer that reads them first.
        region: Which of the layer group's regions they are of.
        start, stop: Where they are in the region's row.
        offset: Where they begin in the slot.
    """

    layer: int
    region: int
    start: int
    stop: int
    offset: int


def whole_page(group: GroupView) -> list[Piece]:
    """A page's pieces where it is moved at once: one per region."""
    first = min(group.layer_ids, default=0)
    pieces, offset = [], 0
    for number, region in enumerate(group.regions):
        pieces.append(Piece(first, number, 0, region.size, offset))
        offset += region.size
    return pieces


def layer_by_layer(group: GroupView) -> list[Piece]:
    """A page's pieces by layer, in rising order of layers. A region of which it isn't sure is needed by its first layer."""
    pieces = []
    for whole, region in zip(whole_page(group), group.regions, strict=True):
        first = min(region.layer_ids, default=whole.layer)
        spans = region.layer_spans() or [(first, 0, region.size)]
        pieces += [Piece(layer, whole.region, start, stop, whole.offset + start) for layer, start, stop in spans]
    return sorted(pieces)


@dataclass(frozen=True)
class Moves:
    """Pages of one layer group and the slots that belong to them.

    Attributes:
        pages: Page slots.
        starts: Where each one's slot begins in the arena's buffer.
        slot_bytes: Bytes from one slot to its neighbour.
    """

    layer_group: int
    pages: Sequence[int]
    starts: Sequence[int]
    slot_bytes: int

    def runs(self, longest: int) -> Iterator[tuple[int, int]]:
        """``(first, count)`` of the pages whose slots are neighbours in rising order, at most ``longest`` of them."""
        starts, step = self.starts, self.slot_bytes
        first = 0
        for number in range(1, len(starts) + 1):
            if number == len(starts) or number - first == longest or starts[number] - starts[number - 1] != step:
                yield first, number - first
                first = number


class Mover(Protocol):
    """Copies on one kind of device. Every call checks the pages' numbers before it touches anything."""

    def load(self, moves: Moves, pieces: Sequence[Piece]) -> None:
        """Copy from the slots to the pages.

        Raises:
            IndexError: A page is outside its layer group's pools.
        """

    def save(self, moves: Moves, pieces: Sequence[Piece]) -> None:
        """Copy from the pages to the slots; IndexError as :meth:`load`."""


def mover_for(layout: LayoutView, buffer: memoryview) -> Mover:
    """The mover for the device that the caches lie on.

    Args:
        layout: The caches.
        buffer: The arena's memory, to which ``Moves.starts`` refer. On a GPU it has to be registered, or copies aren't asynchronous.
    """
    regions = regions_of(layout)
    is_on_gpu = any(region.is_cuda for group in regions.values() for region in group)
    return GatheringMover(regions, buffer) if is_on_gpu else HostMover(regions, buffer)


def regions_of(layout: LayoutView) -> dict[int, list[torch.Tensor]]:
    """By layer group, each region as ``[num_slots, size]`` uint8."""
    return {group.layer_group_id: [region.slots() for region in group.regions] for group in layout.groups}


class HostMover:
    """Pages in host memory. The copies are over when a call returns."""

    def __init__(self, regions: dict[int, list[torch.Tensor]], buffer: memoryview) -> None:
        self._regions = {group: [region.numpy() for region in tensors] for group, tensors in regions.items()}
        self._buffer = buffer
        self._arena = np.frombuffer(buffer, np.uint8)

    def load(self, moves: Moves, pieces: Sequence[Piece]) -> None:
        """As :meth:`Mover.load`."""
        regions = self._regions[moves.layer_group]
        check_pages(moves, min(map(len, regions)))
        pages = np.array(moves.pages)
        for piece in pieces:
            target = regions[piece.region][:, piece.start : piece.stop]
            for first, count in moves.runs(len(moves.pages)):
                rows = self._rows(moves, piece, first, count)
                if count == 1:
                    target[moves.pages[first]] = rows[0]
                else:
                    target[pages[first : first + count]] = rows

    def save(self, moves: Moves, pieces: Sequence[Piece]) -> None:
        """As :meth:`Mover.save`."""
        regions = self._regions[moves.layer_group]
        check_pages(moves, min(map(len, regions)))
        for piece in pieces:
            source = regions[piece.region]
            size = piece.stop - piece.start
            for page, start in zip(moves.pages, moves.starts, strict=True):
                at = start + piece.offset
                self._arena[at : at + size] = source[page, piece.start : piece.stop]

    def _rows(self, moves: Moves, piece: Piece, first: int, count: int) -> Any:
        """A piece in neighbouring slots, ``[count, bytes]``."""
        shape = (count, piece.stop - piece.start)
        return np.ndarray(shape, np.uint8, self._buffer, moves.starts[first] + piece.offset, (moves.slot_bytes, 1))


class GatheringMover:
    """Pages on a GPU: copies are issued on torch's current stream, and are over when the stream has come that far.

    Tensors of the CPU are moved in the same way, which is how the order of bytes is tested without a GPU.
    """

    def __init__(self, regions: dict[int, list[torch.Tensor]], buffer: memoryview) -> None:
        self._regions = regions
        self._wide = {group: [_wide(region) for region in tensors] for group, tensors in regions.items()}
        self._arena = torch.frombuffer(buffer, dtype=torch.uint8)
        self._device = next((region.device for tensors in regions.values() for region in tensors), torch.device("cpu"))
        self._staging: _Staging | None = None

    def load(self, moves: Moves, pieces: Sequence[Piece]) -> None:
        """As :meth:`Mover.load`."""
        check_pages(moves, min(map(len, self._regions[moves.layer_group])))
        for piece in pieces:
            if self._is_whole(piece):
                for page, slot in self._each(moves, piece):
                    page.copy_(slot, non_blocking=True)
                continue
            for first, rows in self._staged(moves, piece):
                for run, count in _shifted(moves, first, len(rows)):
                    copy_rows(rows[run - first : run - first + count], self._rows(moves, piece, run, count))
                target, staged = self._columns(moves, piece, rows)
                target.index_copy_(0, self._index(moves.pages[first : first + len(rows)]), staged)

    def save(self, moves: Moves, pieces: Sequence[Piece]) -> None:
        """As :meth:`Mover.save`."""
        check_pages(moves, min(map(len, self._regions[moves.layer_group])))
        for piece in pieces:
            if self._is_whole(piece):
                for page, slot in self._each(moves, piece):
                    slot.copy_(page, non_blocking=True)
                continue
            for first, rows in self._staged(moves, piece):
                source, staged = self._columns(moves, piece, rows)
                torch.index_select(source, 0, self._index(moves.pages[first : first + len(rows)]), out=staged)
                for run, count in _shifted(moves, first, len(rows)):
                    copy_rows(self._rows(moves, piece, run, count), rows[run - first : run - first + count])

    def _is_whole(self, piece: Piece) -> bool:
        return piece.stop - piece.start >= WHOLE_PAGE_BYTES

    def _each(self, moves: Moves, piece: Piece) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Page by page: its bytes, and where they lie in its slot."""
        region, size = self._regions[moves.layer_group][piece.region], piece.stop - piece.start
        for page, start in zip(moves.pages, moves.starts, strict=True):
            at = start + piece.offset
            yield region[page, piece.start : piece.stop], self._arena[at : at + size]

    def _staged(self, moves: Moves, piece: Piece) -> Iterator[tuple[int, torch.Tensor]]:
        """Room for the pages from ``first`` on, ``[count, bytes]``, as many at a time as there is room for."""
        size = piece.stop - piece.start
        if self._staging is None:
            self._staging = _Staging(self._device)
        most = max(1, STAGING_BYTES // size)
        for first in range(0, len(moves.pages), most):
            count = min(most, len(moves.pages) - first)
            with self._staging as memory:
                yield first, memory[: count * size].view(count, size)

    def _columns(self, moves: Moves, piece: Piece, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The region's columns and the staged rows, in words where that is possible: it is eight times fewer elements."""
        wide = self._wide[moves.layer_group][piece.region]
        if wide is None or (piece.start | piece.stop) % 8:
            return self._regions[moves.layer_group][piece.region][:, piece.start : piece.stop], rows
        return wide[:, piece.start // 8 : piece.stop // 8], rows.view(torch.int64)

    def _rows(self, moves: Moves, piece: Piece, first: int, count: int) -> torch.Tensor:
        """A piece in neighbouring slots, ``[count, bytes]``."""
        shape = (count, piece.stop - piece.start)
        return self._arena.as_strided(shape, (moves.slot_bytes, 1), moves.starts[first] + piece.offset)

    def _index(self, pages: Sequence[int]) -> torch.Tensor:
        if self._device.type != "cuda":
            return torch.tensor(pages)
        # From pinned memory, or the copy of the index would wait for the stream.
        return torch.tensor(pages, pin_memory=True).to(self._device, non_blocking=True)


class _Staging:
    """Device memory for gathered pages. Whoever uses it on another stream than the last one waits for the last one first."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(STAGING_BYTES, dtype=torch.uint8, device=device)
        self._used_on: Any = None
        self._event: Any = None

    def __enter__(self) -> torch.Tensor:
        if self._memory.is_cuda:
            stream = torch.cuda.current_stream(self._memory.device)
            if self._event is not None and stream != self._used_on:
                stream.wait_event(self._event)
            self._used_on = stream
        return self._memory

    def __exit__(self, *_: object) -> None:
        if self._memory.is_cuda:
            self._event = self._event or torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(self._used_on)


def check_pages(moves: Moves, count: int) -> None:
    """Refuse pages outside the ``count`` that there are: -1 would be a valid subscript.

    Raises:
        IndexError: As it says.
    """
    if moves.pages and not 0 <= min(moves.pages) <= max(moves.pages) < count:
        wrong = next(page for page in moves.pages if not 0 <= page < count)
        raise IndexError(f"tracekv: page slot {wrong} of layer group {moves.layer_group} is outside [0, {count})")


def _shifted(moves: Moves, first: int, count: int) -> Iterator[tuple[int, int]]:
    part = Moves(moves.layer_group, (), moves.starts[first : first + count], moves.slot_bytes)
    return ((first + run, length) for run, length in part.runs(count))


def _wide(region: torch.Tensor) -> torch.Tensor | None:
    if region.shape[1] % 8 or region.stride(0) % 8 or region.data_ptr() % 8 or region.storage_offset() % 8:
        return None
    return region.view(torch.int64)
