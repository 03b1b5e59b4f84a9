from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tracekv.contract import KvCacheBufferRef, KvCacheLayerGroupLayout, KvCacheLayout, KvCacheRegion, reading


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({"cache_salt": "t"}, "t"),
        ({"cache_salt_id": 9}, "9"),
        ({}, None),
        ({"cache_salt": None, "cache_salt_id": 3}, "3"),
    ],
)
def test_the_salt_is_read_under_its_old_and_new_name(attributes, expected):
    assert reading.cache_salt(SimpleNamespace(**attributes)) == expected


@pytest.mark.parametrize("attributes", [{"py_num_connector_matched_tokens": 64}, {"num_connector_matched_tokens": 64}])
def test_the_honoured_amount_is_read_under_both_names(attributes):
    assert reading.honoured_tokens(SimpleNamespace(**attributes)) == 64
    assert reading.honoured_tokens(SimpleNamespace()) is None


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({}, None),
        ({"is_dummy_request": False}, False),
        ({"is_dummy_request": True}, True),
        ({"is_dummy_request": False, "is_generation_only_request": True}, True),
        ({"is_dummy_request": False, "is_generation_only_request": lambda: True}, True),
        ({"is_dummy_request": False, "is_generation_only_request": lambda: False}, False),
        ({"is_dummy_request": False, "state": SimpleNamespace(name="DISAGG_GENERATION_INIT")}, True),
    ],
)
def test_whether_a_request_is_of_a_kind_that_is_never_asked_about(attributes, expected):
    assert reading.is_never_asked(SimpleNamespace(**attributes)) is expected


def test_an_image_changes_the_digest_and_its_place_does_too():
    def digest(hashes, positions):
        return reading.multimodal_digest(
            SimpleNamespace(multimodal_hashes=hashes, multimodal_positions=positions, multimodal_lengths=[4])
        )

    assert digest([[1, 2]], [3]) == digest([[1, 2]], [3])
    assert len({digest([[1, 2]], [3]), digest([[1, 9]], [3]), digest([[1, 2]], [5])}) == 3
    assert digest(None, None) is None


def test_a_tensor_of_hashes_reads_as_its_numbers():
    def digest(hashes, positions, lengths):
        return reading.multimodal_digest(
            SimpleNamespace(multimodal_hashes=hashes, multimodal_positions=positions, multimodal_lengths=lengths)
        )

    plain = digest([[1, 2], [5, 6]], [3, 9], [4, 4])
    assert digest([torch.tensor([1, 2]), torch.tensor([5, 6])], [3, 9], [4, 4]) == plain
    assert digest(torch.tensor([[1, 2], [5, 6]]), torch.tensor([3, 9]), torch.tensor([4, 4])) == plain
    assert digest(torch.tensor([[1, 2], [5, 7]]), torch.tensor([3, 9]), torch.tensor([4, 4])) != plain


def test_positions_without_hashes_have_no_digest():
    with pytest.raises(reading.UnreadableRequest):
        reading.multimodal_digest(SimpleNamespace(multimodal_hashes=None, multimodal_positions=[3]))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (SimpleNamespace(new_block_ids=[1, 2]), [[1, 2]]),
        (SimpleNamespace(new_block_ids=[1], new_block_ids_by_layer_group=[]), [[1]]),
        (SimpleNamespace(new_block_ids=[], new_block_ids_by_layer_group=[[-1], [3]]), [[-1], [3]]),
        (SimpleNamespace(new_block_ids=[], new_block_ids_by_layer_group={1: [3], 0: [2]}), [[2], [3]]),
        (SimpleNamespace(new_block_ids=[], new_block_ids_by_layer_group={1: [3]}), [[], [3]]),
    ],
)
def test_new_pages_are_read_from_every_version(data, expected):
    assert reading.new_block_ids(data) == expected


def test_a_tensor_and_its_layout_have_pages_of_the_same_bytes():
    tensor = torch.arange(3 * 2 * 2 * 4, dtype=torch.float32).view(3, 2, 2, 4)
    buffers = tuple(KvCacheBufferRef(layer, role) for layer in range(2) for role in ("key", "value"))
    region = KvCacheRegion(tensor.data_ptr(), 64, 64, 3, buffers, "cpu")
    layout = KvCacheLayout(32, (KvCacheLayerGroupLayout(0, (0, 1), None, (region,)),), torch.float32)
    flat, grouped = reading.layout_of_tensor(tensor, 32), reading.layout_of(layout)
    assert flat.groups[0].bytes_per_page == grouped.groups[0].bytes_per_page == 64
    assert torch.equal(flat.groups[0].regions[0].slots()[1], grouped.groups[0].regions[0].slots()[1])
    flat.groups[0].regions[0].slots()[2] = 0
    assert tensor[2].eq(0).all()


def test_replicated_regions_of_newer_layouts_are_part_of_a_page():
    region = SimpleNamespace(size=64, stride=64, num_slots=3, buffers=[(0, "key", 1)])
    group = SimpleNamespace(
        layer_group_id=4, window_size=None, layer_ids=[0], regions=[region], replicated_regions=[region]
    )
    view = reading.layout_of(SimpleNamespace(tokens_per_block=32, groups=[group]))
    assert view.dtype == "torch.uint8"
    assert view.groups[0].bytes_per_page == 128
    assert view.group_of_layer(0).layer_group_id == 4
    assert view.group_of_layer(1) is None


def test_the_fingerprint_follows_what_a_page_holds_and_not_how_many_there_are():
    def fingerprint(slots=3, heads=4, window=None, dtype=torch.float32):
        tensor = torch.zeros(slots, 2, 2, heads, dtype=dtype)
        group = reading.layout_of_tensor(tensor, 32).groups[0]
        return reading.LayoutView(
            32, str(dtype), (reading.GroupView(0, window, group.layer_ids, group.regions),)
        ).fingerprint()

    assert fingerprint(slots=3) == fingerprint(slots=9)
    different = {fingerprint(), fingerprint(heads=8), fingerprint(window=64), fingerprint(dtype=torch.int32)}
    assert len(different) == 4
