"""Replay after a destroyed allocation, memory pressure, suspension (contract-v2.md sections 1.4 and 11, point 1)."""

from __future__ import annotations

import pytest

from tests.harness.memory_connector import memory_pair
from tests.harness.recording import Recorder, recording_pair
from tests.harness.test_device_reuse import serve, tokens
from tests.harness.test_overlap import alone, finishes
from tracekv.harness import Executor

LOOPS = pytest.mark.parametrize("overlap", [False, True])


def recorded(model, answers=None, **options):
    recorder = Recorder(answers)
    executor = Executor(model, *recording_pair(recorder, ("flat",)), **options)
    recorder.calls.clear()
    return recorder, executor


def told(recorder):
    """``(is new, position, tokens reported)`` of each report."""
    return [(is_new, r["computed_position"], len(r["new_tokens"])) for is_new, r in recorder.reports()]


def test_a_replay_is_new_again_and_asked_again(model):
    """free -> reset_request_state once, then asked again; golden i1 has the same run."""
    recorder, executor = recorded(model("llama"))
    request = executor.submit(tokens(96), 6)
    for _ in range(3):
        executor.step()
    recorder.calls.clear()
    executor.destroy(request, forget=True)
    assert recorder.calls == []  # nobody tells the connector
    executor.step()
    assert [call["args"][1] for call in recorder.of("get_num_new_matched_tokens")] == [0]
    assert len(recorder.of("update_state_after_alloc")) == 1
    ((is_new, report),) = recorder.reports()
    assert is_new
    assert report["new_tokens"] == request.get_tokens(0)[:99]
    assert len(report["new_block_ids"]) == 4
    executor.run()
    assert request.replays == 1
    assert request.output_tokens == alone(model("llama"), tokens(96), 6)
    assert len(finishes(recorder)) == 1


def test_what_the_device_still_knows_is_computed_already(model):
    recorder, executor = recorded(model("llama"))
    request = executor.submit(tokens(96), 6)
    for _ in range(3):
        executor.step()
    executor.destroy(request)
    executor.run()
    assert [call["args"][1] for call in recorder.of("get_num_new_matched_tokens")] == [0, 96]
    assert request.output_tokens == alone(model("llama"), tokens(96), 6)


@LOOPS
@pytest.mark.parametrize("passes", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("preset", ["llama", "gemma3"])
def test_a_replay_changes_no_token(preset, passes, overlap, model):
    executor = Executor(model(preset), *memory_pair({}), chunk_tokens=64, overlap=overlap)
    request, other = executor.submit(tokens(150), 8), executor.submit(tokens(60, 9), 12)
    for _ in range(passes):
        executor.step()
    executor.destroy(request, forget=True)
    executor.run()
    assert request.replays == 1
    assert request.output_tokens == alone(model(preset), tokens(150), 8)
    assert other.output_tokens == alone(model(preset), tokens(60, 9), 12)
    assert len(executor.cache.unheld(0)) == executor.cache.num_blocks


def test_a_replay_loads_what_it_saved(model):
    executor = Executor(model("llama"), *memory_pair({}))
    request = executor.submit(tokens(150), 8)
    executor.step()
    executor.step()
    executor.destroy(request, forget=True)
    executor.run()
    assert (request.device_tokens, request.honoured_tokens) == (0, 128)
    assert request.output_tokens == alone(model("llama"), tokens(150), 8)


def test_after_a_completed_asynchronous_load_it_is_not_asked_again(model):
    """contract-v2.md section 11, point 1: no query, no alloc callback, an entry in new_requests."""
    recorder, executor = recorded(
        model("llama"), {"get_num_new_matched_tokens": [(64, True)], "get_finished": [([], [1])]}
    )
    request = executor.submit(tokens(96), 4)
    executor.step()
    executor.step()
    recorder.calls.clear()
    executor.destroy(request, forget=True)
    executor.run()
    assert recorder.of("get_num_new_matched_tokens") == []
    assert recorder.of("update_state_after_alloc") == []
    assert told(recorder)[0] == (True, 0, 97)
    # Only request_finished clears the memory: the id of a later request would be asked again.
    assert executor._manager.finished_async_loading_requests == {}


def test_between_two_chunks_the_prompt_begins_anew(model):
    recorder, executor = recorded(model("llama"), chunk_tokens=32)
    request = executor.submit(tokens(100), 2)
    executor.step()
    executor.destroy(request, forget=True)
    executor.run()
    assert told(recorder)[:3] == [(True, 0, 100), (True, 0, 100), (False, 32, 0)]
    assert request.output_tokens == alone(model("llama"), tokens(100), 2)


@LOOPS
def test_a_suspended_request_is_in_no_output_and_returns_as_a_cached_one(overlap, model):
    recorder, executor = recorded(model("llama"), overlap=overlap)
    request, other = executor.submit(tokens(40), 6), executor.submit(tokens(50, 9), 12)
    executor.step()
    executor.step()
    executor.suspend(request)
    held = executor.cache.slots(request)[0][:]
    recorder.calls.clear()
    for _ in range(3):
        executor.step()
    assert {report["request_id"] for _, report in recorder.reports()} == {2}
    executor.resume(request)
    assert executor.cache.slots(request)[0] == held
    recorder.calls.clear()
    executor.step()
    assert [is_new for is_new, _ in recorder.reports()] == [False, False]
    executor.run()
    assert request.output_tokens == alone(model("llama"), tokens(40), 6)
    assert other.output_tokens == alone(model("llama"), tokens(50, 9), 12)


@LOOPS
def test_a_suspended_request_whose_pages_are_destroyed_stays_suspended(overlap, model):
    """In the overlap loop that waits for the token in flight."""
    executor = Executor(model("llama"), *memory_pair({}), overlap=overlap)
    request = executor.submit(tokens(60), 8)
    executor.step()
    executor.step()
    executor.suspend(request)
    executor.destroy(request)
    executor.run()
    assert (request.replays, request.is_suspended) == (1, True)
    executor.resume(request)
    executor.run()
    assert request.output_tokens == alone(model("llama"), tokens(60), 8)


def test_run_ends_where_only_suspended_requests_are_left(model):
    _, executor = recorded(model("llama"))
    request = executor.submit(tokens(40), 6)
    executor.step()
    executor.suspend(request)
    executor.run()
    assert not request.is_finished
    executor.resume(request)
    executor.run()
    assert request.is_finished


@LOOPS
@pytest.mark.parametrize("chunk", [None, 32])
@pytest.mark.parametrize("preset", ["llama", "gemma3"])
def test_under_memory_pressure_the_newest_begins_anew_and_no_token_changes(preset, chunk, overlap, model):
    executor = Executor(
        model(preset), *memory_pair({}), num_blocks=8, policy="MAX_UTILIZATION", overlap=overlap, chunk_tokens=chunk
    )
    prompts = [tokens(60, 1), tokens(40, 2), tokens(70, 3)]
    requests = [executor.submit(prompt, 60) for prompt in prompts]
    executor.run()
    assert [r.output_tokens for r in requests] == [alone(model(preset), prompt, 60) for prompt in prompts]
    assert requests[0].replays == 0
    assert sum(request.replays for request in requests) >= 1
    assert len(executor.cache.unheld(0)) == executor.cache.num_blocks


def test_without_pressure_nothing_begins_anew(model):
    executor = Executor(model("llama"), *memory_pair({}), policy="MAX_UTILIZATION")
    assert [r.replays for r in serve(executor, tokens(60, 1), tokens(40, 2), new=60)] == [0, 0]


def test_only_a_running_request_with_pages_can_be_destroyed(model):
    _, executor = recorded(model("llama"), {"get_num_new_matched_tokens": [(32, True)]})
    request = executor.submit(tokens(96), 4)
    with pytest.raises(ValueError, match="has no pages"):
        executor.destroy(request)
    executor.step()
    with pytest.raises(ValueError, match="DISAGG_GENERATION_TRANS_IN_PROGRESS"):
        executor.destroy(request)
    v1 = Executor(model("llama"), mode="v1")
    with pytest.raises(NotImplementedError, match="V1 destroys no allocation"):
        v1.destroy(v1.submit(tokens(40), 2))
