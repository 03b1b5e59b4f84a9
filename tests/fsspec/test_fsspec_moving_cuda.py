"""The copies between a GPU's pages and the arena's slots. Needs a GPU."""

from __future__ import annotations

import mmap
import random

import pytest
import torch

from tracekv.contract.reading import layout_of_tensor
from tracekv.journal.vocabulary import Tier
from tracekv_fsspec.format import padded
from tracekv_fsspec.loading import Job, StreamCopies, StreamLoading
from tracekv_fsspec.moving import GatheringMover, Moves, layer_by_layer, mover_for, whole_page
from tracekv_fsspec.pinning import pin_for_gpu
from tracekv_fsspec.plan import Copy

pytestmark = pytest.mark.cuda

SLOTS = 48


class Caches:
    """Random pages on the GPU, and registered host memory."""

    def __init__(self, layers, row):
        self.tensor = torch.rand((SLOTS, layers, 2, row), device="cuda")
        self.layout = layout_of_tensor(self.tensor, 4)
        self.group = self.layout.groups[0]
        self.page_bytes = self.group.bytes_per_page
        self.slot_bytes = padded(self.page_bytes)
        memory = mmap.mmap(-1, SLOTS * self.slot_bytes)
        self.arena = torch.frombuffer(memory, dtype=torch.uint8)
        self.unpin = pin_for_gpu(self.layout, memoryview(memory))
        assert self.unpin is not None
        self.mover = mover_for(self.layout, memoryview(memory))

    def close(self):
        torch.cuda.synchronize()
        self.unpin()

    def slots(self, moves):
        return torch.stack([self.arena[start : start + self.page_bytes] for start in moves.starts]).clone()

    def pages(self, moves):
        return self.tensor[list(moves.pages)].flatten(1).view(torch.uint8).cpu()

    def moves(self, count, *, scattered=False):
        chance = random.Random(1)
        numbers = chance.sample(range(SLOTS), count) if scattered else range(3, 3 + count)
        return Moves(
            0, chance.sample(range(SLOTS), count), [self.slot_bytes * number for number in numbers], self.slot_bytes
        )

    def job(self, moves):
        return Job(Copy(1, 0, 0, Tier.HOST), moves, self.page_bytes * len(moves.pages))


SMALL = (4, 1000)


@pytest.fixture(params=[SMALL, (4, 1024), (2, 1 << 18)], ids=["padded slots", "dense slots", "large pages"])
def caches(request):
    caches = Caches(*request.param)
    yield caches
    caches.close()


@pytest.fixture
def small():
    caches = Caches(*SMALL)
    yield caches
    caches.close()


@pytest.mark.parametrize("scattered", [False, True])
def test_pages_of_a_gpu_come_back_as_they_were_saved(caches, scattered):
    assert isinstance(caches.mover, GatheringMover)
    moves = caches.moves(20, scattered=scattered)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    StreamCopies.issue(caches.mover.save, [caches.job(moves)], {0: whole_page(caches.group)}, stream)
    stream.synchronize()
    before = caches.pages(moves)
    assert torch.equal(caches.slots(moves), before)
    caches.tensor.zero_()
    stream.wait_stream(torch.cuda.current_stream())
    StreamCopies.issue(caches.mover.load, [caches.job(moves)], {0: whole_page(caches.group)}, stream)
    stream.synchronize()
    assert torch.equal(caches.pages(moves), before)
    assert torch.count_nonzero(caches.tensor.flatten(1).any(dim=1)) == len(moves.pages)


def test_a_layer_is_there_when_it_was_waited_for_and_all_are_when_joined(caches):
    moves = caches.moves(20)
    StreamCopies.issue(
        caches.mover.save, [caches.job(moves)], {0: whole_page(caches.group)}, torch.cuda.current_stream()
    )
    torch.cuda.synchronize()
    saved = caches.tensor.clone()
    caches.tensor.zero_()
    pieces: dict = {}
    for piece in layer_by_layer(caches.group):
        pieces.setdefault(piece.layer, []).append(piece)
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()
    loading = StreamLoading(caches.mover, [caches.job(moves)], {0: pieces}, side, current)
    pages = list(moves.pages)
    loading.wait(0, current)
    first = caches.tensor[pages, 0].clone()
    loading.join(current)
    everything = caches.tensor[pages].clone()
    torch.cuda.synchronize()
    loading.settle()
    assert torch.equal(first, saved[pages, 0])
    assert torch.equal(everything, saved[pages])
    assert loading.jobs[0].copy_ns > 0
    assert loading.unasked == set(range(caches.tensor.shape[1])) - {0}


def test_small_pages_are_issued_without_waiting_for_the_copies(small):
    caches = small
    moves = caches.moves(40)
    stream = torch.cuda.Stream()
    caches.mover.save(moves, whole_page(caches.group))  # the driver and the buffer are there
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(2_000_000_000)  # cycles: about a second
    StreamCopies.issue(caches.mover.save, [caches.job(moves)], {0: whole_page(caches.group)}, stream)
    assert not stream.query()
    stream.synchronize()
    assert torch.equal(caches.slots(moves), caches.pages(moves))


def test_the_staging_buffer_is_used_by_one_stream_after_the_other(small):
    caches = small
    first = caches.moves(20)
    second = Moves(0, list(range(20, 40)), [caches.slot_bytes * number for number in range(25, 45)], caches.slot_bytes)
    slow, fast = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(slow):
        torch.cuda._sleep(500_000_000)
    for stream, moves in ((slow, first), (fast, second)):
        StreamCopies.issue(caches.mover.save, [caches.job(moves)], {0: whole_page(caches.group)}, stream)
    torch.cuda.synchronize()
    assert torch.equal(caches.slots(first), caches.pages(first))
    assert torch.equal(caches.slots(second), caches.pages(second))
