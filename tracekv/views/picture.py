"""Bars that fit on a screen: each as it is while they are few, neighbours as one that says how many when they are not.

A viewer draws some ten thousand bars smoothly. Beyond that, bars that are shorter than a width and begin in the same stretch of that
width on a lane become one; the width grows until few enough are left. No bar is dropped, and none that is longer is touched, so what
is drawn is what happened, at a resolution that is told.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from tracekv.views.timeline import Bar, Block, Lane

#: Drawn smoothly.
MOST_BARS = 20_000
#: Requests that a bar of many names; of more it says that there are more.
_MOST_REQUESTS = 12
_FIRST_WIDTH_NS = 1 << 12
_WIDER = 2


class Many(msgspec.Struct):
    """Neighbouring bars of a lane, as one.

    Attributes:
        busy_ns: Their lengths together.
        names: How many have which name.
        requests: Some of their requests; ``has_more`` where there are others.
        errors: How many went wrong.
    """

    first_ns: int
    last_ns: int
    count: int = 0
    busy_ns: int = 0
    longest_ns: int = 0
    names: dict[str, int] = {}
    requests: dict[int, None] = {}
    has_more: bool = False
    errors: int = 0

    def add(self, bar: Bar) -> None:
        """Take one more."""
        start, end = bar.start_ns, bar.end_ns
        length = end - start
        if start < self.first_ns:
            self.first_ns = start
        if end > self.last_ns:
            self.last_ns = end
        self.count += 1
        self.busy_ns += length
        if length > self.longest_ns:
            self.longest_ns = length
        self.names[bar.name] = self.names.get(bar.name, 0) + 1
        if bar.error is not None:
            self.errors += 1
        if bar.requests:
            self._concern(bar.requests)

    def add_block(self, block: Block) -> None:
        """Take several of one name."""
        self.first_ns, self.last_ns = min(self.first_ns, block.first_ns), max(self.last_ns, block.last_ns)
        self.count += block.bars
        self.busy_ns += block.busy_ns
        self.longest_ns = max(self.longest_ns, block.longest_ns)
        self.names[block.name] = self.names.get(block.name, 0) + block.bars
        self._concern(block.requests)

    def merge(self, other: Many) -> None:
        """Take all of another."""
        self.first_ns, self.last_ns = min(self.first_ns, other.first_ns), max(self.last_ns, other.last_ns)
        self.count += other.count
        self.busy_ns += other.busy_ns
        self.longest_ns = max(self.longest_ns, other.longest_ns)
        self.errors += other.errors
        self.has_more |= other.has_more
        for name, count in other.names.items():
            self.names[name] = self.names.get(name, 0) + count
        self._concern(other.requests)

    def _concern(self, requests: tuple[int, ...] | dict[int, None]) -> None:
        for request in requests:
            if request not in self.requests:
                if len(self.requests) >= _MOST_REQUESTS:
                    self.has_more = True
                    return
                self.requests[request] = None


class Picture:
    """Takes bars of one process, in any order, and keeps at most ``most`` of them, whole or as :class:`Many`.

    Args:
        most: Bars that are kept.
        width_ns: What it begins with; it grows where that isn't enough.

    Attributes:
        width_ns: Bars shorter than this may be drawn as one with their neighbours; 0 while each is as it is.
        bars: How many were taken.
    """

    def __init__(self, most: int = MOST_BARS, width_ns: int = 0) -> None:
        self.width_ns = width_ns
        self.bars = 0
        self._most = most
        self._whole: dict[Lane, list[Bar]] = {}
        self._many: dict[Lane, dict[int, Bar | Many]] = {}
        self._kept = 0

    def add(self, bar: Bar) -> None:
        """Take a bar."""
        self.bars += 1
        if bar.end_ns - bar.start_ns >= self.width_ns:
            self._keep(bar)
        else:
            self._put(bar)
        if self._kept > self._most:
            self._fit()

    def add_block(self, block: Block) -> None:
        """Take several bars at once, which are all shorter than a width."""
        self.bars += block.bars
        bins = self._bins(block.lane)
        place = block.first_ns // self.width_ns
        known = bins.get(place)
        if type(known) is Many:
            known.add_block(block)
            return
        many = Many(block.first_ns, block.last_ns)
        many.add_block(block)
        self._join(block.lane, many)
        if self._kept > self._most:
            self._fit()

    def kept(self) -> Iterator[tuple[Lane, list[Bar | Many]]]:
        """The lanes as they stand, each with what lies on it in the order of time."""
        for lane in sorted(self._whole.keys() | self._many.keys()):
            found: list[Bar | Many] = [*self._whole.get(lane, []), *self._many.get(lane, {}).values()]
            yield lane, sorted(found, key=_start)

    def _keep(self, bar: Bar) -> None:
        self._whole.setdefault(bar.lane, []).append(bar)
        self._kept += 1

    def _put(self, bar: Bar) -> None:
        bins = self._bins(bar.lane)
        place = bar.start_ns // self.width_ns
        known = bins.get(place)
        if known is None:
            bins[place] = bar
            self._kept += 1
        elif type(known) is Many:
            known.add(bar)
        else:
            bins[place] = many = self._of(known)
            many.add(bar)

    def _bins(self, lane: Lane) -> dict[int, Bar | Many]:
        bins = self._many.get(lane)
        if bins is None:
            bins = self._many[lane] = {}
        return bins

    def _join(self, lane: Lane, many: Many) -> None:
        bins = self._bins(lane)
        place = many.first_ns // self.width_ns
        known = bins.get(place)
        if known is None:
            bins[place] = many
            self._kept += 1
        else:
            bins[place] = joined = self._of(known)
            joined.merge(many)

    def _of(self, known: Bar | Many) -> Many:
        if isinstance(known, Many):
            return known
        many = Many(known.start_ns, known.end_ns)
        many.add(known)
        return many

    def _fit(self) -> None:
        # Down to less than is allowed: or each further bar would make it wider again. A lane takes one at the least.
        lanes = len(self._whole.keys() | self._many.keys())
        while self._kept > max(lanes, self._most * 3 // 4):
            self._widen()

    def _widen(self) -> None:
        self.width_ns = self.width_ns * _WIDER or _FIRST_WIDTH_NS
        whole, self._whole = self._whole, {}
        many, self._many = self._many, {}
        self._kept = 0
        for bars in whole.values():
            for bar in bars:
                if bar.end_ns - bar.start_ns >= self.width_ns:
                    self._keep(bar)
                else:
                    self._put(bar)
        for lane, bins in many.items():
            for each in bins.values():
                if isinstance(each, Many):
                    self._join(lane, each)
                else:
                    self._put(each)


def _start(each: Bar | Many) -> int:
    return each.first_ns if isinstance(each, Many) else each.start_ns
