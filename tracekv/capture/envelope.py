"""What crosses from the leader to every rank around the connector's metadata."""

from __future__ import annotations

import contextlib
import pickle
from time import perf_counter_ns
from typing import Any

import xxhash

from tracekv.journal.current import current
from tracekv.journal.records import Call
from tracekv.journal.vocabulary import Callback


class Envelope:
    """The inner metadata with the run and the step it belongs to.

    With one rank the runtime binds the very object that the leader returned; with several it pickles it. The envelope
    pickles the inner object once, inside its own ``__reduce__``, and so learns size and digest for free; an inner object
    that can't be pickled raises there what it would have raised bare.

    Attributes:
        nbytes, digest: Of the pickled inner metadata; None while nothing was pickled.

    Source: contract.md section 1.4 (step 6) and 3 ("For a transparent wrapper", 4); contract-v2.md section 11 (9).
    """

    __slots__ = ("digest", "inner", "nbytes", "run_id", "step")

    def __init__(
        self, inner: object, run_id: bytes, step: int, nbytes: int | None = None, digest: bytes | None = None
    ) -> None:
        self.inner = inner
        self.run_id = run_id
        self.step = step
        self.nbytes = nbytes
        self.digest = digest

    def __reduce__(self) -> tuple[Any, ...]:
        started = perf_counter_ns()
        try:
            payload = pickle.dumps(self.inner, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            _tell_failure(self.step, started, error)
            raise
        return _open, (payload, self.run_id, self.step)


def _tell_failure(step: int, started_ns: int, error: Exception) -> None:
    """Record that a build's metadata can't travel: the build itself had succeeded, and nothing else will say so."""
    journal = current.journal
    if journal is not None:
        with contextlib.suppress(Exception):  # telemetry must not replace the error that it tells of
            code = int(Callback.BUILD_CONNECTOR_META)
            journal.write(Call(code, started_ns, perf_counter_ns(), step, type(error).__qualname__))


def _open(payload: bytes, run_id: bytes, step: int) -> Envelope:
    # Not stored data: the runtime has just unpickled the envelope itself, from its own leader.
    inner = pickle.loads(payload)  # noqa: S301
    return Envelope(inner, run_id, step, len(payload), xxhash.xxh3_64_digest(payload))
