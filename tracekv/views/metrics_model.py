"""What the metrics add up in, and what they give out: plain integers inside, points at a scrape."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from tracekv.views.registry import bounds_ns, registry

LabelValue = str | int
#: Name of a metric and the values of its attributes but for the rank, in the registry's order.
Key = tuple[LabelValue, ...]


class Point(msgspec.Struct, frozen=True, gc=False):
    """A value of one set of attributes; seconds and ratios are floats, all else are integers."""

    attributes: dict[str, LabelValue]
    value: int | float


class HistogramPoint(msgspec.Struct, frozen=True, gc=False):
    """A histogram of one set of attributes, in seconds.

    Attributes:
        counts: One per bucket, not added up; the last is of what is above the last bound.
    """

    attributes: dict[str, LabelValue]
    count: int
    sum: float
    min: float
    max: float
    counts: list[int]


class MetricPoints(msgspec.Struct, frozen=True, gc=False):
    """All points of one metric."""

    name: str
    points: list[Point] | list[HistogramPoint]


class Histogram:
    """Durations in nanoseconds, in buckets whose upper bounds belong to them."""

    __slots__ = ("bounds", "counts", "max", "min", "sum")

    def __init__(self, bounds: tuple[int, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0
        self.min: int | None = None
        self.max = 0

    def add(self, duration_ns: int, times: int = 1) -> None:
        """Count a duration; one below 0 (clocks of a torn journal) as 0."""
        if duration_ns < 0:
            duration_ns = 0
        self.counts[bisect_left(self.bounds, duration_ns)] += times
        self.sum += duration_ns * times
        if duration_ns > self.max:
            self.max = duration_ns
        if self.min is None or duration_ns < self.min:
            self.min = duration_ns

    def add_all(self, durations_ns: Sequence[int]) -> None:
        """Count many: sorted first, so that each bucket costs a search and not each duration."""
        ordered = sorted(durations_ns)
        if not ordered:
            return
        if ordered[0] < 0:
            ordered = [max(0, duration) for duration in ordered]
        bounds, counts, position = self.bounds, self.counts, 0
        while position < len(ordered):
            bucket = bisect_left(bounds, ordered[position])
            end = bisect_right(ordered, bounds[bucket], position) if bucket < len(bounds) else len(ordered)
            counts[bucket] += end - position
            position = end
        self.sum += sum(ordered)
        self.max = max(self.max, ordered[-1])
        self.min = ordered[0] if self.min is None else min(self.min, ordered[0])

    def add_summed(self, calls: int, sum_ns: int, max_ns: int) -> None:
        """Count calls of which only sum and longest are told: that one as it was, the others at their mean."""
        if calls < 1:
            return
        total = self.sum + sum_ns
        self.add(max_ns)
        if calls > 1:
            self.add(max(0, sum_ns - max_ns) // (calls - 1), calls - 1)
        self.sum = total

    def merge(self, other: Histogram) -> None:
        """Add another's durations; it has the same bounds."""
        self.counts = [own + its for own, its in zip(self.counts, other.counts, strict=True)]
        self.sum += other.sum
        self.max = max(self.max, other.max)
        if other.min is not None:
            self.min = other.min if self.min is None else min(self.min, other.min)


class Totals:
    """Counters and histograms by :data:`Key`; those of several processes add up."""

    __slots__ = ("counts", "histograms")

    def __init__(self) -> None:
        self.counts: defaultdict[Key, int] = defaultdict(int)
        self.histograms: dict[Key, Histogram] = {}

    def histogram(self, *key: LabelValue) -> Histogram:
        """The histogram of a metric and its attributes, made where there is none."""
        known = self.histograms.get(key)
        if known is None:
            known = self.histograms[key] = Histogram(bounds_ns(str(key[0])))
        return known

    def merge(self, other: Totals) -> None:
        """Add another's."""
        for key, count in other.counts.items():
            self.counts[key] += count
        for key, histogram in other.histograms.items():
            self.histogram(*key).merge(histogram)


class Collected:
    """Gathers points by metric; equal attributes add up."""

    def __init__(self) -> None:
        self._totals: dict[tuple[str, tuple[LabelValue, ...]], int | float] = {}
        self._histograms: dict[tuple[str, tuple[LabelValue, ...]], Histogram] = {}

    def add(self, key: Key, value: float, rank: int | None = None) -> None:
        """Count a value in the metric's own unit: nanoseconds of a metric of seconds become such at the end."""
        name = str(key[0])
        labels = _labels(key, rank)
        self._totals[name, labels] = self._totals.get((name, labels), 0) + value

    def highest(self, key: Key, value: float, rank: int | None = None) -> None:
        """As :meth:`add`, but of equal attributes the highest value counts."""
        name = str(key[0])
        labels = _labels(key, rank)
        self._totals[name, labels] = max(self._totals.get((name, labels), value), value)

    def add_all(self, totals: Totals, rank: int | None = None) -> None:
        """Count what a process or a rank added up."""
        for key, count in totals.counts.items():
            self.add(key, count, rank)
        for key, histogram in totals.histograms.items():
            name = str(key[0])
            place = (name, _labels(key, rank))
            known = self._histograms.get(place)
            if known is None:
                known = self._histograms[place] = Histogram(histogram.bounds)
            known.merge(histogram)

    def metrics(self) -> list[MetricPoints]:
        """Everything, in the registry's order; metrics without a point are left out."""
        points: dict[str, list[Point]] = {}
        histograms: dict[str, list[HistogramPoint]] = {}
        for (name, labels), value in self._totals.items():
            is_time = registry().metrics[name].unit == "s"
            points.setdefault(name, []).append(Point(_attributes(name, labels), value / 1e9 if is_time else value))
        for (name, labels), histogram in self._histograms.items():
            histograms.setdefault(name, []).append(
                HistogramPoint(
                    _attributes(name, labels),
                    sum(histogram.counts),
                    histogram.sum / 1e9,
                    (histogram.min or 0) / 1e9,
                    histogram.max / 1e9,
                    list(histogram.counts),
                )
            )
        known = points | histograms
        return [MetricPoints(name, known[name]) for name in registry().metrics if name in known]


def store_engine(engine: str) -> str:
    """The engine as a word of the closed set."""
    return engine if engine in registry().enums["store_engine"].words else "other"


def _labels(key: Key, rank: int | None) -> tuple[LabelValue, ...]:
    return key[1:] if rank is None else (rank, *key[1:])


def _attributes(name: str, labels: tuple[LabelValue, ...]) -> dict[str, LabelValue]:
    # An empty word is an attribute that the point doesn't have.
    pairs = zip(registry().metrics[name].attributes, labels, strict=True)
    return {attribute: value for attribute, value in pairs if value != ""}
