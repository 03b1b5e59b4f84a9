"""The layer hooks of a large run: a pass has dozens of them, and they are arrays of times already, so they are summed as arrays."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from tracekv.journal.records import LayerHooks, in_ns
from tracekv.journal.vocabulary import Callback
from tracekv.views.coarse import Into
from tracekv.views.runs import Segment
from tracekv.views.summary import SummaryView
from tracekv.views.timeline import Block, Lane, Row

#: Durations that are kept before they go into the histogram.
_MOST_DURATIONS = 1 << 20
#: Nearly all hooks are shorter, and counting in a table of so many places is quicker than sorting.
_SHORT_NS = 1 << 18

_Times = npt.NDArray[np.int64]


def take_hooks(segment: Segment, into: Into) -> None:
    """Count and draw the layer hooks of a process: the passes that begin within one width together."""
    durations = _Durations(into.view)
    for records in segment.lists(LayerHooks):
        for _, alike in itertools.groupby(records, key=_shape):
            _take_passes(list(alike), into, durations)
    durations.close()


def _shape(record: LayerHooks) -> tuple[bool, int, int]:
    return record.in_seconds, len(record.waits) // 16, len(record.saves) // 16


class _Durations:
    """Durations on their way into the summary's histograms, where it is cheapest to take many at once."""

    def __init__(self, view: SummaryView) -> None:
        self._view = view
        self._kept: defaultdict[Callback, list[_Times]] = defaultdict(list)
        self._count = 0

    def add(self, callback: Callback, took: _Times) -> None:
        self._kept[callback].append(took.ravel())
        self._count += took.size
        if self._count > _MOST_DURATIONS:
            self.close()

    def close(self) -> None:
        for callback, kept in self._kept.items():
            took = np.concatenate(kept)
            short = np.bincount(took[took < _SHORT_NS])
            for values, counts in (
                (found := np.flatnonzero(short), short[found]),
                np.unique(took[took >= _SHORT_NS], return_counts=True),
            ):
                self._view.called(callback, dict(zip(values.tolist(), counts.tolist(), strict=True)))
        self._kept.clear()
        self._count = 0


def _take_passes(records: Sequence[LayerHooks], into: Into, durations: _Durations) -> None:
    """Passes with as many layers, in the order of time."""
    width = into.picture.width_ns
    both = {
        Callback.WAIT_FOR_LAYER_LOAD: _times([record.waits for record in records], in_seconds=records[0].in_seconds),
        Callback.SAVE_KV_LAYER: _times([record.saves for record in records], in_seconds=records[0].in_seconds),
    }
    is_plain = np.ones(len(records), bool)
    is_short = is_plain.copy()
    for starts, ends in both.values():
        took = ends - starts
        # Layers that took no time that can be told, weren't called (0, 0), or raised: an end of 0.
        is_plain &= (took > 0).all(axis=1)
        is_short &= (took < width).all(axis=1)
    for at in np.flatnonzero(~is_plain).tolist():
        into.take_singly(in_ns(records[at]))
    for at in np.flatnonzero(is_plain & ~is_short).tolist():
        into.take(into.timeline.hooks(in_ns(records[at])))
    into.view.summary.records += int(is_plain.sum())
    drawn = is_plain & is_short
    for callback, (starts, ends) in both.items():
        durations.add(callback, (ends - starts)[is_plain])
        for group, (first, last) in into.timeline.spans_of_groups(starts.shape[1]):
            lane = Lane(Row.HOOKS, group)
            for block in _blocks(lane, callback.method, starts[drawn, first:last], ends[drawn, first:last], width):
                if block.last_ns >= into.begin and block.first_ns <= into.end:
                    into.picture.add_block(block)


def _times(payloads: Sequence[bytes], *, in_seconds: bool) -> tuple[_Times, _Times]:
    """When the hooks of each pass began and ended, in ns: two arrays of passes by layers."""
    layers = len(payloads[0]) // 16
    stored = b"".join([payload[: 16 * layers] for payload in payloads])
    if in_seconds:
        moments = np.rint(1e9 * np.frombuffer(stored, np.float64)).astype(np.int64)
    else:
        moments = np.frombuffer(stored, np.int64)
    both = moments.reshape(len(payloads), layers, 2)
    return both[..., 0], both[..., 1]


def _blocks(lane: Lane, name: str, starts: _Times, ends: _Times, width: int) -> Iterator[Block]:
    """Passes of one hook and layer group: neighbours that begin in one place are one."""
    if not starts.size:
        return
    took = ends - starts
    begun = starts.min(axis=1)
    place = begun // width
    first = np.flatnonzero(np.diff(place, prepend=place[0] - 1))
    columns = (
        np.minimum.reduceat(begun, first),
        np.maximum.reduceat(ends.max(axis=1), first),
        np.diff(first, append=len(begun)) * took.shape[1],
        np.add.reduceat(took.sum(axis=1), first),
        np.maximum.reduceat(took.max(axis=1), first),
    )
    for begun_ns, ended_ns, bars, busy_ns, longest_ns in zip(*(column.tolist() for column in columns), strict=True):
        yield Block(lane, begun_ns, ended_ns, bars, busy_ns, longest_ns, name)
