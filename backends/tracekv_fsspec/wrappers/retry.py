"""Tries a whole operation again, within a deadline."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from itertools import count
from time import monotonic, perf_counter_ns
from typing import TypeVar

from tracekv.journal.vocabulary import Operation, Outcome
from tracekv_fsspec.store import Deadlines, Store, StoreError
from tracekv_fsspec.tally import tally
from tracekv_fsspec.wrappers.base import Wrapper

T = TypeVar("T")

_WORTH_ANOTHER_TRY = frozenset({Outcome.UNAVAILABLE, Outcome.TIMEOUT})
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0


class Retrying(Wrapper):
    """Tries again what failed for now: a body that broke off is read anew from its beginning (trap 7).

    No try begins after half of the deadline, and an engine gives a try less than the other half: so all of them together keep it.
    """

    def __init__(self, inner: Store, deadlines: Deadlines) -> None:
        super().__init__(inner)
        self._deadlines = deadlines
        self._closed = threading.Event()

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        """Call until it works, fails for good, or there is no time left."""
        seconds = self._deadlines.write_s if operation is Operation.PUT else self._deadlines.read_s
        last_start = monotonic() + seconds / 2
        for attempt in count(1):
            tally.attempts = attempt
            try:
                return call()
            except StoreError as error:
                # Full jitter: engines that failed together don't come back together.
                pause = random.uniform(0, min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**attempt))  # noqa: S311
                if error.outcome not in _WORTH_ANOTHER_TRY or monotonic() + pause > last_start:
                    raise
                paused = perf_counter_ns()
                if self._closed.wait(pause):
                    raise
                tally.paced_ns += perf_counter_ns() - paused
        raise AssertionError("unreachable")

    def close(self) -> None:
        """End what waits for its next try."""
        self._closed.set()
        self.inner.close()
