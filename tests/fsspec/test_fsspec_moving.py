"""The copies between pages and slots: the same bytes at the same places, whichever way they are moved."""

from __future__ import annotations

import random

import pytest
import torch

from tracekv.contract import KvCacheBufferRef, KvCacheLayerGroupLayout, KvCacheLayout, KvCacheRegion
from tracekv.contract.reading import layout_of, layout_of_tensor
from tracekv_fsspec.format import padded
from tracekv_fsspec.moving import (
    WHOLE_PAGE_BYTES,
    GatheringMover,
    HostMover,
    Moves,
    layer_by_layer,
    mover_for,
    regions_of,
    whole_page,
)

SLOTS = 32
LAYERS = 4
ARENA_AT = 4096
POISON = 7


class Caches:
    """One layer group of two regions that lie apart in each page, every byte random, and an arena of zeros."""

    def __init__(self, region_bytes=6144):
        gap = 512
        self.pool = torch.randint(0, 256, (SLOTS, 2 * region_bytes + gap), dtype=torch.uint8)
        buffers = [KvCacheBufferRef(layer, role) for layer in range(LAYERS) for role in ("key", "value")]
        stride, half = self.pool.shape[1], len(buffers) // 2
        regions = tuple(
            KvCacheRegion(self.pool.data_ptr() + at, region_bytes, stride, SLOTS, tuple(part), device="cpu")
            for at, part in ((0, buffers[:half]), (region_bytes + gap, buffers[half:]))
        )
        group = KvCacheLayerGroupLayout(0, tuple(range(LAYERS)), None, regions)
        self.layout = layout_of(KvCacheLayout(4, (group,), torch.float32))
        self.page_bytes = 2 * region_bytes
        self.slot_bytes = padded(self.page_bytes)
        self.arena = bytearray(ARENA_AT + SLOTS * self.slot_bytes)

    def pages(self, numbers):
        """What a slot has to hold: the regions one after the other."""
        first, second = regions_of(self.layout)[0]
        return [bytes(torch.cat([first[page], second[page]]).numpy()) for page in numbers]

    def slots(self, starts):
        return [bytes(self.arena[start : start + self.page_bytes]) for start in starts]

    def moves(self, pages, numbers):
        return Moves(0, pages, [ARENA_AT + number * self.slot_bytes for number in numbers], self.slot_bytes)


@pytest.fixture(params=[HostMover, GatheringMover])
def kind(request):
    return request.param


@pytest.fixture(params=["neighbours", "scattered", "partly"])
def places(request):
    """Pages, and the numbers of their slots."""
    chance = random.Random(3)
    pages = chance.sample(range(SLOTS), 9)
    slots = {
        "neighbours": list(range(5, 14)),
        "scattered": chance.sample(range(SLOTS), 9),
        "partly": [3, 4, 5, 9, 8, 7, 20, 21, 0],
    }
    return pages, slots[request.param]


@pytest.mark.parametrize("pieces", [whole_page, layer_by_layer])
def test_a_saved_page_lies_region_after_region_in_its_slot(kind, places, pieces):
    caches = Caches()
    moves = caches.moves(*places)
    kind(regions_of(caches.layout), memoryview(caches.arena)).save(moves, pieces(caches.layout.groups[0]))
    assert caches.slots(moves.starts) == caches.pages(moves.pages)


@pytest.mark.parametrize("pieces", [whole_page, layer_by_layer])
def test_a_loaded_page_is_what_was_saved(kind, places, pieces):
    caches = Caches()
    moves = caches.moves(*places)
    mover = kind(regions_of(caches.layout), memoryview(caches.arena))
    mover.save(moves, whole_page(caches.layout.groups[0]))
    before = caches.pages(moves.pages)
    caches.pool.fill_(POISON)
    mover.load(moves, pieces(caches.layout.groups[0]))
    assert caches.pages(moves.pages) == before
    others = [page for page in range(SLOTS) if page not in moves.pages]
    assert caches.pages(others) == [bytes([POISON]) * caches.page_bytes] * len(others)


def test_nothing_but_the_named_slots_is_written_and_their_padding_stays_zero(kind):
    caches = Caches(region_bytes=5000)
    moves = caches.moves([4, 2, 9], [6, 7, 30])
    kind(regions_of(caches.layout), memoryview(caches.arena)).save(moves, whole_page(caches.layout.groups[0]))
    for start in moves.starts:
        assert not any(caches.arena[start + caches.page_bytes : start + caches.slot_bytes])
        caches.arena[start : start + caches.slot_bytes] = bytes(caches.slot_bytes)
    assert not any(caches.arena)


def test_large_pages_are_moved_one_by_one_to_the_same_places(kind):
    caches = Caches(region_bytes=WHOLE_PAGE_BYTES)
    moves = caches.moves([4, 2], [1, 0])
    mover = kind(regions_of(caches.layout), memoryview(caches.arena))
    mover.save(moves, whole_page(caches.layout.groups[0]))
    assert caches.slots(moves.starts) == caches.pages(moves.pages)
    before = caches.pages(moves.pages)
    caches.pool.fill_(POISON)
    mover.load(moves, whole_page(caches.layout.groups[0]))
    assert caches.pages(moves.pages) == before


def test_more_pages_than_the_staging_buffer_holds_are_moved_in_turns(monkeypatch):
    monkeypatch.setattr("tracekv_fsspec.moving.STAGING_BYTES", 4 * 6144)
    caches = Caches()
    moves = caches.moves(list(range(SLOTS)), list(range(SLOTS)))
    GatheringMover(regions_of(caches.layout), memoryview(caches.arena)).save(moves, whole_page(caches.layout.groups[0]))
    assert caches.slots(moves.starts) == caches.pages(moves.pages)


@pytest.mark.parametrize("direction", ["load", "save"])
@pytest.mark.parametrize("page", [-1, SLOTS])
def test_a_page_that_is_none_is_refused_before_anything_moves(kind, direction, page):
    caches = Caches()
    caches.arena[ARENA_AT:] = bytes([POISON]) * (len(caches.arena) - ARENA_AT)
    pool, arena = caches.pool.clone(), bytes(caches.arena)
    mover = kind(regions_of(caches.layout), memoryview(caches.arena))
    with pytest.raises(IndexError, match=f"page slot {page} of layer group 0"):
        getattr(mover, direction)(caches.moves([1, page], [0, 1]), whole_page(caches.layout.groups[0]))
    assert torch.equal(caches.pool, pool)
    assert bytes(caches.arena) == arena


def test_each_layer_of_the_single_tensor_is_a_piece_of_its_own():
    tensor = torch.arange(3 * LAYERS * 2 * 8, dtype=torch.float32).view(3, LAYERS, 2, 8)
    group = layout_of_tensor(tensor, 4).groups[0]
    pieces = layer_by_layer(group)
    assert [(piece.layer, piece.start, piece.stop) for piece in pieces] == [
        (layer, 64 * layer, 64 * layer + 64) for layer in range(LAYERS)
    ]
    page = regions_of(layout_of_tensor(tensor, 4))[0][0][1]
    assert torch.equal(page[pieces[2].start : pieces[2].stop].view(torch.float32), tensor[1, 2].flatten())


@pytest.mark.parametrize(
    "buffers",
    [
        [(0, "key"), (1, "key"), (0, "value"), (1, "value")],
        [(0, "key"), (0, "value"), (1, "key")],
        [],
    ],
    ids=["not neighbours", "of different kinds", "not named"],
)
def test_a_region_whose_layers_are_not_sure_is_one_piece_for_its_first_layer(buffers):
    pool = torch.zeros((2, 96), dtype=torch.uint8)
    region = KvCacheRegion(
        pool.data_ptr(), 96, 96, 2, tuple(KvCacheBufferRef(*buffer) for buffer in buffers), device="cpu"
    )
    layout = layout_of(KvCacheLayout(4, (KvCacheLayerGroupLayout(0, (0, 1), None, (region,)),), torch.float32))
    assert layer_by_layer(layout.groups[0]) == whole_page(layout.groups[0])


def test_layers_in_falling_order_are_found_where_they_lie():
    pool = torch.arange(192, dtype=torch.uint8).view(2, 96)
    buffers = tuple(KvCacheBufferRef(layer, role) for layer in (5, 3, 1) for role in ("key", "value"))
    region = KvCacheRegion(pool.data_ptr(), 96, 96, 2, buffers, device="cpu")
    layout = layout_of(KvCacheLayout(4, (KvCacheLayerGroupLayout(0, (1, 3, 5), None, (region,)),), torch.float32))
    spans = [(piece.layer, piece.start, piece.stop) for piece in layer_by_layer(layout.groups[0])]
    assert spans == [(1, 64, 96), (3, 32, 64), (5, 0, 32)]


def test_pages_in_host_memory_get_the_mover_that_copies_on_the_host():
    caches = Caches()
    assert isinstance(mover_for(caches.layout, memoryview(caches.arena)), HostMover)
