"""Interleaved rounds: what is compared takes turns, so that a machine whose speed drifts treats all alike."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


def journal_folder() -> tempfile.TemporaryDirectory[str]:
    """A temporary folder where journals lie by default too: in a tmpfs, whose pages are never written back and faulted in again."""
    shared = "/dev/shm"  # noqa: S108  # the tmpfs itself
    return tempfile.TemporaryDirectory(prefix="tracekv-bench-", dir=shared if os.access(shared, os.W_OK) else None)


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of some values."""
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:.3g} [{self.low:.3g}, {self.high:.3g}]"


def interleave(contenders: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Run each contender once a round, the first of a round changing; what each returned, by name."""
    names = list(contenders)
    results: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            results[name].append(contenders[name]())
    return results


def paired(
    results: Mapping[str, Sequence[float]], name: str, base: str, combine: Callable[[float, float], float]
) -> Spread:
    """``combine(name's, base's)`` round by round."""
    return Spread.of([combine(mine, theirs) for mine, theirs in zip(results[name], results[base], strict=True)])
