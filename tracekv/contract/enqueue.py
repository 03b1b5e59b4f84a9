"""A request enters the engine: told here, since no callback of a connector is made before its first query.

The harness calls :func:`on_enqueue`; :mod:`tracekv.trtllm` binds it to TensorRT-LLM's own enqueue. Whoever wants to know
subscribes, and learns how many tokens there are and the caller's ``traceparent``: that is all that a record could hold. A connector of
this process that stages a prompt's KV before its first query subscribes for the tokens themselves (:func:`subscribe_tokens`); they
are handed to it and kept nowhere here. Headers go no further than this module.

Source: DESIGN.md, "capture"; contract.md section 6 (trace context doesn't reach the executor by itself).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
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
#: Told the tokens, too, and the request as the engine was given it (None where the caller has none); it keeps neither object.
TokenSubscriber = Callable[[Enqueue, Sequence[int], Any], None]
_subscribers: list[Subscriber] = []
_token_subscribers: list[TokenSubscriber] = []


def subscribe(subscriber: Subscriber) -> None:
    """Have ``subscriber`` called for each request, on the thread that enqueues it; it must not block."""
    if subscriber not in _subscribers:
        _subscribers.append(subscriber)


def unsubscribe(subscriber: Subscriber) -> None:
    """Stop calling ``subscriber``; nothing happens where it isn't subscribed."""
    if subscriber in _subscribers:
        _subscribers.remove(subscriber)


def subscribe_tokens(subscriber: TokenSubscriber) -> None:
    """As :func:`subscribe`, for connectors: what it is told must reach no record, log or error."""
    if subscriber not in _token_subscribers:
        _token_subscribers.append(subscriber)


def unsubscribe_tokens(subscriber: TokenSubscriber) -> None:
    """Stop calling ``subscriber``; nothing happens where it isn't subscribed."""
    if subscriber in _token_subscribers:
        _token_subscribers.remove(subscriber)


def on_enqueue(
    request_id: int,
    client_id: int | None,
    tokens: Sequence[int],
    trace_headers: Mapping[str, Any] | None,
    *,
    request: Any = None,
    at_ns: int | None = None,
) -> None:
    """Tell the subscribers that a request enters the engine. Rank 0 only; any thread; never raises.

    Args:
        request_id: The engine's id.
        client_id: The front process's id.
        tokens: The prompt's tokens. Records learn their number; only :func:`subscribe_tokens` gets them.
        trace_headers: The caller's headers, of which only a valid ``traceparent`` is taken.
        request: What the engine was given, which may have a salt or an adapter; as far as tokens go.
        at_ns: When, by ``time.perf_counter_ns``; None: now.
    """
    if not _subscribers and not _token_subscribers:
        return
    at_ns = perf_counter_ns() if at_ns is None else at_ns
    for subscriber in list(_subscribers):
        try:
            subscriber(Enqueue(at_ns, request_id, client_id, len(tokens), _traceparent(trace_headers)))
        except Exception as error:  # the engine's request goes in, whoever listens
            unsubscribe(subscriber)
            _say_removed(subscriber, error)
    for token_subscriber in list(_token_subscribers):
        try:
            token_subscriber(Enqueue(at_ns, request_id, client_id, len(tokens), None), tokens, request)
        except Exception as error:
            unsubscribe_tokens(token_subscriber)
            _say_removed(token_subscriber, error)


def _say_removed(subscriber: Callable[..., None], error: Exception) -> None:
    name = getattr(subscriber, "__qualname__", type(subscriber).__qualname__)
    # Its class only: the text could tell a token.
    _log.warning("tracekv: %s failed on a request's enqueue (%s) and is called no more", name, type(error).__name__)


def _traceparent(headers: Mapping[str, Any] | None) -> str | None:
    for name, value in (headers or {}).items():
        if name.lower() == "traceparent":
            text = value.decode("ascii", "replace") if isinstance(value, bytes) else str(value)
            found = _TRACEPARENT.match(text)
            return found[1] if found else None
    return None
