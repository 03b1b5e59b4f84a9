"""A store that is down means misses at once, not waits."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from time import monotonic
from typing import TypeVar

from tracekv.journal.vocabulary import Operation, Outcome
from tracekv_fsspec.store import Store, StoreError
from tracekv_fsspec.tally import tally
from tracekv_fsspec.wrappers.base import Wrapper

T = TypeVar("T")

_log = logging.getLogger("tracekv.fsspec")

_MEANS_DOWN = frozenset({Outcome.UNAVAILABLE, Outcome.TIMEOUT})
#: So many operations in a row have to fail.
FAILURES = 4
FIRST_COOL_OFF_S = 1.0
LONGEST_COOL_OFF_S = 30.0


class Breaker(Wrapper):
    """Opens after some failures in a row; then one call per cool-off is let through to see whether the store is back.

    Args:
        clock: Seconds; for tests.
    """

    def __init__(self, inner: Store, failures: int = FAILURES, clock: Callable[[], float] = monotonic) -> None:
        super().__init__(inner)
        self._most = failures
        self._clock = clock
        self._failures = 0
        self._cool_off_s = 0.0
        self._opened_at = 0.0
        self._is_probing = False
        self._lock = threading.Lock()

    @property
    def state(self) -> str:
        """``closed``, ``open`` or ``half_open`` (a call is finding out)."""
        if not self._cool_off_s:
            return "closed"
        return "half_open" if self._is_probing else "open"

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        """Refuse, or call and learn from it."""
        is_probe = self._admit()
        try:
            result = call()
        except StoreError as error:
            self._learn(error.outcome in _MEANS_DOWN, is_probe)
            raise
        except BaseException:
            self._learn(None, is_probe)
            raise
        self._learn(False, is_probe)
        return result

    def _admit(self) -> bool:
        with self._lock:
            tally.breaker = self.state
            if not self._cool_off_s:
                return False
            if self._is_probing or self._clock() - self._opened_at < self._cool_off_s:
                raise StoreError(Outcome.UNAVAILABLE, f"{self.url} is taken as down; it is tried again within seconds")
            self._is_probing = True
            tally.breaker = self.state
            return True

    def _learn(self, failed: bool | None, is_probe: bool) -> None:
        with self._lock:
            if is_probe:
                self._is_probing = False
            if failed is None:
                return
            if not failed:
                if self._cool_off_s and not is_probe:
                    return  # it began before the breaker opened
                if self._cool_off_s:
                    _log.info("tracekv: %s answers again", self.url)
                self._failures, self._cool_off_s = 0, 0.0
                return
            self._failures += 1
            if is_probe:
                self._cool_off_s = min(LONGEST_COOL_OFF_S, self._cool_off_s * 2)
                self._opened_at = self._clock()
            elif self._failures >= self._most and not self._cool_off_s:
                self._cool_off_s, self._opened_at = FIRST_COOL_OFF_S, self._clock()
                _log.warning(
                    "tracekv: %s failed %d times in a row: taken as down, so its blocks are misses",
                    self.url,
                    self._failures,
                )
