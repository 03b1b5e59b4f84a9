"""Bars of a lane as arrays, and how those that begin within one width become one."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from tracekv.journal.arrays import np
from tracekv.journal.columns import Ints, Rows
from tracekv.views.into import Into
from tracekv.views.runs import Segment
from tracekv.views.summary import SummaryView
from tracekv.views.timeline import Bar, Block, Lane, requests_of

#: Durations that are kept before they go into the histogram.
_MOST_DURATIONS = 1 << 20
#: Nearly all are shorter, and counting in a table of so many places is quicker than sorting.
_SHORT_NS = 1 << 18


class Spans(NamedTuple):
    """Bars of one lane and name: when each begins and ends.

    Attributes:
        bar: The bar at a place, for one that is drawn as it is; none where its record isn't of this version.
        requests: Those of the bars at some places, in their order; None where the bars are for none.
    """

    starts: Ints
    ends: Ints
    bar: Callable[[int], Sequence[Bar]]
    requests: Callable[[Rows], Iterable[int]] | None = None


class Stretch(NamedTuple):
    """Neighbours that begin within one width.

    Attributes:
        first, last: They are those at places ``[first, last)``.
    """

    first: int
    last: int
    begun_ns: int
    ended_ns: int
    bars: int
    busy_ns: int
    longest_ns: int


class Durations:
    """Durations on their way into the summary's histograms, where it is cheapest to take many at once."""

    def __init__(self, view: SummaryView) -> None:
        self._view = view
        self._kept: defaultdict[int, list[Ints]] = defaultdict(list)
        self._count = 0

    def add(self, callback: int, took: Ints) -> None:
        """Keep those of a callback."""
        self._kept[callback].append(took.ravel())
        self._count += took.size
        if self._count > _MOST_DURATIONS:
            self.close()

    def close(self) -> None:
        """Count what is kept."""
        for callback, kept in self._kept.items():
            took = np.maximum(np.concatenate(kept), 0)
            short = np.bincount(took[took < _SHORT_NS])
            for values, counts in (
                (found := np.flatnonzero(short), short[found]),
                np.unique(took[took >= _SHORT_NS], return_counts=True),
            ):
                self._view.called(callback, dict(zip(values.tolist(), counts.tolist(), strict=True)))
        self._kept.clear()
        self._count = 0


def stretches(width: int, starts: Ints, ends: Ints, bars: Ints, busy: Ints, longest: Ints) -> Iterator[Stretch]:
    """Neighbours together; ``starts`` are in order, and what stands at a place may be several bars already."""
    if not starts.size:
        return
    place = starts // width
    first = np.flatnonzero(np.diff(place, prepend=place[0] - 1))
    columns = (
        first,
        np.append(first[1:], len(starts)),
        np.minimum.reduceat(starts, first),
        np.maximum.reduceat(ends, first),
        np.add.reduceat(bars, first),
        np.add.reduceat(busy, first),
        np.maximum.reduceat(longest, first),
    )
    yield from itertools.starmap(Stretch, zip(*(column.tolist() for column in columns), strict=True))


def own_bars(segment: Segment, payloads: Sequence[bytes], rows: Rows, into: Into) -> Callable[[int], Sequence[Bar]]:
    """For :class:`Spans`, from encoded records at some rows: the bar of each itself."""

    def bar(at: int) -> Sequence[Bar]:
        record = segment.process.decoded(payloads[rows[at]])
        return () if record is None else into.timeline.bars(record)[:1]

    return bar


def draw(lane: Lane, name: str, spans: Spans, into: Into) -> None:
    """Bars of one lane and name: those that begin within one width together; the long ones, and the only ones there, as they are."""
    starts, ends, bar, requests = spans
    took = ends - starts
    is_within = (np.maximum(starts, ends) >= into.begin) & (starts <= into.end)
    is_short = (took >= 0) & (took < into.picture.width_ns)
    for at in np.flatnonzero(is_within & ~is_short).tolist():
        into.take(bar(at))
    chosen = np.flatnonzero(is_within & is_short)
    if (np.diff(starts[chosen]) < 0).any():
        chosen = chosen[np.argsort(starts[chosen], kind="stable")]
    took = took[chosen]
    ones = np.ones(len(chosen), np.int64)
    for each in stretches(into.picture.width_ns, starts[chosen], ends[chosen], ones, took, took):
        places = chosen[each.first : each.last]
        if each.bars == 1:
            into.take(bar(int(places[0])))
            continue
        named = () if requests is None else tuple(dict.fromkeys(requests(places)))
        into.picture.add_block(Block(lane, *each[2:], name, named))


def take_alike(lane: Lane, name: str, records: Sequence[Any], into: Into) -> None:
    """Count and draw decoded records of one kind, lane and name, none of which failed."""
    into.view.feed_all(records)

    def bar(at: int) -> Sequence[Bar]:
        return into.timeline.bars(records[at])[:1]

    def requests(places: Rows) -> list[int]:
        return [request for at in places.tolist() for request in requests_of(records[at])]

    try:
        starts = np.array([record.started_ns for record in records], np.int64)
        ends = np.array([record.ended_ns for record in records], np.int64)
    except OverflowError:  # a time that an array can't hold
        for at in range(len(records)):
            into.take(bar(at))
        return
    draw(lane, name, Spans(starts, ends, bar, requests), into)
