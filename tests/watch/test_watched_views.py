"""A view is the tensor it stands for; what is done with it is counted to the byte, and what can't be seen is said."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tracekv
from tests.support.connectors import TensorWorker
from tracekv.capture import watch_ops, watch_views
from tracekv.capture.watch_extents import extents_of, pages_of_tensor
from tracekv.contract import KvCacheBufferRef, KvCacheLayerGroupLayout, KvCacheLayout, KvCacheRegion
from tracekv.contract.reading import layout_of, layout_of_tensor
from tracekv.journal.current import current
from tracekv.journal.records import TracerFault, Transfer, WatchReport
from tracekv.journal.vocabulary import Direction, WatchGap

SLOTS, LAYERS, WIDTH = 8, 3, 16
PAGE = LAYERS * 2 * WIDTH * 4


class Doing(TensorWorker):
    """Does what a test wants in ``start_load_kv``, with the caches that it was given."""

    def register_kv_caches(self, kv_cache_tensor):
        self.caches = kv_cache_tensor

    def register_kv_cache_layout(self, layout):
        self.caches = layout

    def start_load_kv(self, stream):
        self.result = self.do(self.caches)

    def get_finished(self, finished_gen_req_ids, started_loading_req_ids):
        return [], []


@pytest.fixture
def pool():
    return torch.arange(SLOTS * LAYERS * 2 * WIDTH, dtype=torch.float32).view(SLOTS, LAYERS, 2, WIDTH)


@pytest.fixture
def worker():
    return tracekv.trace(Doing)(None)


@pytest.fixture
def during(worker, pool):
    """``during(do)``: what ``do(view of the pool)`` answers when it is called inside a callback."""
    worker.register_kv_caches(pool)

    def run(do):
        worker.do = do
        worker.start_load_kv(None)
        return worker.result

    return run


@pytest.fixture
def moved(records):
    """{direction: {page slots}, bytes} since the last time."""
    seen = [0]

    def read():
        found = records(Transfer)[seen[0] :]
        seen[0] += len(found)
        return {each.direction: (set(each.pages), each.nbytes) for each in found}

    return read


def layout_over(pool):
    """Two layer groups, the second of two regions, side by side in the same slots."""
    stride = PAGE
    sizes = PAGE // 4, PAGE // 2, PAGE // 4
    offsets = 0, sizes[0], sizes[0] + sizes[1]
    regions = [
        KvCacheRegion(
            pool.data_ptr() + offset, size, stride, SLOTS, (KvCacheBufferRef(layer, "key"),), str(pool.device)
        )
        for layer, (offset, size) in enumerate(zip(offsets, sizes, strict=True))
    ]
    first = KvCacheLayerGroupLayout(0, (0,), 64, (regions[0],))
    second = KvCacheLayerGroupLayout(1, (1, 2), None, (regions[1], regions[2]))
    return KvCacheLayout(32, (first, second), torch.float32)


# -- what is counted ---------------------------------------------------------------------------------------------------


def host(*shape):
    return torch.zeros(shape)


COPIES = {
    "copy_ to a page": (lambda v: v[2].copy_(host(LAYERS, 2, WIDTH)), Direction.LOAD, {2}, PAGE),
    "assignment": (lambda v: v.__setitem__(3, host(LAYERS, 2, WIDTH)), Direction.LOAD, {3}, PAGE),
    "assignment by a list": (
        lambda v: v.__setitem__([1, 5], host(2, LAYERS, 2, WIDTH)),
        Direction.LOAD,
        {1, 5},
        2 * PAGE,
    ),
    "index_copy_": (
        lambda v: v.index_copy_(0, torch.tensor([4, 6]), host(2, LAYERS, 2, WIDTH)),
        Direction.LOAD,
        {4, 6},
        2 * PAGE,
    ),
    "out=": (
        lambda v: torch.index_select(host(9, LAYERS, 2, WIDTH), 0, torch.tensor([8]), out=v[7:8]),
        Direction.LOAD,
        {7},
        PAGE,
    ),
    "one layer": (lambda v: v[2, 1].copy_(host(2, WIDTH)), Direction.LOAD, {2}, PAGE // 3),
    "one layer of each page": (
        lambda v: v[:, 1].copy_(host(SLOTS, 2, WIDTH)),
        Direction.LOAD,
        set(range(SLOTS)),
        SLOTS * PAGE // 3,
    ),
    "to with a copy": (lambda v: v[2].to("cpu", copy=True), Direction.SAVE, {2}, PAGE),
    "to another type": (lambda v: v[2].to(torch.float64), Direction.SAVE, {2}, PAGE),
    "clone": (lambda v: v[2].clone(), Direction.SAVE, {2}, PAGE),
    "copy_ from a page": (lambda v: host(LAYERS, 2, WIDTH).copy_(v[6]), Direction.SAVE, {6}, PAGE),
    "index_select": (lambda v: v.index_select(0, torch.tensor([1, 2, 1])), Direction.SAVE, {1, 2}, 3 * PAGE),
    "index by a tensor": (lambda v: v[torch.tensor([0, 4])], Direction.SAVE, {0, 4}, 2 * PAGE),
    "index by a mask": (lambda v: v[torch.arange(SLOTS) > 5], Direction.SAVE, {6, 7}, 2 * PAGE),
    "index in two dimensions": (lambda v: v[torch.tensor([0, 4]), 1], Direction.SAVE, {0, 4}, 2 * PAGE // 3),
    "gather": (
        lambda v: v.view(SLOTS, -1).gather(0, torch.tensor([[3, 5]])),
        Direction.SAVE,
        {3, 5},
        8,
    ),
    "cat": (lambda v: torch.cat([v[1], v[3]]), Direction.SAVE, {1, 3}, 2 * PAGE),
    "stack": (lambda v: torch.stack([v[1], v[3]]), Direction.SAVE, {1, 3}, 2 * PAGE),
    "as bytes": (lambda v: v.view(torch.uint8)[5].clone(), Direction.SAVE, {5}, PAGE),
    "contiguous of a slice": (lambda v: v[:, 0, 1].contiguous(), Direction.SAVE, set(range(SLOTS)), SLOTS * PAGE // 6),
    "tolist": (lambda v: v[4].tolist(), Direction.SAVE, {4}, PAGE),
    "cpu, then clone": (lambda v: v[4].cpu().clone(), Direction.SAVE, {4}, PAGE),
    "deepcopy": (lambda v: copy.deepcopy(v[4]), Direction.SAVE, set(range(SLOTS)), SLOTS * PAGE),
    "torch.save of a copy": (lambda v: torch.save(v[4].clone(), io.BytesIO()), Direction.SAVE, {4}, PAGE),
    "torch.save of a view": (  # on the host torch writes the whole storage behind it: the whole pool
        lambda v: torch.save(v[4].cpu(), io.BytesIO()),
        Direction.SAVE,
        set(range(SLOTS)),
        SLOTS * PAGE,
    ),
}


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_is_counted_to_the_byte(during, moved, records, name):
    do, direction, pages, nbytes = COPIES[name]
    during(do)
    assert moved() == {direction: (pages, nbytes)}
    assert all(report.is_complete for report in records(WatchReport))


def test_a_file_of_a_view_holds_what_was_counted(during, moved):
    file = io.BytesIO()
    during(lambda v: torch.save(v[4].cpu(), file))
    (_, nbytes) = moved()[Direction.SAVE]
    file.seek(0)
    assert torch.load(file).untyped_storage().nbytes() == nbytes == SLOTS * PAGE


@pytest.mark.parametrize(
    "do",
    [
        lambda v: v[3],
        lambda v: v.view(SLOTS, -1)[:, 4:8].T,
        lambda v: v[3].cpu(),
        lambda v: v[3].contiguous(),
        lambda v: torch.empty_like(v),
        lambda v: (v.shape, v.stride(), v.dtype, v.device, len(v), v.is_contiguous(), v.is_pinned()),
        lambda v: v[3].sum(),
        lambda v: torch.equal(v[3], v[3]),
        lambda v: torch.zeros(4).clone(),
        lambda v: list(v),
    ],
)
def test_a_view_a_look_and_a_check_move_nothing(during, moved, do):
    during(do)
    assert moved() == {}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_view_covers_the_elements_it_shows(data):
    pool = torch.arange(SLOTS * LAYERS * 2 * WIDTH, dtype=torch.float32).view(SLOTS, LAYERS, 2, WIDTH)
    view = pool
    for _ in range(data.draw(st.integers(1, 5))):
        kind = data.draw(st.sampled_from(["select", "slice", "transpose", "flatten"]))
        if kind == "flatten" and view.is_contiguous():
            view = view.view(-1)
        elif view.dim() and view.numel() > 1:
            dim = data.draw(st.integers(0, view.dim() - 1))
            size = view.shape[dim]
            if kind == "select":
                view = view.select(dim, data.draw(st.integers(0, size - 1)))
            elif kind == "slice":
                start = data.draw(st.integers(0, size - 1))
                view = view.narrow(dim, start, data.draw(st.integers(1, size - start)))
                step = data.draw(st.integers(1, 3))
                view = view[(slice(None),) * dim + (slice(None, None, step),)]
            elif view.dim() > 1:
                view = view.transpose(dim, 0)
    extents = extents_of(layout_of_tensor(pool))
    wanted = {}
    for element in view.reshape(-1).tolist():
        page = 0, int(element) // (LAYERS * 2 * WIDTH)
        wanted[page] = wanted.get(page, 0) + 4
    assert dict(pages_of_tensor(extents.pools[0], view)) == wanted


def test_regions_that_share_slots_are_told_apart(pool):
    extents = extents_of(layout_of(layout_over(pool)))
    assert len(extents.pools) == 1
    whole = pages_of_tensor(extents.pools[0], pool)
    assert whole == {
        (group, slot): nbytes for slot in range(SLOTS) for group, nbytes in ((0, PAGE // 4), (1, 3 * PAGE // 4))
    }


def test_pages_of_a_layout_are_counted_by_layer_group(worker, pool, records):
    worker.register_kv_cache_layout(layout_over(pool))
    worker.do = lambda layout: [region.slot_tensor(5).clone() for group in layout.groups for region in group.regions]
    worker.start_load_kv(None)
    found = {each.layer_group: (each.pages, each.nbytes) for each in records(Transfer)}
    assert found == {0: ([5], PAGE // 4), 1: ([5], 3 * PAGE // 4)}
    assert records(WatchReport)[-1].is_complete


# -- the same tensor ---------------------------------------------------------------------------------------------------


def test_a_view_is_the_same_memory_and_behaves_as_the_tensor(during, pool):
    def look(view):
        assert isinstance(view, torch.Tensor)
        assert view.data_ptr() == pool.data_ptr()
        assert view.untyped_storage().data_ptr() == pool.untyped_storage().data_ptr()
        assert (view.shape, view.stride(), view.dtype, view.device) == (
            pool.shape,
            pool.stride(),
            pool.dtype,
            pool.device,
        )
        assert np.shares_memory(view.numpy(), pool.numpy())
        assert view[3].copy_(torch.full((LAYERS, 2, WIDTH), 7.0)).data_ptr() == pool[3].data_ptr()
        assert type(view[3].clone()) is torch.Tensor
        assert type(view[3].to("cpu", copy=True)) is torch.Tensor
        assert view[2].cpu().data_ptr() == pool[2].data_ptr()
        same = view.add_(0)
        assert same is view
        assert torch.nn.Parameter(view, requires_grad=False).data_ptr() == pool.data_ptr()
        assert repr(view[0, 0, 0, :2]).startswith("tensor") or "0., " in repr(view[0, 0, 0, :2])

    during(look)
    assert bool((pool[3] == 7).all())


@pytest.mark.parametrize("round_trip", ["torch.save", "pickle", "safetensors", "deepcopy", "copy"])
def test_what_is_written_of_a_view_reads_back_as_a_plain_tensor(during, pool, round_trip):
    def there_and_back(view):
        page = view[4]
        if round_trip == "torch.save":
            file = io.BytesIO()
            torch.save(page, file)
            file.seek(0)
            return torch.load(file)  # weights only: a class of tracekv's in the file would be refused
        if round_trip == "pickle":
            return pickle.loads(pickle.dumps(page))
        if round_trip == "safetensors":
            return safetensors.torch.load(safetensors.torch.save({"page": page.contiguous()}))["page"]
        if round_trip == "copy":
            assert copy.copy(page).data_ptr() == page.data_ptr()
            return page.clone()
        return copy.deepcopy(page)

    read = during(there_and_back)
    assert type(read) is torch.Tensor
    assert torch.equal(read, pool[4])


def test_a_layout_of_views_is_a_layout(worker, pool):
    theirs = layout_over(pool)
    worker.register_kv_cache_layout(theirs)
    mine = worker.caches
    assert isinstance(mine, KvCacheLayout)
    assert mine == theirs
    assert mine.group_of_layer(2).regions[1] == theirs.groups[1].regions[1]
    assert repr(mine.groups[0].regions[0]) == repr(theirs.groups[0].regions[0])
    region = mine.group(1).regions[0]
    assert isinstance(region, KvCacheRegion)
    assert (region.size, region.stride, region.num_slots) == (PAGE // 2, PAGE, SLOTS)
    with pytest.raises(IndexError):
        region.slot_tensor(SLOTS)


def test_after_the_session_views_are_tensors_that_nobody_watches(during, worker, pool):
    during(lambda view: None)
    tracekv.capture.shutdown()
    view = worker.caches
    assert torch.equal(view[3].clone(), pool[3])
    assert type(view[3]) is torch.Tensor


# -- what can't be seen ------------------------------------------------------------------------------------------------

GAPS = {
    "data_ptr": (lambda v: v[1].data_ptr(), WatchGap.RAW_ADDRESS),
    "untyped_storage": (lambda v: v.untyped_storage(), WatchGap.STORAGE),
    "numpy": (lambda v: v[1].numpy(), WatchGap.ARRAY),
    "np.asarray": (lambda v: np.asarray(v[1]), WatchGap.ARRAY),
    "from_dlpack": (lambda v: torch.from_dlpack(v), WatchGap.DLPACK),
    "to another process": (lambda v: ForkingPickler.dumps(v[1]), WatchGap.SHARED),
    "numpy's from_dlpack": (lambda v: np.from_dlpack(v), WatchGap.DLPACK),
}


@pytest.mark.parametrize("name", GAPS)
def test_a_way_around_is_said_with_its_line(during, records, name):
    do, reason = GAPS[name]
    assert records(WatchReport)[-1].is_complete
    during(do)
    report = records(WatchReport)[-1]
    assert not report.is_complete
    (gap,) = [gap for gap in report.gaps if gap.reason is reason]
    assert gap.count >= 1
    assert gap.where.startswith("test_watched_views.py:")


@pytest.mark.parametrize("take", [lambda region: region.address_of(3), lambda region: region.base, pickle.dumps])
def test_an_address_from_the_layout_is_a_way_around(worker, pool, records, take):
    worker.register_kv_cache_layout(layout_over(pool))
    worker.do = lambda layout: take(layout.groups[0].regions[0])
    worker.start_load_kv(None)
    report = records(WatchReport)[-1]
    assert [gap.reason for gap in report.gaps] == [WatchGap.RAW_ADDRESS]
    assert not report.is_complete


def test_a_gap_stays(during, records):
    """An address that was taken once may be used at any time."""
    during(lambda view: view.data_ptr())
    current.step = 9
    during(lambda view: view[1].clone())
    report = records(WatchReport)[-1]
    assert report.step == 9
    assert not report.is_complete


def test_another_thread_is_counted_and_makes_the_count_incomplete(during, worker, moved, records):
    def copy_on_a_thread(view):
        thread = threading.Thread(target=lambda: view[6].clone())
        thread.start()
        thread.join()

    during(copy_on_a_thread)
    assert moved() == {Direction.SAVE: ({6}, PAGE)}
    assert [gap.reason for gap in records(WatchReport)[-1].gaps] == [WatchGap.OTHER_THREAD]


def test_a_mask_is_counted_whole_and_said(during, moved, records):
    during(lambda view: view[2].masked_fill_(torch.zeros(WIDTH, dtype=torch.bool), 1.0))
    assert moved() == {Direction.LOAD: ({2}, PAGE)}
    assert [gap.reason for gap in records(WatchReport)[-1].gaps] == [WatchGap.UNKNOWN_EXTENT]


@pytest.mark.parametrize(
    "do",
    [
        lambda v: v[-1].clone(),
        lambda v: v[torch.tensor([-1])],
        lambda v: v.select(0, -1).clone(),
        lambda v: v.__setitem__(-1, host(LAYERS, 2, WIDTH)),
    ],
)
def test_an_index_of_minus_one_is_the_last_page_and_is_flagged(during, moved, records, do):
    during(do)
    assert list(moved().values()) == [({SLOTS - 1}, PAGE)]
    assert records(WatchReport)[-1].last_slots == [(0, SLOTS - 1, 1)]


def test_the_last_page_by_its_number_is_not_flagged(during, records):
    during(lambda view: (view[SLOTS - 1].clone(), view[0][-1].clone()))
    assert records(WatchReport)[-1].last_slots == []


def test_a_per_layer_hook_is_counted_with_the_next_callback(pool, records):
    class Layerwise(Doing):
        def save_kv_layer(self, layer_idx, stream):
            self.caches[1, layer_idx].clone()

    worker = tracekv.trace(Layerwise)(None)
    worker.register_kv_caches(pool)
    worker.do = lambda view: None
    worker.start_load_kv(None)
    for layer in range(LAYERS):
        worker.save_kv_layer(layer, None)
    worker.wait_for_save(None)
    (saved,) = records(Transfer)
    assert (saved.pages, saved.nbytes) == ([1], PAGE)
    assert records(WatchReport)[-1].is_complete


def test_a_watch_that_fails_is_removed_and_the_engine_goes_on(during, monkeypatch, records):
    def broken(*_):
        raise LookupError("ours")

    monkeypatch.setattr(watch_views, "moved_by", broken)
    copied = during(lambda view: view[1].clone())
    assert copied.shape == (LAYERS, 2, WIDTH)
    assert [fault.instrument for fault in records(TracerFault)] == ["watch"]
    assert not records(WatchReport)[-1].is_complete
    monkeypatch.undo()
    assert during(lambda view: view[1].clone()).shape == (LAYERS, 2, WIDTH)
    assert records(Transfer) == []


def test_an_operation_on_other_memory_is_none_of_the_watchs():
    extents = extents_of(layout_of_tensor(torch.zeros(2, 1, 2, 4)))
    elsewhere = torch.zeros(3)
    assert watch_ops.moved_by(extents, torch.ops.aten.clone.default, (elsewhere,), {}, elsewhere.clone()) is None
