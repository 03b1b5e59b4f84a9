"""A process's part of a large run in bulk: the same numbers and the same bars' sums, without an object for each of its calls.

Most records of a large run are calls that nobody looks at one by one: plain callbacks, idle polls, and the layer hooks of passes.
Once many of them lie within what is drawn as one bar, their times go straight into that bar and into the summary's histograms.
What is longer than such a bar is wide, what raised, and all that is a request's are taken one by one, as always. Hooks that are
stored in seconds are counted to within a nanosecond: each duration is rounded, not both of its ends, and sums of them once.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from operator import sub
from typing import Any, NamedTuple

import msgspec

from tracekv.journal.naming import KINDS
from tracekv.journal.records import BindCall, Call, IdlePolls, LayerHooks, in_ns
from tracekv.journal.vocabulary import Callback
from tracekv.views.picture import Picture
from tracekv.views.runs import Segment
from tracekv.views.summary import SummaryView
from tracekv.views.timeline import PASSES, Bar, Block, Lane, Row, Timeline, lane_of

_CALLS = (Call, BindCall, IdlePolls)
#: Kinds that are not taken in bulk.
OTHERS = tuple(kind for kind in KINDS if kind not in (*_CALLS, LayerHooks))
#: Passes whose layer hooks are added up at a time, at the most.
_MOST_PASSES = 256
#: Different durations of a hook that are kept before they go into the histogram.
_MOST_DURATIONS = 1 << 16
_WAIT_FOR_SAVE, _POLL = int(Callback.WAIT_FOR_SAVE), int(Callback.GET_FINISHED)
#: In place of a callback's number: the pass that callbacks enclose.
_PASS = -1

_decode_call: Callable[[bytes], Any] = msgspec.msgpack.Decoder(Call | BindCall | IdlePolls).decode
_SECONDS, _NS = struct.Struct("d").unpack_from, struct.Struct("q").unpack_from
_decode_hooks = msgspec.msgpack.Decoder(LayerHooks).decode


class Into(NamedTuple):
    """Where a process's records go.

    Attributes:
        picture: Has a width from the beginning.
        begin, end: What lies outside is counted, and not drawn.
    """

    view: SummaryView
    timeline: Timeline
    picture: Picture
    begin: int
    end: int

    def take(self, bars: Iterable[Bar]) -> None:
        """Draw what lies within."""
        for bar in bars:
            if bar.end_ns >= self.begin and bar.start_ns <= self.end:
                self.picture.add(bar)


def take_calls(segment: Segment, into: Into) -> None:
    """The plain callbacks, the binds and the idle polls of a process, and the passes that they enclose."""
    view, timeline, picture, begin, end = into
    width = picture.width_ns
    durations: dict[int, list[int]] = {}
    #: (callback, place) -> [start, end, bars, busy, longest, record of the first]
    bins: dict[tuple[int, int], list[Any]] = {}
    bound_step, bound_ns = -1, 0

    def put(callback: int, started: int, ended: int, record: Any) -> None:
        length = ended - started
        known = bins.get((callback, started // width))
        if known is None:
            bins[callback, started // width] = [started, ended, 1, length, length, record]
            return
        if started < known[0]:
            known[0] = started
        if ended > known[1]:
            known[1] = ended
        known[2] += 1
        known[3] += length
        if length > known[4]:
            known[4] = length

    for record in _decoded(segment, _decode_call, *_CALLS):
        kind = type(record)
        if kind is IdlePolls:
            callback, started, ended, took = _POLL, record.first_started_ns, record.last_ended_ns, record.max_ns
            is_plain = record.count == 1
        else:
            callback, started, ended = record.callback, record.started_ns, record.ended_ns
            took, is_plain = ended - started, record.error is None
            if kind is BindCall:
                bound_step, bound_ns = record.step, started
            elif callback == _WAIT_FOR_SAVE and bound_step == record.step:
                bound_step = -1
                if ended - bound_ns >= width:
                    into.take([_pass(record, bound_ns, ended)])
                elif ended >= begin and bound_ns <= end:
                    put(_PASS, bound_ns, ended, record)
        if not is_plain:
            view.feed(record)
            into.take(timeline.feed(record)[:1])
            continue
        if callback in durations:
            durations[callback].append(took)
        else:
            durations[callback] = [took]
        if not 0 <= ended - started < width:
            into.take(timeline.feed(record)[:1])
        elif ended >= begin and started <= end:
            put(callback, started, ended, record)
    for callback, each in durations.items():
        view.called(callback, Counter(each))
        view.summary.records += len(each)
    for (callback, _), (first, last, count, busy, longest, record) in bins.items():
        if count == 1:
            into.take([_pass(record, first, last)] if callback == _PASS else timeline.feed(record)[:1])
        else:
            lane, name = (PASSES, "pass") if callback == _PASS else lane_of(callback)
            picture.add_block(Block(lane, first, last, count, busy, longest, name))


def _pass(record: Call, started: int, ended: int) -> Bar:
    return Bar(PASSES, f"pass {record.step}", started, max(started, ended), (), record.step, -1, None, record)


def take_hooks(segment: Segment, into: Into) -> None:
    """The layer hooks of a process: those of one hook and layer group in one place together."""
    counts = _HookCounts(into.view)
    batch: list[LayerHooks] = []
    place = (0, 0, 0, False)
    width = into.picture.width_ns
    for record in _decoded(segment, _decode_hooks, LayerHooks):
        hooks = record.waits or record.saves
        begun = 0
        if len(hooks) >= 16:
            begun = round(1e9 * _SECONDS(hooks)[0]) if record.in_seconds else _NS(hooks)[0]
        here = (begun // width, len(record.waits), len(record.saves), record.in_seconds)
        if batch and (here != place or len(batch) == _MOST_PASSES):
            _take_batch(batch, into, counts)
            batch = []
        place = here
        batch.append(record)
    if batch:
        _take_batch(batch, into, counts)
    counts.close()


class _HookCounts:
    """How often a hook took how long, as the times are stored: in nanoseconds, or in seconds that are rounded once for all."""

    def __init__(self, view: SummaryView) -> None:
        self._view = view
        self._counts: dict[tuple[Callback, bool], Counter[float]] = {}

    def add(self, callback: Callback, durations: Iterable[float], *, in_seconds: bool) -> None:
        counter = self._counts.get((callback, in_seconds))
        if counter is None:
            counter = self._counts[callback, in_seconds] = Counter()
        counter.update(durations)
        if len(counter) > _MOST_DURATIONS:
            self.close()

    def close(self) -> None:
        for (callback, in_seconds), counter in self._counts.items():
            in_ns_each: Counter[int] = Counter()
            for duration, calls in counter.items():
                in_ns_each[round(1e9 * duration) if in_seconds else int(duration)] += calls
            self._view.called(callback, in_ns_each)
        self._counts.clear()


def _take_batch(batch: list[LayerHooks], into: Into, counts: _HookCounts) -> None:
    """Passes that began in one place and have as many layers."""
    in_seconds = batch[0].in_seconds
    blocks: list[Block] = []
    counted: list[tuple[Callback, list[float]]] = []
    for callback, payloads in (
        (Callback.WAIT_FOR_LAYER_LOAD, [record.waits for record in batch]),
        (Callback.SAVE_KV_LAYER, [record.saves for record in batch]),
    ):
        for group, (first, last) in into.timeline.spans_of_groups(len(payloads[0]) // 16):
            layers = last - first
            joined = b"".join([payload[16 * first : 16 * last] for payload in payloads])
            times: tuple[float, ...] = struct.unpack(f"{len(joined) // 8}{'d' if in_seconds else 'q'}", joined)
            starts, ends = times[::2], times[1::2]
            took = list(map(sub, ends, starts))
            if min(took) <= 0:
                # Layers that took no time that can be told, weren't called (0, 0), or raised: an end of 0.
                for record in batch:
                    _take_exactly(record, into)
                return
            counted.append((callback, took))
            # Passes follow one another.
            bounds = (min(starts[:layers]), max(ends[-layers:]), sum(took), max(took))
            begun, ended, busy, longest = (round(1e9 * each) if in_seconds else int(each) for each in bounds)
            blocks.append(Block(Lane(Row.HOOKS, group), begun, ended, len(took), busy, longest, callback.method))
    into.view.summary.records += len(batch)
    for callback, took in counted:
        counts.add(callback, took, in_seconds=in_seconds)
    if any(block.longest_ns >= into.picture.width_ns for block in blocks):  # no picture of one place: as each is
        for record in batch:
            into.take(into.timeline.hooks(in_ns(record)))
        return
    for block in blocks:
        if block.last_ns >= into.begin and block.first_ns <= into.end:
            into.picture.add_block(block)


def _take_exactly(record: LayerHooks, into: Into) -> None:
    told = in_ns(record)
    into.view.feed(told)
    into.take(into.timeline.feed(told))


def _decoded(segment: Segment, decoding: Callable[[bytes], Any], *kinds: Any) -> Iterator[Any]:
    for _, payload in segment.process.payloads(*kinds, first=segment.first, last=segment.last):
        try:
            yield decoding(payload)
        except msgspec.DecodeError:
            segment.process.undecodable += 1
