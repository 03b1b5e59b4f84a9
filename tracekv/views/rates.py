"""Bytes in flight and bandwidth over time, from transfers: exact steps, not samples.

A transfer's bytes are in flight from its start to its end, and it runs at its mean rate; what several move at once adds up. So each
level holds until the next one, and the bandwidth's integral is the bytes that moved.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import NamedTuple

from tracekv.journal.records import Transfer
from tracekv.journal.vocabulary import Direction, Source

#: A transfer is taken as at least so long: the rate of one that began and ended at the same nanosecond would be without bound.
SHORTEST_NS = 1_000
#: Changes that wait for a transfer that began before them and is told later.
_MOST_WAITING = 65_536


class Level(NamedTuple):
    """From ``at_ns`` (monotonic) until the next level of the same direction and source."""

    at_ns: int
    direction: Direction
    source: Source
    bytes_in_flight: int
    bytes_per_s: int


class TransferRates:
    """Consumes the transfers of one journal, in the order in which they were told, and gives levels in the order of time.

    The sources of bytes are kept apart, since the same bytes may be known twice. Failed transfers moved nothing. Memory is bounded: of
    a transfer that began further back than what waits, the part before counts at the first level that is left.
    """

    def __init__(self) -> None:
        self._changes: list[tuple[int, Direction, Source, int, int]] = []
        self._levels: dict[tuple[Direction, Source], tuple[int, int]] = {}
        self._told_ns = 0

    def add(self, record: Transfer) -> Iterator[Level]:
        """Take a transfer; the levels that no later one can change."""
        if record.error is not None or record.nbytes <= 0:
            return
        start = max(record.started_ns, self._told_ns)
        end = max(start, record.ended_ns, record.started_ns + SHORTEST_NS)
        rate = record.nbytes * 1_000_000_000 // max(SHORTEST_NS, record.ended_ns - record.started_ns)
        heapq.heappush(self._changes, (start, record.direction, record.source, record.nbytes, rate))
        heapq.heappush(self._changes, (end, record.direction, record.source, -record.nbytes, -rate))
        if len(self._changes) > _MOST_WAITING:
            yield from self._take(_MOST_WAITING // 2)

    def close(self) -> Iterator[Level]:
        """No more transfers come: the levels that are left, down to nothing in flight."""
        yield from self._take(0)

    def _take(self, keep: int) -> Iterator[Level]:
        while len(self._changes) > keep:
            at, direction, source, nbytes, rate = heapq.heappop(self._changes)
            self._told_ns = max(self._told_ns, at)
            flying, speed = self._levels.get((direction, source), (0, 0))
            self._levels[direction, source] = flying, speed = flying + nbytes, speed + rate
            following = self._changes[0] if self._changes else None
            # Changes of one moment are one level.
            if following is None or following[:3] != (at, direction, source):
                yield Level(at, direction, source, flying, speed)
