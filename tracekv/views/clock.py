"""Times of several processes on one axis."""

from __future__ import annotations

from collections.abc import Iterable

from tracekv.journal.layout import JournalFacts


def unix_offsets(processes: Iterable[JournalFacts]) -> list[int]:
    """For each process what to add to its monotonic times to get Unix time, in nanoseconds.

    Processes of one boot share CLOCK_MONOTONIC, so they get the same number, however the wall clock was set meanwhile; others are
    compared by the anchor of their start.
    """
    of_boot: dict[str, int] = {}
    return [of_boot.setdefault(facts.boot_id, facts.wall_ns - facts.monotonic_ns) for facts in processes]
