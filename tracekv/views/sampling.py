"""Which requests are exported, and whose traces they join: decided alike in every process that reads a run's journals."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple

from tracekv.journal.records import Enqueued

_log = logging.getLogger("tracekv")

#: The low 64 bits of a trace id are compared with a bound below this, as the OpenTelemetry SDK's ratio sampler does.
_EVERYTHING = 1 << 64
_KNOWN = (
    "always_on", "always_off", "traceidratio",
    "parentbased_always_on", "parentbased_always_off", "parentbased_traceidratio",
)  # fmt: skip
_said: set[str] = set()


class Caller(NamedTuple):
    """The span of whoever sent a request: what the request's own trace joins."""

    trace_id: bytes
    span_id: bytes
    is_sampled: bool


class Sampler(NamedTuple):
    """Decides by a request's trace id, which is a hash of run id and request id: every rank comes to the same answer.

    Attributes:
        bound: A trace is exported when the low 64 bits of its id are below it.
        follows_caller: A known caller's own decision goes first.
    """

    bound: int = _EVERYTHING
    follows_caller: bool = True

    @property
    def is_off(self) -> bool:
        """Whether nothing is exported that has no caller."""
        return self.bound == 0

    def is_exported(self, trace_id: bytes, caller: Caller | None = None) -> bool:
        """Whether the trace with this (derived) id is exported."""
        if caller is not None and self.follows_caller:
            return caller.is_sampled
        return int.from_bytes(trace_id[8:], "big") < self.bound


def sampler_from(environ: Mapping[str, str]) -> Sampler:
    """The sampler that ``OTEL_TRACES_SAMPLER`` and ``OTEL_TRACES_SAMPLER_ARG`` name, by default ``parentbased_always_on``.

    An unknown name, or a ratio that is none, is said once; then everything is exported.

    Source: the OpenTelemetry specification, "General SDK Configuration".
    """
    name = environ.get("OTEL_TRACES_SAMPLER", "").strip().lower() or "parentbased_always_on"
    if name not in _KNOWN:
        _say(f"OTEL_TRACES_SAMPLER={name} is none of {', '.join(_KNOWN)}; all requests are exported, as with always_on")
        return Sampler(_EVERYTHING, follows_caller=False)
    kind = name.removeprefix("parentbased_")
    return Sampler(_bound(kind, environ), follows_caller=kind is not name)


def _bound(kind: str, environ: Mapping[str, str]) -> int:
    if kind != "traceidratio":
        return _EVERYTHING if kind == "always_on" else 0
    text = environ.get("OTEL_TRACES_SAMPLER_ARG", "").strip()
    try:
        ratio = float(text or 1.0)
    except ValueError:
        ratio = -1.0
    if not 0.0 <= ratio <= 1.0:
        _say(f"OTEL_TRACES_SAMPLER_ARG={text} is no ratio between 0 and 1; all requests are exported")
        ratio = 1.0
    return round(ratio * _EVERYTHING)


def _say(what: str) -> None:
    if what not in _said:
        _said.add(what)
        _log.warning("tracekv: %s", what)


def caller_of(header: str | None) -> Caller | None:
    """The caller that a W3C ``traceparent`` names; None where there is none that can be read."""
    parts = (header or "").strip().split("-")
    if len(parts) < 4 or [len(part) for part in parts[:4]] != [2, 32, 16, 2] or parts[0] == "ff":
        return None
    try:
        trace_id, span_id, flags = bytes.fromhex(parts[1]), bytes.fromhex(parts[2]), int(parts[3], 16)
    except ValueError:
        return None
    return Caller(trace_id, span_id, bool(flags & 1)) if any(trace_id) and any(span_id) else None


class Callers:
    """The known callers of the requests of any number of runs. One is shared by all views of a reader; bounded."""

    def __init__(self, at_most: int = 16384) -> None:
        self._known: OrderedDict[tuple[bytes, int], Caller] = OrderedDict()
        self._at_most = at_most

    def learn(self, run: bytes, record: Enqueued) -> None:
        """Take what an enqueue tells about a request of ``run``."""
        caller = caller_of(record.traceparent)
        if caller is None:
            return
        self._known[run, record.request_id] = caller
        while len(self._known) > self._at_most:
            self._known.popitem(last=False)

    def of(self, run: bytes, request_id: int) -> Caller | None:
        """Who sent a request, as far as any journal read so far tells."""
        return self._known.get((run, request_id)) if self._known else None
