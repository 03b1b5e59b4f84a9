"""Passes that run as a replayed graph, and requests that nobody asked for (contract.md section 4.4; contract-v2.md 1.2, 5)."""

from __future__ import annotations

import pytest

from tests.harness.memory_connector import memory_pair
from tests.harness.recording import Recorder, recording_pair
from tests.harness.test_device_reuse import MODES, serve, tokens
from tests.harness.test_overlap import alone, finishes
from tests.harness.test_page_rules import Offering, cache_of
from tracekv.harness import Executor
from tracekv.harness.requests import Batch, Request, RequestState

HOOKS = ("wait_for_layer_load", "save_kv_layer")


@pytest.mark.parametrize("overlap", [False, True])
def test_a_replayed_graph_runs_no_layer_hook_and_everything_else(overlap, model):
    ran = []
    recorder = Recorder()
    scheduler, worker = recording_pair(recorder)
    worker = type("Worker", (worker,), {"register_forward_pass_callable": lambda self: lambda: ran.append(1)})
    executor = Executor(model("llama"), scheduler, worker, graph_replay=True, overlap=overlap, chunk_tokens=32)
    recorder.calls.clear()
    executor.submit(tokens(60), 6)
    executor.run()
    assert executor.passes == 7
    for hook in HOOKS:
        assert len(recorder.of(hook)) == 2 * 2  # two chunks, two layers; five passes have none
    assert len(ran) == 1 + 7  # the warm-up too
    assert len(recorder.of("start_load_kv")) == len(recorder.of("wait_for_save")) == 7


def test_a_pass_with_prefill_in_it_is_eager(model):
    recorder = Recorder()
    executor = Executor(model("llama"), *recording_pair(recorder), graph_replay=True)
    executor.submit(tokens(60), 6)
    executor.step()
    executor.step()
    recorder.calls.clear()
    executor.submit(tokens(50, 9), 1)
    executor.step()
    assert len(recorder.of("save_kv_layer")) == 2


@pytest.mark.parametrize(("preset", "mode"), MODES)
def test_graph_replay_changes_no_token(preset, mode, model):
    executor = Executor(model(preset), *memory_pair({}), mode=mode, graph_replay=True)
    assert serve(executor, tokens(100), new=6)[0].output_tokens == alone(model(preset), tokens(100), 6, mode=mode)


@pytest.mark.parametrize("mode", ["v1", "v2"])
def test_a_dummy_is_not_asked_about_but_told_of(mode, model):
    """Only the callers of the manager filter dummies, and only in the query (golden k.dummy_tp)."""
    recorder = Recorder()
    executor = Executor(model("llama"), *recording_pair(recorder, ("flat",)), mode=mode)
    recorder.calls.clear()
    executor.submit(tokens(40), 1, is_dummy=True)
    executor.run()
    assert recorder.of("get_num_new_matched_tokens") == []
    assert len(recorder.of("update_state_after_alloc")) == 1
    assert len(recorder.reports()) == 1
    assert len(finishes(recorder)) == 1


def _dummy(request):
    request.is_dummy_request = True


def _generation_only(request):
    request.is_generation_only_request = lambda: True


def _disagg_generation_init(request):
    request.state = RequestState.DISAGG_GENERATION_INIT


@pytest.mark.parametrize("make", [_dummy, _generation_only, _disagg_generation_init])
def test_excluded_kinds_have_no_query_and_one_alloc(make):
    """contract-v2.md section 8, stub prefix tests."""
    cache, manager = cache_of(8, None), Offering(64)
    request = Request(1, list(range(96)), 1)
    make(request)
    request.context_chunk_size = cache.schedule_context(request, 96)
    for _ in range(2):
        cache.prepare_resources(Batch(last_chunk=[request]), manager)
    assert manager.committed == []
    assert len(manager.allocated) == 1
