"""Cancellation, phase by phase (contract-v2.md sections 4 and 6)."""

from __future__ import annotations

import pytest

from tests.harness.memory_connector import memory_pair
from tests.harness.recording import Recorder, recording_pair
from tests.harness.test_device_reuse import serve, tokens
from tests.harness.test_overlap import alone, finishes
from tracekv.harness import Executor

BOTH = pytest.mark.parametrize("mode", ["v1", "v2"])


def recorded(model, mode, answers=None, **options):
    recorder = Recorder(answers)
    executor = Executor(model, *recording_pair(recorder, ("flat",)), mode=mode, **options)
    recorder.calls.clear()
    return recorder, executor


def nothing_is_held(executor):
    return len(executor.cache.unheld(0)) == executor.cache.num_blocks and not executor.has_work


@BOTH
def test_a_request_that_was_never_scheduled_is_never_asked_and_never_finished(mode, model):
    recorder, executor = recorded(model("llama"), mode)
    request = executor.submit(tokens(40), 3)
    executor.cancel(request)
    executor.run()
    assert request.is_cancelled
    assert request.is_finished
    assert recorder.calls == []


@BOTH
def test_a_request_that_waits_for_pages_is_never_asked(mode, model):
    recorder, executor = recorded(model("llama"), mode, num_blocks=4)
    running, waiting = executor.submit(tokens(90), 3), executor.submit(tokens(80, 6), 3)
    executor.step()
    executor.cancel(waiting)
    executor.step()
    assert waiting.is_cancelled
    assert not running.is_finished
    executor.run()
    assert [call["args"][0] for call in recorder.of("get_num_new_matched_tokens")] == [{"req": 1}]
    assert [call["args"][0] for call in finishes(recorder)] == [{"req": 1}]


@BOTH
def test_between_two_chunks_it_ends_behind_the_next_one(mode, model):
    recorder, executor = recorded(model("llama"), mode, chunk_tokens=32)
    request = executor.submit(tokens(100), 3)
    executor.step()
    executor.cancel(request)
    executor.run()
    assert (request.is_cancelled, request.output_tokens) == (True, [])
    assert len(request.passes) == 2
    assert finishes(recorder) == []
    assert nothing_is_held(executor)


@BOTH
def test_a_generating_request_is_never_announced(mode, model):
    recorder, executor = recorded(model("llama"), mode)
    request = executor.submit(tokens(40), 30)
    executor.step()
    executor.step()
    executor.cancel(request)
    executor.step()
    assert len(request.output_tokens) == 3
    assert request.is_cancelled
    assert finishes(recorder) == []
    assert nothing_is_held(executor)


@BOTH
def test_a_parked_request_stays_while_nothing_can_be_queued(mode, model):
    recorder, executor = recorded(model("llama"), mode, {"get_num_new_matched_tokens": [(32, True)]})
    request = executor.submit(tokens(100), 3)
    executor.step()
    executor.cancel(request)
    executor.step()
    executor.step()
    assert not request.is_cancelled
    assert len(executor.cache.unheld(0)) < executor.cache.num_blocks
    recorder.answers["get_finished"].append(([], [1]))
    executor.run()
    assert request.is_cancelled
    assert finishes(recorder) == []
    assert nothing_is_held(executor)


@BOTH
def test_a_parked_request_ends_with_its_load_in_flight_once_another_runs(mode, model):
    recorder, executor = recorded(model("llama"), mode, {"get_num_new_matched_tokens": [(32, True)]})
    request = executor.submit(tokens(100), 3)
    executor.step()
    executor.cancel(request)
    serve_other = executor.submit(tokens(50, 7), 1)
    executor.step()
    assert request.is_cancelled
    assert len(executor.cache.unheld(0)) == executor.cache.num_blocks  # the load would now write to free pages
    assert executor.has_work
    recorder.answers["get_finished"].append(([], [1]))
    executor.run(max_idle_passes=3)
    assert serve_other.output_tokens
    assert [call["args"][0] for call in finishes(recorder)] == [{"req": 2}]
    assert list(executor._manager.finished_async_loading_requests) == [1]  # remembered for ever


@BOTH
def test_a_request_that_is_being_saved_goes_on_being_saved(mode, model):
    recorder, executor = recorded(model("llama"), mode, {"request_finished": [True]})
    request = executor.submit(tokens(100), 1)
    executor.step()
    executor.cancel(request)
    executor.step()
    assert not request.is_cancelled
    assert len(executor.cache.unheld(0)) < executor.cache.num_blocks
    recorder.answers["get_finished"].append(([1], []))
    executor.run()
    assert nothing_is_held(executor)


@BOTH
def test_one_that_finishes_in_the_very_pass_is_announced_as_finished(mode, model):
    recorder, executor = recorded(model("llama"), mode)
    request = executor.submit(tokens(40), 2)
    executor.step()
    executor.cancel(request)
    executor.run()
    assert not request.is_cancelled
    assert len(finishes(recorder)) == 1


@pytest.mark.parametrize(("mode", "announced"), [("v1", []), ("v2", [[]])])
def test_the_overlap_loop_announces_it_one_pass_late_with_empty_lists_on_v2(mode, announced, model):
    recorder, executor = recorded(model("llama"), mode, overlap=True)
    request = executor.submit(tokens(40), 30)
    executor.step()
    executor.step()
    executor.cancel(request)
    executor.step()
    assert request.is_cancelled
    assert finishes(recorder) == []
    executor.step()
    assert [call["args"][1] for call in finishes(recorder)] == announced
    assert nothing_is_held(executor)


def test_in_the_overlap_loop_a_parked_request_ends_while_a_pass_is_behind_it(model):
    recorder, executor = recorded(
        model("llama"), "v2", {"get_num_new_matched_tokens": [(0, False), (32, True)]}, overlap=True
    )
    executor.submit(tokens(50, 7), 9)
    parked = executor.submit(tokens(100), 3)
    executor.step()
    executor.cancel(parked)
    executor.step()
    assert parked.is_cancelled
    recorder.answers["get_finished"].append(([], [2]))
    executor.run()
    assert [call["args"][0] for call in finishes(recorder)] == [{"req": 1}]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("passes", [1, 2, 3, 4, 5])
def test_what_others_get_does_not_change(passes, overlap, model):
    """The pages of a cancelled prefill hold no prefix that was not computed."""
    executor = Executor(model("llama"), *memory_pair({}), chunk_tokens=32, overlap=overlap)
    first = executor.submit(tokens(120), 4)
    other = executor.submit(tokens(60, 9), 12)
    for _ in range(passes):
        executor.step()
    executor.cancel(first)
    executor.run()
    again = serve(executor, tokens(120), new=4)[0]
    assert again.output_tokens == alone(model("llama"), tokens(120), 4)
    assert other.output_tokens == alone(model("llama"), tokens(60, 9), 12)


def test_a_run_can_be_given_up_where_the_connector_never_answers(model):
    _, executor = recorded(model("llama"), "v2", {"get_num_new_matched_tokens": [(32, True)]})
    executor.submit(tokens(100), 3)
    with pytest.raises(RuntimeError, match="get_finished has not returned"):
        executor.run(max_idle_passes=5)
