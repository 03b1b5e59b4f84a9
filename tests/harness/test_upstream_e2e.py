"""Given / when / then of TensorRT-LLM's own end-to-end connector tests (contract-v2.md section 8), named as there.

Refusals are in test_refusals, asking for replays and partial honour in test_replay and test_partial_honour. What is not here:
the disaggregated prefill (there is no transceiver), and constructing the runtime's own managers.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import transformers

from tests.harness.recording import Recorder, recording_pair
from tests.harness.test_device_reuse import tokens
from tracekv.harness import Executor

BLOCK = 32
LOOPS = pytest.mark.parametrize("overlap", [False, True], ids=["no overlap", "overlap"])


def run(
    model,
    prompt_length,
    new,
    *,
    mode,
    offered=0,
    chunk=None,
    forms=("flat", "grouped"),
    is_async=False,
    overlap=False,
    **answers,
):
    recorder = Recorder({"get_num_new_matched_tokens": [(offered, is_async)], **answers})
    executor = Executor(model, *recording_pair(recorder, forms), mode=mode, chunk_tokens=chunk, overlap=overlap)
    recorder.calls.clear()
    request = executor.submit(tokens(prompt_length), new)
    executor.run()
    assert request.error is None
    return recorder, executor, request


def alloc(recorder):
    (call,) = recorder.of("update_state_after_alloc") + recorder.of("update_state_after_alloc_by_layer_group")
    return call["args"][1]


def flat(lists):
    """The only layer group's list, whichever form was called."""
    return lists[0] if lists and isinstance(lists[0], list) else lists


def finished(recorder):
    (call,) = recorder.of("request_finished") + recorder.of("request_finished_by_layer_group")
    return call["args"][1]


@LOOPS
@pytest.mark.parametrize("mode", ["v1", "v2"])
def test_simple(mode, overlap, model):
    recorder, executor, _ = run(model("llama"), 20, 8, mode=mode, overlap=overlap)
    assert len(flat(alloc(recorder))) == 1
    outputs = [call["args"][0] for call in recorder.of("build_connector_meta")]
    assert [(len(o["new_requests"]), len(o["cached_requests"])) for o in outputs] == [(1, 0), *[(0, 1)] * 7]
    delta = [len(report["new_tokens"]) for is_new, report in recorder.reports() if not is_new]
    assert delta == [0 if overlap else 1, *[1] * 6]
    for method, count in {
        "start_load_kv": 8,
        "wait_for_save": 8,
        "get_num_new_matched_tokens": 1,
        "get_finished": 8 + overlap,
    }.items():
        assert len(recorder.of(method)) == count
        assert executor.calls[("scheduler." if "matched" in method else "worker.") + method] == count
    for hook in ("wait_for_layer_load", "save_kv_layer"):
        assert [call["args"] for call in recorder.of(hook)] == [[0, "stream"], [1, "stream"]] * 8
    order = [call["m"] for call in recorder.calls if call["m"] in ("wait_for_layer_load", "save_kv_layer")]
    assert order == ["wait_for_layer_load", "save_kv_layer"] * 16
    assert len(flat(finished(recorder))) == 1


@LOOPS
@pytest.mark.parametrize("mode", ["v1", "v2"])
def test_async_onboard(mode, overlap, model):
    recorder, _, request = run(
        model("llama"), 20, 8, mode=mode, offered=16, is_async=True, overlap=overlap, get_finished=[([], [1])]
    )
    assert [call["args"] for call in recorder.of("get_finished")] == [[[], [1]], *[[[], []]] * (8 + overlap)]
    assert len(request.output_tokens) == 8
    assert recorder.of("build_connector_meta")[0]["args"][0]["new_requests"] == []
    assert recorder.reports()[0][1]["computed_position"] == 16


@LOOPS
@pytest.mark.parametrize("mode", ["v1", "v2"])
def test_async_save(mode, overlap, model):
    recorder, executor, _ = run(
        model("llama"), 20, 8, mode=mode, forms=("flat",), overlap=overlap, request_finished=[True],
        get_finished=[*[([], [])] * (7 + overlap), ([1], [])],
    )  # fmt: skip
    assert [call["args"] for call in recorder.of("get_finished")] == [*[[[], []]] * (7 + overlap), [[1], []]]
    assert len(flat(finished(recorder))) == 1
    assert len(executor.cache.unheld(0)) == executor.cache.num_blocks


def test_pages_under_an_asynchronous_save_stay_held(model):
    recorder = Recorder({"request_finished": [True]})
    executor = Executor(model("llama"), *recording_pair(recorder, ("flat",)), mode="v1")
    executor.submit(tokens(100), 1)
    executor.step()
    held = executor.cache.num_blocks - len(executor.cache.unheld(0))
    executor.step()
    assert held == 4 == executor.cache.num_blocks - len(executor.cache.unheld(0))
    recorder.answers["get_finished"].append(([1], []))
    executor.run()
    assert len(executor.cache.unheld(0)) == executor.cache.num_blocks


@LOOPS
@pytest.mark.parametrize("mode", ["v1", "v2"])
def test_scheduler_output(mode, overlap, model):
    recorder, executor, _ = run(model("llama"), 48, 32, mode=mode, overlap=overlap)
    assert len(flat(alloc(recorder))) == 2
    reports = recorder.reports()
    assert len(reports) == 32
    assert (reports[0][1]["computed_position"], reports[0][1]["num_scheduled_tokens"]) == (0, 48)
    for number, (_, report) in enumerate(reports[1:]):
        assert len(report["new_tokens"]) == (0 if overlap and number == 0 else 1)
        assert report["num_scheduled_tokens"] == 1
        assert len(report["new_block_ids"]) == ((report["computed_position"] + overlap) % BLOCK == 0)
    assert len(flat(finished(recorder))) == 3

    recorder.answers["get_num_new_matched_tokens"].append((8, False))
    recorder.calls.clear()
    executor.submit(tokens(48, seed=8), 1)
    executor.run()
    assert recorder.reports()[0][1]["computed_position"] == 0


@LOOPS
@pytest.mark.parametrize("mode", ["v1", "v2"])
def test_chunked_context(mode, overlap, model):
    recorder, _, _ = run(model("llama"), 256, 32, mode=mode, chunk=128, overlap=overlap)
    assert len(flat(alloc(recorder))) == {"v1": 8, "v2": 4}[mode]
    (is_new, first), (second_new, second) = recorder.reports()[:2]
    assert (is_new, first["computed_position"], first["num_scheduled_tokens"], len(first["new_tokens"])) == (
        True,
        0,
        128,
        256,
    )
    assert (second_new, second["computed_position"], second["num_scheduled_tokens"]) == (False, 128, 128)
    assert second["new_tokens"] == []
    assert len(second["new_block_ids"]) == {"v1": 0, "v2": 4}[mode]
    assert len(flat(finished(recorder))) == 9


@pytest.mark.parametrize("mode", ["v1", "v2"])
def test_prefix_is_asked_once(mode, model):
    recorder, _, request = run(model("llama"), 256, 4, mode=mode, offered=64)
    methods = [call["m"] for call in recorder.calls]
    (query,) = recorder.of("get_num_new_matched_tokens")
    assert query["args"] == [{"req": 1}, 0]
    assert methods.index("get_num_new_matched_tokens") < methods.index("build_connector_meta")
    report = recorder.reports()[0][1]
    assert (report["computed_position"], report["num_scheduled_tokens"]) == (0, 192)
    assert request.honoured_tokens == request.py_num_connector_matched_tokens == 64


@LOOPS
@pytest.mark.parametrize("mode", ["v1", "v2"])
@pytest.mark.parametrize("offered", [64, 192])
def test_prefix_under_chunked_prefill(mode, offered, overlap, model):
    recorder, _, _ = run(model("llama"), 256, 4, mode=mode, offered=offered, chunk=128, overlap=overlap)
    assert [call["args"][1] for call in recorder.of("get_num_new_matched_tokens")] == [0]
    reports = [report for _, report in recorder.reports() if report["num_scheduled_tokens"] > 1]
    sizes = [report["num_scheduled_tokens"] for report in reports]
    assert max(sizes) <= 128
    assert sum(sizes) == 256 - offered
    assert reports[0]["computed_position"] == 0
    for before, after, begin in zip(reports, reports[1:], [offered, None], strict=False):
        start = before["computed_position"] if begin is None else begin
        assert after["computed_position"] == start + before["num_scheduled_tokens"]
    assert len(flat(finished(recorder))) >= 8


@pytest.mark.parametrize(
    ("mode", "offered", "chunks"),
    [("v1", 64, [(0, 128), (192, 64)]), ("v2", 64, [(0, 64), (128, 128)]), ("v2", 192, [(0, 64)])],
)
def test_chunks_after_a_served_prefix_differ_by_cache_manager(mode, offered, chunks, model):
    """contract-v2.md section 7, "chunk after a served prefix"."""
    recorder, _, _ = run(model("llama"), 256, 1, mode=mode, offered=offered, chunk=128)
    assert [(r["computed_position"], r["num_scheduled_tokens"]) for _, r in recorder.reports()] == chunks


def test_uniform_sliding_window():
    recorder, executor, _ = run(_uniform(), 256, 4, mode="v2")
    (group,) = executor.cache.layout().groups
    assert group.window_size == 64
    report = recorder.reports()[0][1]
    assert [report["new_block_ids"]] == report["new_block_ids_by_layer_group"]
    assert report["num_scheduled_tokens"] == 256


def test_sliding_window_prefix_backed_by_real_pages():
    recorder, _, _ = run(_uniform(), 256, 4, mode="v2", offered=128)
    (listed,) = alloc(recorder)
    report = recorder.reports()[0][1]
    assert listed == report["new_block_ids"]
    assert len(listed) == 8
    assert listed[:2] == [-1, -1]
    assert len(set(listed[2:])) == 6
    assert min(listed[2:]) >= 0
    assert (report["computed_position"], report["num_scheduled_tokens"]) == (0, 128)


def _uniform():
    """All layers under one window of 64."""
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=1000, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=1024, sliding_window=64, eos_token_id=None,
    )  # fmt: skip
    return transformers.MistralForCausalLM(config).eval()


def test_vswa_reports_page_indices(model):
    driven = model("gemma3", sliding_window=64)
    with pytest.raises(NotImplementedError, match="VSWA"):
        run(driven, 256, 4, mode="v1")
    recorder, executor, _ = run(driven, 256, 4, mode="v2", forms=("grouped",))
    assert {group.window_size for group in executor.cache.layout().groups} == {64, None}
    lists = alloc(recorder)
    assert len(recorder.of("update_state_after_alloc_by_layer_group")) == 1
    assert all(report["new_block_ids"] == [] for _, report in recorder.reports())
    assert len(lists[0]) == len(lists[1]) == 8
    assert recorder.of("request_finished") == []
    sliding, full = finished(recorder)
    live = [sum(slot >= 0 for slot in slots) for slots in (sliding, full)]
    assert live[0] <= 3 < live[1]


@LOOPS
def test_vswa_out_of_window_blocks(overlap, model):
    driven = model("gemma3", sliding_window=64)
    recorder, _, request = run(driven, 82, 64, mode="v2", forms=("grouped",), overlap=overlap)
    sliding, full = finished(recorder)
    live = [slot for slot in sliding if slot >= 0]
    # h = P + N - 2 = 144, so floor((144 + 1 - 64) / 32) = 2 blocks have left the window.
    assert [slot < 0 for slot in sliding] == [True, True, *[False] * (len(sliding) - 2)]
    assert min(full) >= 0
    assert len(sliding) == len(full)
    assert len(live) == len(set(live)) <= 3
    alone = Executor(driven)
    bare = alone.submit(tokens(82), 64)
    alone.run()
    assert request.output_tokens == bare.output_tokens


def retaining(model, mode, config):
    recorder = Recorder()
    executor = Executor(model, *recording_pair(recorder), mode=mode)
    executor.submit(tokens(100), 33, kv_cache_retention_config=config)
    executor.run()
    return [report["priorities"] for _, report in recorder.reports()]


def test_priorities(model, caplog):
    ranges = [SimpleNamespace(token_start=0, token_end=64, priority=90)]
    config = SimpleNamespace(token_range_retention_configs=ranges, decode_retention_priority=10)
    # The next block that holds prompt tokens is 3, the first of generated tokens alone is 4.
    v1 = retaining(model("llama"), "v1", config)
    assert [priorities for priorities in v1 if priorities] == [[90, 90, 35, 35], [10]]
    assert v1.count([]) == 31
    assert not caplog.records
    assert set(retaining(model("llama"), "v2", config)) == {None}
    assert [entry.getMessage()[:37] for entry in caplog.records] == ["KvCacheRetentionConfig has no effect "]
    for mode in ("v1", "v2"):
        assert set(retaining(model("llama"), mode, None)) == {None}


def test_v1_aborts_on_an_offer_of_the_whole_prompt_and_v2_clamps_it(model):
    with pytest.raises(RuntimeError, match="leave none of the 96 prompt tokens"):
        run(model("llama"), 96, 1, mode="v1", offered=96)
    recorder, _, request = run(model("llama"), 96, 1, mode="v2", offered=96)
    assert request.honoured_tokens == 95
    assert recorder.reports()[0][1]["num_scheduled_tokens"] == 1


def test_two_new_requests_are_asked_in_the_order_of_their_cache_manager(model):
    for mode, expected in {"v1": ["Q1", "Q2", "A1", "A2"], "v2": ["Q1", "A1", "Q2", "A2"]}.items():
        recorder = Recorder()
        executor = Executor(model("llama"), *recording_pair(recorder, ("flat",)), mode=mode)
        for seed in (1, 2):
            executor.submit(tokens(64, seed), 1)
        executor.run()
        calls = [
            call for call in recorder.calls if call["m"] in ("get_num_new_matched_tokens", "update_state_after_alloc")
        ]
        assert [("Q" if "matched" in c["m"] else "A") + str(c["args"][0]["req"]) for c in calls] == expected


def test_generation_comes_first_and_shares_the_budget(model):
    recorder = Recorder()
    executor = Executor(model("llama"), *recording_pair(recorder), max_batch_tokens=64, chunk_tokens=64)
    executor.submit(tokens(60, 1), 6)
    executor.step()
    executor.submit(tokens(128, 2), 1)
    executor.step()
    output = recorder.of("build_connector_meta")[-1]["args"][0]
    assert [report["num_scheduled_tokens"] for report in output["cached_requests"]] == [1]
    assert [report["num_scheduled_tokens"] for report in output["new_requests"]] == [32]


def test_idle_passes_poll_the_worker_and_nothing_else(model):
    recorder = Recorder()
    executor = Executor(model("llama"), *recording_pair(recorder))
    recorder.calls.clear()
    assert executor.step() is False
    assert [call["m"] for call in recorder.calls] == ["get_finished"]
