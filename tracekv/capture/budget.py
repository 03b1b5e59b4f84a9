"""How much of the engine thread's time tracing takes, and when that is too much."""

from __future__ import annotations

#: What two clock readings and two stores of a per-layer hook cost; it is too little to be measured in place.
HOOK_NS = 250
#: Entering a callback, before the inner call.
ENTER_NS = 300
_WINDOW_NS = 1_000_000_000
#: After so long full records are tried again.
_PAUSE_NS = 60_000_000_000


class Budget:
    """Adds up what tracing cost since the window began; judged once a step.

    Attributes:
        spent_ns: Cost in this window; the recorders add to it.
        is_reduced: Whether only counters are kept.
    """

    __slots__ = ("_limit", "_resumes_ns", "_window_began_ns", "is_reduced", "share", "spent_ns")

    def __init__(self, percent: float) -> None:
        self._limit = percent / 100
        self._window_began_ns = 0
        self._resumes_ns = 0
        self.spent_ns = 0
        self.share = 0.0
        self.is_reduced = False

    @property
    def limit_ppm(self) -> int:
        """The share that tracing may have, in parts per million."""
        return round(self._limit * 1e6)

    def changes_at(self, now_ns: int) -> bool:
        """Judge at ``now_ns``; True where tracing has to be reduced, or may be full again, from now on."""
        elapsed = now_ns - self._window_began_ns
        if elapsed < _WINDOW_NS:
            return False
        is_first = self._window_began_ns == 0
        spent, self.spent_ns = self.spent_ns, 0
        self._window_began_ns = now_ns
        if is_first:
            return False
        self.share = spent / elapsed
        if self.is_reduced:
            if now_ns < self._resumes_ns:
                return False
            self.is_reduced = False
            return True
        if self.share <= self._limit:
            return False
        self.is_reduced = True
        self._resumes_ns = now_ns + _PAUSE_NS
        return True
