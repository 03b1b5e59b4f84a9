"""The honour rule and the stale rule against the numbers of upstream's tests (contract-v2.md sections 1.3 and 2)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tracekv.harness.cache_v2 import CacheV2
from tracekv.harness.pages import GroupShape
from tracekv.harness.requests import Batch, Request
from tracekv.harness.rules import blocks_for, place_offer, stale_blocks

BLOCK = 32


def place(local, offered, prompt, chunk, capacity, *, grows=True, extra=0):
    placed = place_offer(
        offered,
        local=local,
        prompt=prompt,
        chunk=chunk,
        tokens_per_block=BLOCK,
        capacity=capacity,
        resize=lambda wanted, _: grows or wanted <= capacity,
        extra=extra,
    )
    return placed.position, placed.chunk, placed.capacity


@pytest.mark.parametrize(
    ("arguments", "placed"),
    [
        ((0, 256, 256, 256, 256), (255, 1, 256)),
        ((128, 16, 256, 128, 256), (144, 112, 256)),
        ((32, 96, 256, 224, 256), (128, 128, 256)),
        ((0, 32, 256, 64, 64), (32, 32, 64)),
        ((0, 128, 256, 64, 64), (128, 64, 192)),
        ((0, 100, 256, 48, 48), (100, 28, 128)),
        ((0, 64, 256, 64, 64), (64, 64, 128)),
        ((0, 64, 96, 32, 32), (64, 32, 96)),
        ((0, 64, 256, 128, 128), (64, 64, 128)),
        ((0, 192, 256, 128, 128), (192, 64, 256)),
        ((0, 0, 256, 64, 64), (0, 64, 64)),
        ((0, -5, 256, 64, 64), (0, 64, 64)),
    ],
)
def test_an_offer_is_placed_as_upstream_places_it(arguments, placed):
    assert place(*arguments) == placed


@pytest.mark.parametrize(
    ("arguments", "placed"),
    [
        ((0, 128, 256, 64, 64), (32, 32, 64)),
        ((0, 64, 256, 32, 32), (0, 32, 32)),
        ((255, 256, 256, 1, 256), (255, 1, 256)),
    ],
)
def test_without_more_pages_an_offer_is_cut_to_the_pages_there_are(arguments, placed):
    assert place(*arguments, grows=False) == placed


def test_extra_tokens_are_part_of_the_growth():
    assert place(0, 128, 256, 64, 64, extra=4) == (128, 64, 196)


@given(
    local=st.integers(0, 300),
    offered=st.integers(-10, 600),
    rest=st.integers(1, 300),
    chunk=st.integers(1, 300),
    grows=st.booleans(),
)
def test_what_is_honoured_never_exceeds_the_offer_and_leaves_a_token_to_compute(local, offered, rest, chunk, grows):
    prompt = local + rest
    chunk = min(chunk, rest)
    position, width, capacity = place(local, offered, prompt, chunk, local + chunk, grows=grows)
    assert local <= position <= min(local + max(0, offered), prompt - 1)
    assert width >= 1
    assert position + width <= min(prompt, capacity)


@pytest.mark.parametrize(
    ("history", "window", "sinks", "stale"),
    [
        (128, 64, 0, range(2)),
        (128, 64, 32, range(1, 2)),
        (128, None, 0, range(0)),
        *[(h, 64, 0, range(n)) for h, n in {0: 0, 32: 0, 64: 0, 96: 1, 128: 2, 200: 4}.items()],
    ],
)
def test_blocks_go_stale_when_the_window_has_passed_them(history, window, sinks, stale):
    assert stale_blocks(history, window, BLOCK, sinks) == stale


@given(history=st.integers(0, 5000), window=st.integers(1, 300), block=st.integers(1, 64))
def test_no_token_from_the_history_on_attends_to_a_stale_block(history, window, block):
    stale = stale_blocks(history, window, block)
    first_seen = max(0, history - window + 1)
    assert stale.stop * block <= first_seen
    assert first_seen < (stale.stop + 1) * block
    assert blocks_for(history + 1, block) - stale.stop <= blocks_for(window, block) + 1


def cache_of(num_blocks, *windows):
    shapes = [GroupShape(group, (group,), window, 1, 4, torch.float32) for group, window in enumerate(windows)]
    return CacheV2(shapes, num_blocks, BLOCK, torch.device("cpu"))


class Offering:
    """The part of a manager that the prepare phase asks."""

    def __init__(self, offered):
        self.offered = offered
        self.committed = []
        self.allocated = []

    def should_add_sequence(self, request):
        return True

    def query_num_new_matched_tokens(self, request, computed):
        return self.offered, False

    def commit_new_matched_tokens(self, request, honoured, is_async):
        self.committed.append(honoured)

    def update_state_after_alloc(self, request, flat, by_group):
        self.allocated.append(by_group)


def prepare(cache, prompt, chunk, offered):
    request, manager, batch = Request(1, list(range(prompt)), 1), Offering(offered), Batch()
    request.context_chunk_size = cache.schedule_context(request, chunk)
    batch.add_context(request)
    cache.prepare_resources(batch, manager)
    return request, manager, batch


def test_a_cache_without_pages_honours_what_its_pages_hold():
    request, manager, _ = prepare(cache_of(2, None), 256, 64, 128)
    assert manager.committed == [32]
    assert (request.context_current_position, request.context_chunk_size) == (32, 32)
    assert manager.allocated == [[[0, 1]]]


def test_a_cache_with_pages_grows_for_an_offer_past_the_chunk():
    request, manager, batch = prepare(cache_of(8, None), 256, 64, 128)
    assert manager.committed == [128]
    assert (request.context_current_position, request.context_chunk_size) == (128, 64)
    assert len(manager.allocated[0][0]) == 6
    assert batch.chunking == [request]


def test_growth_takes_no_pages_for_blocks_that_are_out_of_the_window():
    cache = cache_of(8, 64, None)
    _, manager, _ = prepare(cache, 160, 32, 128)
    sliding, full = manager.allocated[0]
    assert sliding[:2] == [-1, -1]
    assert all(slot >= 0 for slot in (*sliding[2:], *full))
    assert len(sliding) == len(full) == 5
    assert len(cache.unheld(0)) == 5


def test_a_second_prepare_asks_nothing():
    cache = cache_of(8, None)
    request, manager, batch = prepare(cache, 96, 96, 64)
    cache.prepare_resources(batch, manager)
    assert manager.committed == [64]
    assert len(manager.allocated) == 1
    assert request.py_connector_allocation_reported


def test_a_released_request_has_empty_lists_and_is_asked_again():
    cache = cache_of(8, None, 64)
    request, _, _ = prepare(cache, 96, 96, 64)
    cache.release(request, 0)
    assert cache.page_indices(request) == ([], [[], []])
    assert not request.py_connector_allocation_reported


def test_a_dummy_is_not_asked_but_reported():
    cache, manager = cache_of(8, None), Offering(64)
    request = Request(1, list(range(96)), 1)
    request.is_dummy_request = True
    request.context_chunk_size = cache.schedule_context(request, 96)
    cache.prepare_resources(Batch(last_chunk=[request]), manager)
    assert manager.committed == []
    assert len(manager.allocated) == 1
