"""A request enters the engine: told here, since no callback of a connector is made before its first query.

The harness calls :func:`on_enqueue`; :mod:`tracekv.trtllm` binds it to TensorRT-LLM's own enqueue. Whoever wants to know
subscribes. Neither tokens nor headers go any further than this module: a subscriber learns how many tokens there are, and
the caller's ``traceparent``.

Source: DESIGN.md, "capture"; contract.md section 6 (trace context doesn't reach the executor by itself).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sized
from time import perf_counter_ns
from typing import Any, NamedTuple

_log = logging.getLogger("tracekv")

#: W3C trace context: version, trace id, parent id, flags. What a newer version appends is left out.
_TRACEPARENT = re.compile(r"\s*([0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2})(?:-|\s*$)")


class Enqueue(NamedTuple):
    """A request entered the engine at ``at_ns`` (``time.perf_counter_ns``).

    Attributes:
        request_id: The engine's own id, by which connectors know the request.
        client_id: The id by which its front process knows it.
        traceparent: The caller's W3C trace context, where there is a valid one.
    """

    at_ns: int
    request_id: int
    client_id: int | None
    prompt_tokens: int
    traceparent: str | None


Subscriber = Callable[[Enqueue], None]
_subscribers: list[Subscriber] = []


def subscribe(subscriber: Subscriber) -> None:
    """Have ``subscriber`` called for each request, on the thread that enqueues it; it must not block."""
    if subscriber not in _subscribers:
        _subscribers.append(subscriber)


def unsubscribe(subscriber: Subscriber) -> None:
    """Stop calling ``subscriber``; nothing happens where it isn't subscribed."""
    if subscriber in _subscribers:
        _subscribers.remove(subscriber)


def on_enqueue(
    request_id: int,
    client_id: int | None,
    tokens: Sized,
    trace_headers: Mapping[str, Any] | None,
    *,
    at_ns: int | None = None,
) -> None:
    """Tell the subscribers that a request enters the engine. Rank 0 only; any thread; never raises.

    Args:
        request_id: The engine's id.
        client_id: The front process's id.
        tokens: The prompt's tokens, of which only the number is taken.
        trace_headers: The caller's headers, of which only a valid ``traceparent`` is taken.
        at_ns: When, by ``time.perf_counter_ns``; None: now.
    """
    if not _subscribers:
        return
    at_ns = perf_counter_ns() if at_ns is None else at_ns
    for subscriber in list(_subscribers):
        try:
            subscriber(Enqueue(at_ns, request_id, client_id, len(tokens), _traceparent(trace_headers)))
        except Exception as error:  # the engine's request goes in, whoever listens
            unsubscribe(subscriber)
            name = getattr(subscriber, "__qualname__", type(subscriber).__qualname__)
            _log.warning(
                "tracekv: %s failed on a request's enqueue (%s) and is called no more", name, type(error).__name__
            )


def _traceparent(headers: Mapping[str, Any] | None) -> str | None:
    for name, value in (headers or {}).items():
        if name.lower() == "traceparent":
            text = value.decode("ascii", "replace") if isinstance(value, bytes) else str(value)
            found = _TRACEPARENT.match(text)
            return found[1] if found else None
    return None
