from __future__ import annotations

import pytest
import torch

from tracekv.contract import (
    BAD_PAGE_INDEX,
    KvCacheBufferRef,
    KvCacheLayerGroupLayout,
    KvCacheLayout,
    KvCacheRegion,
    valid_page_slots,
)


def region_over(pool: torch.Tensor, size: int, offset: int = 0, buffers=()) -> KvCacheRegion:
    """A region of ``size`` bytes per row of a uint8 ``[num_slots, stride]`` pool."""
    return KvCacheRegion(pool.data_ptr() + offset, size, pool.stride(0), pool.shape[0], tuple(buffers), "cpu")


def uniform(pool: torch.Tensor, layers=(0, 1), dtype=torch.float32) -> KvCacheLayout:
    buffers = [KvCacheBufferRef(layer, role) for layer in layers for role in ("key", "value")]
    group = KvCacheLayerGroupLayout(0, tuple(layers), None, (region_over(pool, pool.shape[1], buffers=buffers),))
    return KvCacheLayout(32, (group,), dtype)


def test_absent_pages_are_skipped_and_ordinals_kept():
    assert list(valid_page_slots([BAD_PAGE_INDEX, 4, -7, 0])) == [(1, 4), (3, 0)]


def test_a_slot_tensor_is_the_pools_own_memory():
    pool = torch.zeros(4, 64, dtype=torch.uint8)
    region_over(pool, 16, offset=8).slot_tensor(2)[:] = 9
    assert pool[2, 8:24].eq(9).all()
    assert int(pool.sum()) == 9 * 16


def test_as_tensor_is_strided_and_typed():
    pool = torch.arange(4 * 64, dtype=torch.uint8).view(4, 64)
    view = region_over(pool, 16, offset=8).as_tensor(torch.int32)
    assert view.shape == (4, 4)
    assert view.stride() == (16, 1)
    assert torch.equal(view[3].view(torch.uint8), pool[3, 8:24])


@pytest.mark.parametrize("slot", [-1, 4])
def test_a_slot_outside_the_pool_is_an_index_error(slot):
    region = region_over(torch.zeros(4, 64, dtype=torch.uint8), 64)
    with pytest.raises(IndexError, match=f"page slot {slot} is outside"):
        region.slot_tensor(slot)
    with pytest.raises(IndexError):
        region.address_of(slot)


def test_address_of_steps_by_the_stride():
    region = KvCacheRegion(1000, 16, 64, 4)
    assert region.address_of(3) == 1000 + 3 * 64


def test_a_size_that_is_no_multiple_of_the_dtype_says_so():
    with pytest.raises(ValueError, match=r"6 bytes.*use torch.uint8"):
        KvCacheRegion(0, 6, 64, 1, (), "cpu").as_tensor(torch.float32)


def test_groups_are_found_by_id_and_by_layer():
    pool = torch.zeros(2, 8, dtype=torch.uint8)
    groups = tuple(
        KvCacheLayerGroupLayout(i, layers, None, (region_over(pool, 8),)) for i, layers in ((2, (0, 3)), (5, (1,)))
    )
    layout = KvCacheLayout(32, groups)
    assert layout.group(5) is groups[1]
    assert layout.group_of_layer(3) is groups[0]
    assert groups[0].bytes_per_page == 8
    with pytest.raises(KeyError):
        layout.group(0)
    with pytest.raises(KeyError):
        layout.group_of_layer(9)


def test_a_uniform_cache_is_one_tensor():
    pool = torch.zeros(5, 2 * 2 * 8 * 4, dtype=torch.uint8)
    tensor = uniform(pool).as_single_pool_tensor()
    assert tensor.shape == (5, 2, 2, 8)
    assert tensor.dtype == torch.float32
    tensor[1, 1, 0] = 1.0
    assert pool[1].view(torch.float32).view(2, 2, 8)[1, 0].eq(1.0).all()


def test_several_groups_or_regions_are_no_single_tensor():
    pool = torch.zeros(5, 64, dtype=torch.uint8)
    one = uniform(pool).groups[0]
    two_regions = KvCacheLayerGroupLayout(0, (0, 1), None, one.regions * 2)
    assert KvCacheLayout(32, (one, one)).as_single_pool_tensor() is None
    assert KvCacheLayout(32, (two_regions,)).as_single_pool_tensor() is None
