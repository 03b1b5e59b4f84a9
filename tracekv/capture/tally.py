"""Calls that are counted instead of recorded, while tracing costs too much."""

from __future__ import annotations

from tracekv.journal.records import CallCounts

_EVERY_NS = 1_000_000_000


class CallTally:
    """Calls, their sum and their longest, by callback. On the engine's thread."""

    __slots__ = ("_counts", "_since_ns")

    def __init__(self) -> None:
        self._counts: dict[int, tuple[int, int, int]] = {}
        self._since_ns = 0

    def __bool__(self) -> bool:
        return bool(self._counts)

    def add(self, code: int, started: int, ended: int) -> bool:
        """Count a call; whether it is time to :meth:`take` what was counted."""
        took = ended - started
        calls, total, longest = self._counts.get(code, (0, 0, 0))
        self._counts[code] = (calls + 1, total + took, max(longest, took))
        return ended - self._since_ns > _EVERY_NS

    def take(self, step: int, now_ns: int) -> CallCounts:
        """The record of what was counted since the last one."""
        since, self._since_ns = self._since_ns, now_ns
        counts, self._counts = self._counts, {}
        return CallCounts(step, since, now_ns, [(code, *numbers) for code, numbers in counts.items()])
