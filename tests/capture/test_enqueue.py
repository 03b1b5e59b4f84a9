"""A request's enqueue: what is told, what isn't, and TensorRT-LLM's own enqueue where it can be bound to."""

from __future__ import annotations

import logging
import sys
import types

import pytest

import tracekv
from tests.support.connectors import FlatScheduler
from tracekv import capture, trtllm
from tracekv.contract import enqueue, on_enqueue
from tracekv.journal.records import Enqueued

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def traced(monkeypatch):
    monkeypatch.setenv("TRACEKV_ENQUEUE_HOOK", "1")
    return tracekv.trace(FlatScheduler)(None)


@pytest.fixture
def heard():
    told = []
    enqueue.subscribe(told.append)
    yield told
    enqueue.unsubscribe(told.append)


def test_an_enqueue_is_recorded_with_the_number_of_tokens_and_its_caller(records, traced):
    on_enqueue(7, 70, [11, 22, 33], {"traceparent": PARENT, "x-user": "somebody"}, at_ns=5)
    assert records(Enqueued) == [Enqueued(5, 7, 70, 3, PARENT)]


def test_without_the_setting_nothing_is_recorded(records):
    tracekv.trace(FlatScheduler)(None)
    on_enqueue(7, 70, [11, 22, 33], None)
    assert records(Enqueued) == []


def test_after_the_session_has_ended_nobody_listens(traced):
    assert enqueue._subscribers
    capture.shutdown()
    assert enqueue._subscribers == []


def test_no_token_reaches_a_subscriber(heard):
    on_enqueue(7, None, [123456, 654321], {})
    (told,) = heard
    assert told.prompt_tokens == 2
    assert "123456" not in repr(told)


@pytest.mark.parametrize(
    "headers",
    [
        {"traceparent": PARENT},
        {"Traceparent": f" {PARENT} "},
        {"traceparent": PARENT.encode()},
        {"tracestate": "a=b", "traceparent": f"{PARENT}-what-a-newer-version-adds"},
    ],
)
def test_a_valid_traceparent_is_taken_whatever_its_form(heard, headers):
    on_enqueue(1, None, [], headers)
    assert heard[0].traceparent == PARENT


@pytest.mark.parametrize("value", ["", "secret", PARENT.upper(), PARENT + "f", "00-" + PARENT, None, 5])
def test_what_is_no_traceparent_goes_no_further(heard, value):
    on_enqueue(1, None, [], {"traceparent": value})
    assert heard[0].traceparent is None


def test_a_subscriber_that_fails_is_removed_and_the_others_go_on(heard, caplog):
    def failing(request):
        raise ValueError("token 4711")

    enqueue.subscribe(failing)
    on_enqueue(1, None, [4711], None)
    on_enqueue(2, None, [4711], None)
    assert [request.request_id for request in heard] == [1, 2]
    assert len(caplog.records) == 1
    assert "failing" in caplog.text
    assert "4711" not in caplog.text


class GenerationRequest:
    """As the engine's front process makes it."""

    def __init__(self, client_id, tokens):
        self.id = client_id
        self.prompt_token_ids = tokens


@pytest.fixture
def worker_class(monkeypatch):
    """A module with a worker class where TensorRT-LLM has its own."""
    module = types.ModuleType("tensorrt_llm.executor.base_worker")

    class BaseWorker:
        taken = 0

        def _enqueue_request(self, request, result_wait_queue=None):
            self.taken += 1
            return 1000 + request.id

    BaseWorker.__module__ = module.__name__
    module.BaseWorker = BaseWorker
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(trtllm, "_said", set())
    return BaseWorker


def test_the_workers_enqueue_is_told_with_the_engines_id_and_the_callers_headers(heard, worker_class):
    worker = worker_class()
    assert trtllm.bind_enqueue()
    request = GenerationRequest(5, [1, 2])
    request.trace_headers = {"traceparent": PARENT}
    assert worker._enqueue_request(request, result_wait_queue=None) == 1005
    assert [told[1:] for told in heard] == [(1005, 5, 2, PARENT)]


def test_binding_twice_tells_once(heard, worker_class):
    assert trtllm.bind_enqueue()
    assert trtllm.bind_enqueue()
    worker_class()._enqueue_request(GenerationRequest(5, [1]))
    assert len(heard) == 1


def test_a_request_that_can_not_be_read_is_taken_all_the_same_and_said_once(heard, worker_class, caplog):
    trtllm.bind_enqueue()
    worker, odd = worker_class(), types.SimpleNamespace(id=5)
    assert [worker._enqueue_request(odd) for _ in range(2)] == [1005, 1005]
    assert worker.taken == 2
    assert heard == []
    assert len(caplog.records) == 1


def test_the_engines_own_refusal_passes_through(heard, worker_class):
    trtllm.bind_enqueue()
    with pytest.raises(AttributeError):
        worker_class()._enqueue_request(None)
    assert heard == []


def test_where_there_is_nothing_to_bind_to_it_is_said_once(monkeypatch, caplog):
    monkeypatch.setattr(trtllm, "_said", set())
    monkeypatch.setenv("TRACEKV_ENQUEUE_HOOK", "1")
    monkeypatch.setenv("TRACEKV_CONNECTOR", "tests.support.connectors:FlatScheduler,TensorWorker")
    with caplog.at_level(logging.WARNING, "tracekv"):
        assert issubclass(trtllm.Scheduler, FlatScheduler)
        assert trtllm.Worker.__name__ == "TensorWorker"
    assert [entry.getMessage().count("TRACEKV_ENQUEUE_HOOK") for entry in caplog.records] == [1]


def test_a_connector_of_the_process_gets_the_tokens_and_no_record_does(records, traced):
    told = []

    def connector(request, tokens, engine_request):
        told.append((request.request_id, list(tokens), engine_request))

    enqueue.subscribe_tokens(connector)
    try:
        on_enqueue(7, None, [123456, 654321], None, request="the engine's")
    finally:
        enqueue.unsubscribe_tokens(connector)
    on_enqueue(8, None, [1], None)
    assert told == [(7, [123456, 654321], "the engine's")]
    assert "123456" not in repr(records(Enqueued))


def test_a_connector_that_fails_on_a_prompt_is_called_no_more_and_its_error_isnt_told(caplog):
    calls = []

    def failing(request, tokens, engine_request):
        calls.append(request.request_id)
        raise ValueError(f"cannot take {tokens}")

    enqueue.subscribe_tokens(failing)
    on_enqueue(1, None, [424242], None)
    on_enqueue(2, None, [424242], None)
    assert calls == [1]
    assert "ValueError" in caplog.text
    assert "424242" not in caplog.text
