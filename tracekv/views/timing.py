"""Where a stretch of time went: what happened in it, laid over one another by precedence, so that the parts add up to the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Interval = tuple[int, int]
"""Begin and end, in nanoseconds of one clock; an end before the begin counts as empty."""


def partition(begin: int, end: int, layers: Mapping[str, Sequence[Interval]], rest: str) -> dict[str, int]:
    """How long of ``[begin, end)`` each layer is on top, the first named being the topmost; what none covers is ``rest``.

    Every nanosecond goes to exactly one name, so the values add up to ``end - begin`` whatever the intervals are.

    Args:
        begin, end: The whole; an end before the begin is taken as the begin.
        layers: By name, when it was so. Intervals may overlap, lie outside the whole, and come in any order.
        rest: Name of the remainder.
    """
    parts = dict.fromkeys([*layers, rest], 0)
    free = [(begin, max(begin, end))]
    for name, intervals in layers.items():
        free, taken = _take(free, merged(intervals))
        parts[name] += taken
    parts[rest] += length(free)
    return parts


def merged(intervals: Sequence[Interval]) -> list[Interval]:
    """The same time as intervals that are in order and don't touch."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def length(intervals: Sequence[Interval]) -> int:
    """How long intervals that don't overlap are together."""
    return sum(end - begin for begin, end in intervals)


def overlap(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """The time that is in both."""
    found: list[Interval] = []
    mine, theirs = merged(first), merged(second)
    i = j = 0
    while i < len(mine) and j < len(theirs):
        begin, end = max(mine[i][0], theirs[j][0]), min(mine[i][1], theirs[j][1])
        if begin < end:
            found.append((begin, end))
        if mine[i][1] < theirs[j][1]:
            i += 1
        else:
            j += 1
    return found


def without(wanted: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """The time that is in the first and not in the second."""
    return _take(merged(wanted), merged(other))[0]


def _take(free: Sequence[Interval], wanted: Sequence[Interval]) -> tuple[list[Interval], int]:
    """What is left of ``free`` without ``wanted`` (both in order), and how much was taken."""
    left: list[Interval] = []
    at = 0
    for begin, end in free:
        while at < len(wanted) and wanted[at][1] <= begin:
            at += 1
        ahead, position = at, begin
        while ahead < len(wanted) and wanted[ahead][0] < end:
            if wanted[ahead][0] > position:
                left.append((position, wanted[ahead][0]))
            position = min(end, max(position, wanted[ahead][1]))
            ahead += 1
        if position < end:
            left.append((position, end))
    return left, length(free) - length(left)
