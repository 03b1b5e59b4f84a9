"""Offers honoured in part or not at all, in a run, and what an asynchronous load is worth then (contract-v2.md 1.3, 1.4)."""

from __future__ import annotations

import pytest

from tests.harness.memory_connector import memory_pair
from tests.harness.recording import Recorder, recording_pair
from tests.harness.test_device_reuse import serve, tokens
from tests.harness.test_overlap import alone
from tracekv.harness import Executor
from tracekv.harness.versions import RuntimeVersion

LENGTH = 256


def stored(model, prompt=None):
    store = {}
    serve(Executor(model, *memory_pair(store)), prompt or tokens(LENGTH), new=6)
    return store


@pytest.mark.parametrize(
    ("chunk", "grow_limit", "honoured", "passes"),
    [
        (64, None, 224, [(224, 32)]),
        (64, 8, 224, [(224, 32)]),
        (64, 5, 32, [(32, 32), (64, 64), (128, 64), (192, 64)]),
        (64, 0, 32, [(32, 32), (64, 64), (128, 64), (192, 64)]),
        (32, 0, 0, [(start, 32) for start in range(0, 256, 32)]),
        (None, 0, 224, [(224, 32)]),  # within the chunk nothing has to grow
    ],
)
@pytest.mark.parametrize("preset", ["llama", "gemma3"])
def test_an_offer_past_the_chunk_is_honoured_as_far_as_pages_grow(preset, chunk, grow_limit, honoured, passes, model):
    store = stored(model(preset))
    executor = Executor(model(preset), *memory_pair(store), chunk_tokens=chunk, grow_limit=grow_limit)
    (request,) = serve(executor, tokens(LENGTH), new=6)
    assert request.honoured_tokens == request.py_num_connector_matched_tokens == honoured
    assert request.passes == passes
    assert request.output_tokens == alone(model(preset), tokens(LENGTH), 6)


@pytest.mark.parametrize("polls", [0, 3])
@pytest.mark.parametrize(("chunk", "honoured"), [(64, 32), (32, 0), (None, 224)])
@pytest.mark.parametrize("preset", ["llama", "gemma3"])
def test_an_asynchronous_load_runs_whatever_is_honoured_and_what_is_not_is_computed(
    preset, chunk, honoured, polls, model
):
    store = stored(model(preset))
    pair = memory_pair(store, is_async=True, polls=polls)
    executor = Executor(model(preset), *pair, chunk_tokens=chunk, grow_limit=0)
    (request,) = serve(executor, tokens(LENGTH), new=6)
    assert request.honoured_tokens == honoured
    assert executor.worker.loaded_pages > 0
    assert request.passes[0][0] == honoured
    assert request.output_tokens == alone(model(preset), tokens(LENGTH), 6)


def test_a_discarded_load_is_overwritten(model):
    """The load of an offer that was not honoured spoils its pages, and no token changes; if it was honoured, they do."""
    store = stored(model("llama"))

    def first(**options):
        pair = memory_pair(store, is_async=True, after_load=lambda _, page: page.fill_(7))
        return serve(Executor(model("llama"), *pair, **options), tokens(LENGTH), new=6)[0].output_tokens

    expected = alone(model("llama"), tokens(LENGTH), 6)
    assert first(chunk_tokens=32, grow_limit=0) == expected
    assert first() != expected


@pytest.mark.parametrize("honoured", [0, 32])
def test_an_asynchronous_request_is_parked_even_if_nothing_is_honoured(honoured, model):
    """Golden f1; the report that follows the load begins where the load ended."""
    recorder = Recorder({"get_num_new_matched_tokens": [(64, True)], "get_finished": [([], []), ([], [1])]})
    chunk = 32 + honoured
    executor = Executor(model("llama"), *recording_pair(recorder), chunk_tokens=chunk, grow_limit=0)
    recorder.calls.clear()
    executor.submit(tokens(LENGTH), 1)
    executor.step()
    assert recorder.of("build_connector_meta")[0]["args"][0]["new_requests"] == []
    assert len(recorder.of("start_load_kv")) == 1
    assert recorder.of("get_finished")[0]["args"] == [[], [1]]
    executor.run()
    is_new, report = recorder.reports()[0]
    assert (is_new, report["computed_position"]) == (True, honoured)
    assert report["num_scheduled_tokens"] == chunk


@pytest.mark.parametrize("is_async", [False, True])
def test_without_the_memo_of_the_served_position_an_asynchronous_load_is_for_nothing(is_async, model):
    """A version conflict: contract-v2.md section 1.4, "async load done"; section 10 (f)."""
    store = stored(model("llama"))
    pair = memory_pair(store, is_async=is_async)
    executor = Executor(model("llama"), *pair, version=RuntimeVersion(served_position_survives=False))
    (request,) = serve(executor, tokens(LENGTH), new=6)
    assert request.honoured_tokens == 224
    assert request.passes == ([(0, LENGTH)] if is_async else [(224, 32)])
    assert request.output_tokens == alone(model("llama"), tokens(LENGTH), 6)


def test_that_version_has_no_windows_here(model):
    with pytest.raises(ValueError, match="served_position_survives"):
        Executor(model("gemma3"), version=RuntimeVersion(served_position_survives=False))


def test_under_pressure_growth_fails_by_itself(model):
    store = stored(model("llama"))
    executor = Executor(model("llama"), *memory_pair(store), chunk_tokens=64, num_blocks=9, policy="MAX_UTILIZATION")
    first = executor.submit(tokens(120, 9), 30)
    executor.step()
    second = executor.submit(tokens(LENGTH), 6)
    executor.step()
    assert second.honoured_tokens == 32
    executor.run()
    assert second.output_tokens == alone(model("llama"), tokens(LENGTH), 6)
    assert first.output_tokens == alone(model("llama"), tokens(120, 9), 30)
