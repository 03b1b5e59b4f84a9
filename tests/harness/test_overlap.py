"""The overlap loop: tokens, finishes and cancellations are known one pass late (contract-v2.md sections 1.1 and 4)."""

from __future__ import annotations

import pytest

from tests.harness.memory_connector import memory_pair
from tests.harness.recording import Recorder, recording_pair
from tests.harness.test_device_reuse import MODES, serve, tokens
from tracekv.harness import Executor

BLOCK = 32


def alone(model, prompt, new, **options):
    return serve(Executor(model, **options), prompt, new=new)[0].output_tokens


@pytest.mark.parametrize("chunk", [None, 64])
@pytest.mark.parametrize(("preset", "mode"), MODES)
def test_the_overlap_loop_gives_the_tokens_of_the_other_one(preset, mode, chunk, model):
    prompts = [tokens(150, 1), tokens(33, 2), tokens(64, 3)]
    executor = Executor(model(preset), *memory_pair({}), mode=mode, chunk_tokens=chunk, overlap=True)
    requests = serve(executor, *prompts, new=40)
    assert [r.output_tokens for r in requests] == [alone(model(preset), p, 40, mode=mode) for p in prompts]
    assert len(executor.cache.unheld(0)) == executor.cache.num_blocks


@pytest.mark.parametrize(("preset", "mode"), MODES)
def test_what_the_overlap_loop_saved_it_loads(preset, mode, model):
    store = {}
    cold = serve(Executor(model(preset), *memory_pair(store), mode=mode, overlap=True), tokens(500), new=6)[0]
    warm = serve(Executor(model(preset), *memory_pair(store), mode=mode, overlap=True), tokens(500), new=6)[0]
    assert warm.honoured_tokens == 480
    assert warm.output_tokens == cold.output_tokens


def driven(model, mode, prompt, new, *, forms=("flat", "grouped"), **more):
    answers = {name: more.pop(name) for name in list(more) if name in ("request_finished", "get_finished")}
    answers["request_finished_by_layer_group"] = list(answers.get("request_finished", []))
    recorder = Recorder(answers)
    executor = Executor(model, *recording_pair(recorder, forms), mode=mode, overlap=True)
    recorder.calls.clear()
    request = executor.submit(prompt, new, **more)
    return recorder, executor, request


def finishes(recorder):
    return recorder.of("request_finished") + recorder.of("request_finished_by_layer_group")


@pytest.mark.parametrize("mode", ["v1", "v2"])
def test_tokens_lag_by_one(mode, model):
    recorder, executor, _ = driven(model("llama"), mode, tokens(20), 5)
    executor.run()
    reports = [report for _, report in recorder.reports()]
    assert [report["computed_position"] for report in reports] == [0, 19, 20, 21, 22]
    assert [len(report["new_tokens"]) for report in reports] == [20, 0, 1, 1, 1]


@pytest.mark.parametrize("mode", ["v1", "v2"])
def test_a_finish_is_announced_behind_the_next_pass(mode, model):
    recorder, executor, request = driven(model("llama"), mode, tokens(20), 2)
    executor.step()
    executor.step()
    assert request.output_tokens[1:] == []
    assert finishes(recorder) == []
    assert executor.step() is False
    assert [call["m"] for call in recorder.calls[-2:]] == [finishes(recorder)[0]["m"], "get_finished"]
    assert not executor.has_work


@pytest.mark.parametrize("mode", ["v1", "v2"])
def test_a_length_stop_is_announced_once(mode, model):
    recorder, executor, _ = driven(model("llama"), mode, tokens(20), 4)
    executor.run()
    assert len(finishes(recorder)) == 1


def stopping(model, mode, **more):
    """A run that its third token ends, though more were asked for."""
    expected = alone(model, tokens(20), 10, mode=mode)
    assert expected[2] not in expected[:2]
    return expected[:3], driven(model, mode, tokens(20), 10, stop_tokens=[expected[2]], **more)


def test_a_late_stop_is_announced_twice_on_v2_and_once_on_v1(model):
    expected, (recorder, executor, request) = stopping(model("llama"), "v2")
    executor.run()
    assert request.output_tokens == expected
    assert [call["args"][1] == [[]] for call in finishes(recorder)] == [False, True]
    assert len(recorder.of("start_load_kv")) == 4  # one more than there are tokens

    expected, (recorder, executor, request) = stopping(model("llama"), "v1")
    executor.run()
    assert request.output_tokens == expected
    assert [call["args"][1] for call in finishes(recorder)] != [[]]
    assert len(finishes(recorder)) == 1


def test_the_second_announcement_has_the_pages_while_they_are_being_saved(model):
    _, (recorder, executor, _) = stopping(model("llama"), "v2", request_finished=[True, False])
    for _ in range(5):
        executor.step()
    first, second = finishes(recorder)
    assert first["args"] == second["args"]
    assert len(first["args"][1][0]) == 1
    recorder.answers["get_finished"].append(([1], []))
    executor.run()
    assert len(executor.cache.unheld(0)) == executor.cache.num_blocks


def test_a_second_yes_announces_the_id_again(model):
    _, (recorder, executor, _) = stopping(model("llama"), "v2", request_finished=[True, True])
    for _ in range(6):
        executor.step()
    assert [call["args"][0] for call in recorder.of("get_finished") if call["args"][0]] == [[1], [1]]


def test_without_the_overlap_loop_a_stop_is_announced_once(model):
    expected = alone(model("llama"), tokens(20), 10)
    recorder = Recorder()
    executor = Executor(model("llama"), *recording_pair(recorder), stop_tokens=[expected[2]])
    (request,) = serve(executor, tokens(20), new=10)
    assert request.output_tokens == expected[:3]
    assert len(finishes(recorder)) == 1


def test_a_failed_forward_leaves_the_loop_running(model):
    recorder, executor, request = driven(model("llama"), "v2", tokens(40), 5)
    executor.step()
    recorder.answers["wait_for_save"].append(OSError("planted"))
    executor.run()
    assert str(request.error) == "planted"
    assert len(executor.cache.unheld(0)) == executor.cache.num_blocks
    after = serve(executor, tokens(40), new=5)[0]
    assert after.output_tokens == alone(model("llama"), tokens(40), 5)
