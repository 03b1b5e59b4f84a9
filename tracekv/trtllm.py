"""What TensorRT-LLM's ``connector_module`` names: ``Scheduler`` and ``Worker``, the traced form of ``TRACEKV_CONNECTOR``.

.. code-block:: yaml

   kv_connector_config:
     connector_module: tracekv.trtllm
     connector_scheduler_class: Scheduler
     connector_worker_class: Worker

The classes are made when they are asked for (PEP 562), so that settings and the wrapped connector's own errors show at bring-up.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

from tracekv import settings
from tracekv.capture import trace
from tracekv.connectors import resolve
from tracekv.contract import on_enqueue

__all__ = ["Scheduler", "Worker", "bind_enqueue"]  # noqa: F822  # two of them are made by __getattr__

_log = logging.getLogger("tracekv")

#: Where a class of TensorRT-LLM's worker process may define the method that puts a request into the engine, newest first.
_WORKER_MODULES = (
    "tensorrt_llm.executor.base_worker",
    "tensorrt_llm.executor.worker_base",
    "tensorrt_llm.executor.worker",
)
_ENQUEUE = "_enqueue_request"
_bound: set[type] = set()
_said: set[str] = set()


def __getattr__(name: str) -> type:
    if name not in ("Scheduler", "Worker"):
        raise AttributeError(f"module {__name__} has no attribute {name}")
    resolved = settings.load()
    if resolved.enqueue_hook:
        bind_enqueue()
    connector = resolve(resolved.connector)
    return trace(connector.scheduler if name == "Scheduler" else connector.worker)


def bind_enqueue() -> bool:
    """Have :func:`tracekv.contract.on_enqueue` called for each request that TensorRT-LLM's worker process takes in.

    Unproven: it was written from TensorRT-LLM's public source and has not run inside it. Only rank 0 takes requests in, so
    nothing comes of it elsewhere. What isn't there as expected is said once, and the engine goes on without it.

    Returns:
        Whether a method to bind to was found. Asked again, it binds nothing twice.

    Source: contract.md section 6 (c); ``_enqueue_request`` of ``tensorrt_llm/executor/base_worker.py``, which takes a
    request with ``id``, ``prompt_token_ids`` and, in newer versions, ``trace_headers``, and returns the engine's id.
    """
    found = [
        worker
        for module in _WORKER_MODULES
        if module in sys.modules  # the process that drives an engine has imported it long ago
        for worker in vars(sys.modules[module]).values()
        if isinstance(worker, type) and worker.__module__ == module and callable(vars(worker).get(_ENQUEUE))
    ]
    for worker in found:
        if worker not in _bound:
            _bound.add(worker)
            try:
                setattr(worker, _ENQUEUE, _telling(vars(worker)[_ENQUEUE]))
            except (TypeError, AttributeError) as error:
                _say(f"TRACEKV_ENQUEUE_HOOK can't bind to {worker.__qualname__}.{_ENQUEUE} ({type(error).__name__})")
    if not found:
        _say(
            "TRACEKV_ENQUEUE_HOOK finds no request enqueue that it knows in this process "
            f"(looked in {', '.join(_WORKER_MODULES)}); a request's trace begins with its first query"
        )
    return bool(found)


def _telling(enqueue: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(enqueue)
    def _enqueue_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        entered_ns = perf_counter_ns()
        request_id = enqueue(self, request, *args, **kwargs)
        try:
            headers = getattr(request, "trace_headers", None)
            on_enqueue(request_id, request.id, request.prompt_token_ids, headers, request=request, at_ns=entered_ns)
        except Exception as error:  # the request is in the engine; that tracing knows nothing of it mustn't matter
            _say(f"TRACEKV_ENQUEUE_HOOK can't read the request that the engine took ({type(error).__name__})")
        return request_id

    return _enqueue_request


def _say(what: str) -> None:
    if what not in _said:
        _said.add(what)
        _log.warning("tracekv: %s", what)
