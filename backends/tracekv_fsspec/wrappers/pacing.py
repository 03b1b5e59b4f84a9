"""Fewer requests at once while the store asks for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic, perf_counter_ns
from typing import TypeVar

from tracekv.journal.vocabulary import Operation
from tracekv_fsspec.store import SlowDown, Store
from tracekv_fsspec.tally import tally
from tracekv_fsspec.wrappers.base import Wrapper

T = TypeVar("T")

#: Requests in flight while all is well.
MOST = 16
#: How long a call waits for its turn before it counts as slowed down itself.
_PATIENCE_S = 2.0


class Paced(Wrapper):
    """Halves the calls in flight when the store says SlowDown, and lets one more in per round of good answers (AIMD).

    Source: storage.md section 6, trap 8: clients retry each call by itself and share no pace.
    """

    def __init__(self, inner: Store, most: int = MOST, patience_s: float = _PATIENCE_S) -> None:
        super().__init__(inner)
        self._most = most
        self._patience_s = patience_s
        self._limit = float(most)
        self._in_flight = 0
        self._cut_at = 0.0
        self._changed = threading.Condition()

    @property
    def limit(self) -> int:
        """Calls that may be in flight now."""
        return int(self._limit)

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        """Wait for a turn, then call."""
        self._enter()
        began = monotonic()
        try:
            result = call()
        except SlowDown:
            self._leave(began, is_slow=True)
            raise
        except BaseException:
            self._leave(began)
            raise
        self._leave(began, is_good=True)
        return result

    def _enter(self) -> None:
        with self._changed:
            if self._in_flight >= self.limit:
                waiting = perf_counter_ns()
                turn = self._changed.wait_for(lambda: self._in_flight < self.limit, self._patience_s)
                tally.paced_ns += perf_counter_ns() - waiting
                if not turn:
                    raise SlowDown(f"{self.url} is slowed down: no turn within {self._patience_s:g} s")
            self._in_flight += 1

    def _leave(self, began: float, *, is_slow: bool = False, is_good: bool = False) -> None:
        with self._changed:
            self._in_flight -= 1
            if is_good:
                self._limit = min(float(self._most), self._limit + 1 / self._limit)
            elif is_slow and began >= self._cut_at:  # once per round: calls that were in flight together say the same
                self._limit = max(1.0, self._limit / 2)
                self._cut_at = monotonic()
            self._changed.notify_all()
