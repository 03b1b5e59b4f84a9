from __future__ import annotations

import threading

import pytest

from tests.harness.memory_connector import memory_pair
from tests.harness.recording import Recorder, recording_pair
from tests.harness.test_device_reuse import tokens
from tracekv.contract import Runtime, current_runtime, use_runtime
from tracekv.harness import Executor


def noting_pair(notes, *, forward=None):
    scheduler, worker = memory_pair({})

    class Scheduler(scheduler):
        def __init__(self, llm_args):
            super().__init__(llm_args)
            notes.append(("scheduler", threading.current_thread() is threading.main_thread(), llm_args))

        def wait_for_initialization(self):
            notes.append("wait_for_initialization")

        def shutdown(self):
            notes.append("scheduler.shutdown")

    class Worker(worker):
        def __init__(self, llm_args):
            super().__init__(llm_args)
            notes.append(("worker", threading.current_thread() is threading.main_thread(), llm_args))

        def register_forward_pass_callable(self):
            notes.append("register_forward_pass_callable")
            return forward

        def register_kv_caches(self, kv_cache_tensor):
            notes.append("register_kv_caches")
            super().register_kv_caches(kv_cache_tensor)

    return Scheduler, Worker


def test_bring_up_has_the_order_of_the_runtime(model):
    notes = []
    scheduler, worker = noting_pair(notes, forward=lambda: notes.append("forward"))
    executor = Executor(model("llama"), scheduler, worker, mode="v1", tokens_per_block=32)
    constructed = sorted(notes[:2], key=lambda note: note[0])
    assert [(side, on_main) for side, on_main, _ in constructed] == [("scheduler", False), ("worker", False)]
    assert notes[2:] == ["register_forward_pass_callable", "forward", "register_kv_caches", "wait_for_initialization"]
    llm_args = constructed[0][2]
    assert llm_args is constructed[1][2]
    assert llm_args.kv_cache_config.tokens_per_block == 32
    assert llm_args.kv_connector_config is None

    executor.submit(tokens(40), 3)
    executor.run()
    executor.shutdown()
    assert notes.count("forward") == 1 + executor.passes == 4
    assert executor.calls["worker.forward_pass_callable"] == 4
    assert executor.calls["scheduler.shutdown"] == 1
    assert "worker.shutdown" not in executor.calls


def test_the_v1_tensor_is_indexed_by_block_layer_and_role(model):
    seen = {}
    scheduler, worker = memory_pair({})
    taking = type("Taking", (worker,), {"register_kv_caches": lambda self, tensor: seen.update(tensor=tensor)})
    executor = Executor(model("llama"), scheduler, taking, mode="v1", num_blocks=10)
    assert seen["tensor"].shape == (10, 2, 2, 2 * 32 * 32)
    assert seen["tensor"].data_ptr() == executor.cache.pools[0].kv.data_ptr()


def test_the_v2_layout_has_one_region_per_group_and_covers_every_layer_once(model):
    executor = Executor(model("gemma3", num_hidden_layers=4))
    layout = executor.cache.layout()
    assert [(group.layer_group_id, group.window_size, group.layer_ids) for group in layout.groups] == [
        (0, 128, (0, 2)),
        (1, None, (1, 3)),
    ]
    for group, pool in zip(layout.groups, executor.cache.pools, strict=True):
        (region,) = group.regions
        assert region.buffers == tuple((layer, role, 1) for layer in group.layer_ids for role in ("key", "value"))
        assert region.size == region.stride == group.bytes_per_page == 2 * 2 * 2 * 32 * 32 * 4
        region.slot_tensor(3, layout.dtype).fill_(7.5)
        assert (pool.tensor[3] == 7.5).all()
        assert not (pool.tensor[4] == 7.5).any()
        with pytest.raises(IndexError):
            region.slot_tensor(-1)


def test_a_single_group_layout_folds_to_the_v1_tensor_in_the_base_class(model):
    class Folding(recording_pair(Recorder(), ("flat",))[1]):
        def register_kv_caches(self, kv_cache_tensor):
            self.tensor = kv_cache_tensor

    scheduler = recording_pair(Recorder(), ("flat",))[0]
    executor = Executor(model("llama"), scheduler, Folding, mode="v2", num_blocks=9)
    assert executor.worker.tensor.shape == (9, 2, 2, 2048)
    assert executor.worker.tensor.data_ptr() == executor.cache.pools[0].kv.data_ptr()
    assert executor.calls["worker.register_kv_cache_layout"] == 1


def test_a_flat_only_connector_is_refused_on_two_layer_groups(model):
    scheduler, worker = recording_pair(Recorder(), ("flat",))
    with pytest.raises(NotImplementedError, match="request_finished_by_layer_group"):
        Executor(model("gemma3"), scheduler, worker, mode="v2")
    scheduler = recording_pair(Recorder(), ("grouped",))[0]
    with pytest.raises(NotImplementedError, match="register_kv_cache_layout"):
        Executor(model("gemma3"), scheduler, worker, mode="v2")


def test_v2_without_block_reuse_is_refused_and_v1_discards_the_offer(model):
    with pytest.raises(NotImplementedError, match="block reuse disabled"):
        Executor(model("llama"), *memory_pair({}), mode="v2", block_reuse=False)
    recorder = Recorder({"get_num_new_matched_tokens": [(64, False)]})
    executor = Executor(model("llama"), *recording_pair(recorder), mode="v1", block_reuse=False)
    executor.submit(tokens(100), 1)
    executor.run()
    report = recorder.reports()[0][1]
    assert (report["computed_position"], report["num_scheduled_tokens"]) == (-64, 100)


def test_a_constructor_that_raises_stops_the_bring_up(model):
    scheduler, _ = memory_pair({})

    def broken(llm_args):
        raise ValueError("no store")

    with pytest.raises(ValueError, match="no store"):
        Executor(model("llama"), scheduler, broken)


def test_half_a_connector_is_refused(model):
    with pytest.raises(ValueError, match="a pair"):
        Executor(model("llama"), memory_pair({})[0])


def test_the_harness_says_that_it_is_one_rank_where_nobody_knows(model, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    Executor(model("llama"), *memory_pair({}))
    assert (current_runtime().rank, current_runtime().world) == (0, 1)


def test_a_runtime_that_was_set_stays(model):
    mine = Runtime(rank=0, world=1, host="elsewhere")
    use_runtime(mine)
    Executor(model("llama"), *memory_pair({}))
    assert current_runtime() is mine


@pytest.mark.parametrize(
    ("prompt", "new", "message"),
    [([], 1, "at least one"), ([1], 0, "at least one"), ([5000], 1, "vocabulary"), ([1] * 9000, 1, "positions")],
)
def test_a_request_that_makes_no_sense_is_refused(prompt, new, message, model):
    with pytest.raises(ValueError, match=message):
        Executor(model("llama")).submit(prompt, new)


def test_a_request_larger_than_the_pool_is_refused_by_name_of_the_setting(model):
    with pytest.raises(ValueError, match="num_blocks"):
        Executor(model("llama"), num_blocks=2).submit(tokens(100), 1)


def test_requests_wait_until_their_last_page_is_certain(model):
    executor = Executor(model("llama"), num_blocks=8)
    requests = [executor.submit(tokens(60, seed), 40) for seed in range(4)]
    executor.run()
    alone = Executor(model("llama"))
    expected = [alone.submit(tokens(60, seed), 40) for seed in range(4)]
    alone.run()
    assert [request.output_tokens for request in requests] == [request.output_tokens for request in expected]


@pytest.mark.parametrize("method", ["wait_for_layer_load", "save_kv_layer", "wait_for_save"])
def test_an_exception_inside_the_forward_fails_the_active_requests_and_the_loop_goes_on(method, model):
    """contract.md section 1.5."""
    recorder = Recorder()
    scheduler, worker = recording_pair(recorder)
    planted = OSError("planted")

    def fail(self, *args):
        raise planted

    executor = Executor(model("llama"), scheduler, type("Failing", (worker,), {method: fail}))
    request = executor.submit(tokens(40), 3)
    executor.run()
    assert request.error is planted
    assert recorder.of("request_finished_by_layer_group") == []
    assert len(executor.cache.unheld(0)) == executor.cache.num_blocks
    executor.worker.__class__ = worker
    after = executor.submit(tokens(40), 3)
    executor.run()
    assert after.error is None
    assert len(after.output_tokens) == 3


@pytest.mark.parametrize(
    "method", ["get_num_new_matched_tokens", "build_connector_meta", "start_load_kv", "get_finished"]
)
def test_an_exception_elsewhere_comes_out_of_the_loop(method, model):
    planted = OSError("planted")

    def fail(self, *args):
        raise planted

    pair = [
        type(cls.__name__, (cls,), {method: fail} if hasattr(cls, method) else {}) for cls in recording_pair(Recorder())
    ]
    executor = Executor(model("llama"), *pair)
    executor.submit(tokens(40), 3)
    with pytest.raises(OSError, match="planted") as raised:
        executor.run()
    assert raised.value is planted


def test_what_a_hook_copies_can_be_written_to_later(model):
    """Hooks run inside the forward; their tensors are ordinary ones."""
    copies = []
    scheduler, worker = memory_pair({})

    class Copying(worker):
        def save_kv_layer(self, layer_idx, stream):
            copies.append(self.page(0, 0).clone())

        def wait_for_save(self, stream):
            copies[-1].fill_(0)
            stream.record_event().synchronize()

    executor = Executor(model("llama"), scheduler, Copying)
    request = executor.submit(tokens(40), 2)
    executor.run()
    assert request.error is None
    assert len(copies) == 4


def test_layer_hooks_stand_before_and_behind_their_layer(model):
    written = {"before": [], "behind": []}
    scheduler, worker = memory_pair({})

    class Looking(worker):
        def look(self, when, layer_idx):
            slot = executor.cache.slots(request)[0][0]
            layers = self.page(0, slot).view(2, -1)
            written[when].append(bool(layers[layer_idx].any()))

        def wait_for_layer_load(self, layer_idx, stream):
            self.look("before", layer_idx)

        def save_kv_layer(self, layer_idx, stream):
            self.look("behind", layer_idx)

    executor = Executor(model("llama"), scheduler, Looking)
    executor.cache.pools[0].tensor.zero_()
    request = executor.submit(tokens(20), 1)
    executor.run()
    assert written == {"before": [False, False], "behind": [True, True]}
