"""A process's part of a large run in bulk: the same numbers and the same bars' sums, without an object for each of its bars.

Once many bars lie within what is drawn as one, nobody looks at them one by one. So records are taken by lane and name: the times of
those that begin within one width go into one bar, and those of plain callbacks and layer hooks straight into the summary's
histograms. What is longer than a width, what raised, and what is told otherwise than by a start and an end is taken one by one, as
always.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from operator import gt, sub
from typing import Any, NamedTuple

from tracekv.journal.naming import KINDS
from tracekv.journal.records import (
    AllocCall,
    BindCall,
    BuildCall,
    Call,
    FinishCall,
    IdlePolls,
    LayerHooks,
    Lookup,
    QueryCall,
    Record,
    StoreOperation,
    Transfer,
)
from tracekv.journal.vocabulary import Callback, Direction, MissReason, Operation, Outcome, Source, Tier
from tracekv.views.picture import Picture
from tracekv.views.runs import Segment
from tracekv.views.summary import SummaryView
from tracekv.views.timeline import (
    PASSES,
    Bar,
    Block,
    Lane,
    Timeline,
    lane_of,
    lane_of_lookup,
    lane_of_store,
    lane_of_transfers,
    requests_of,
)

_CALLS = (Call, BindCall, IdlePolls)
_OTHERS = tuple(kind for kind in KINDS if kind not in (*_CALLS, LayerHooks))
_WAIT_FOR_SAVE = int(Callback.WAIT_FOR_SAVE)


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

    def take_singly(self, record: Record) -> None:
        """Count a record, and draw its bars."""
        self.view.feed(record)
        self.take(self.timeline.feed(record))

    def own_bar(self, record: Record, _started: int, _ended: int) -> Bar:
        """The bar of a record itself."""
        return self.timeline.bars(record)[0]


class _Spans(NamedTuple):
    """Bars of one lane and name that are to be drawn: when each begins and ends, its record, and its requests where it has any."""

    starts: list[int]
    ends: list[int]
    records: Sequence[Any]
    requests: Sequence[Sequence[int]] = ()

    def only(self, chosen: Sequence[int]) -> _Spans:
        """Those at some places."""
        return _Spans(
            [self.starts[at] for at in chosen],
            [self.ends[at] for at in chosen],
            [self.records[at] for at in chosen],
            [self.requests[at] for at in chosen] if self.requests else (),
        )


def take_in_bulk(segment: Segment, into: Into) -> None:
    """All records of a process; the requests that are still open at its end are not drawn."""
    from tracekv.views.coarse_hooks import take_hooks  # numpy's import takes longer than a small report

    _take_calls(segment, into)
    take_hooks(segment, into)
    _take_others(segment, into)


def _take_calls(segment: Segment, into: Into) -> None:
    """The plain callbacks, the binds and the idle polls of a process, and the passes that they enclose."""
    view, timeline = into.view, into.timeline
    bound_step, bound_ns = -1, 0

    for records in segment.lists(*_CALLS):
        calls: defaultdict[int, list[Call]] = defaultdict(list)
        polls: list[IdlePolls] = []
        passes: list[tuple[int, Call]] = []
        for record in records:
            kind = type(record)
            if kind is IdlePolls:
                if record.count == 1:
                    polls.append(record)
                else:
                    into.take_singly(record)
                continue
            callback = record.callback
            if kind is BindCall:
                bound_step, bound_ns = record.step, record.started_ns
            elif callback == _WAIT_FOR_SAVE and bound_step == record.step:
                bound_step = -1
                passes.append((bound_ns, record))
            if record.error is None:
                calls[callback].append(record)
            else:
                view.feed(record)
                into.take(timeline.bars(record)[:1])
        for callback, each in calls.items():
            spans = _Spans([record.started_ns for record in each], [record.ended_ns for record in each], each)
            view.called(callback, Counter(map(sub, spans.ends, spans.starts)))
            _draw(*lane_of(callback), spans, into, into.own_bar)
        view.called(Callback.GET_FINISHED, Counter([poll.max_ns for poll in polls]))
        spans = _Spans([poll.first_started_ns for poll in polls], [poll.last_ended_ns for poll in polls], polls)
        _draw(*lane_of(Callback.GET_FINISHED), spans, into, into.own_bar)
        spans = _Spans([begun for begun, _ in passes], [end.ended_ns for _, end in passes], [end for _, end in passes])
        _draw(PASSES, "pass", spans, into, _pass)
        view.summary.records += len(polls) + sum(map(len, calls.values()))


def _pass(record: Any, started: int, ended: int) -> Bar:
    return Bar(PASSES, f"pass {record.step}", started, max(started, ended), (), record.step, -1, None, record)


def _take_others(segment: Segment, into: Into) -> None:
    """What is left, in order for the sake of the requests; what there is much of is drawn in bulk."""
    view, timeline = into.view, into.timeline
    for records in segment.lists(*_OTHERS):
        into.take(timeline.requests(records))
        calls: defaultdict[int, list[Call]] = defaultdict(list)
        lookups: defaultdict[MissReason | None, list[Lookup]] = defaultdict(list)
        moves: defaultdict[tuple[Direction, int, Source, Tier], list[Transfer]] = defaultdict(list)
        stores: defaultdict[tuple[Operation, Outcome], list[StoreOperation]] = defaultdict(list)
        for record in records:
            kind = type(record)
            if kind is StoreOperation and record.error is None:
                stores[record.operation, record.outcome].append(record)
            elif kind is Transfer and record.error is None:
                moves[record.direction, record.layer_group, record.source, record.tier].append(record)
            elif kind is Lookup:
                lookups[record.reason].append(record)
            elif kind in _REQUEST_CALLS and record.error is None:
                calls[record.callback].append(record)
            else:
                view.feed(record)
                into.take(timeline.bars(record))
        for what, operations in stores.items():
            view.stored(*what, operations)
            view.summary.records += len(operations)
            _draw(*lane_of_store(*what), _spans(operations), into, into.own_bar)
        rows: list[tuple[tuple[Lane, str], Sequence[Record]]] = [
            *((lane_of(callback), each) for callback, each in calls.items()),
            *((lane_of_lookup(reason), each) for reason, each in lookups.items()),
            *((lane_of_transfers(*way), each) for way, each in moves.items()),
        ]
        for (lane, name), records_of_row in rows:
            view.feed_all(records_of_row)
            _draw(lane, name, _spans(records_of_row), into, into.own_bar)


#: Calls that are for requests, and frequent.
_REQUEST_CALLS = frozenset((BuildCall, QueryCall, AllocCall, FinishCall))


def _spans(records: Sequence[Any]) -> _Spans:
    requests = [requests_of(record) for record in records]
    return _Spans([record.started_ns for record in records], [record.ended_ns for record in records], records, requests)


def _draw(lane: Lane, name: str, spans: _Spans, into: Into, bar_of: Callable[[Record, int, int], Bar]) -> None:
    """Bars of one lane and name: those that begin within one width together; the long ones, and the only ones there, as they are."""
    if not spans.starts:
        return
    width = into.picture.width_ns
    took = list(map(sub, spans.ends, spans.starts))
    if min(took) < 0 or max(took) >= width or min(spans.ends) < into.begin or max(spans.starts) > into.end:
        short = []
        for at, (started, ended, record) in enumerate(zip(*spans[:3], strict=True)):
            if not 0 <= ended - started < width:
                into.take([bar_of(record, started, ended)])
            elif ended >= into.begin and started <= into.end:
                short.append(at)
        spans = spans.only(short)
    if any(map(gt, spans.starts, spans.starts[1:])):
        spans = spans.only(sorted(range(len(spans.starts)), key=spans.starts.__getitem__))
    starts, ends, records, requests = spans
    took = list(map(sub, ends, starts))
    first = 0
    while first < len(starts):
        last = bisect_left(starts, (starts[first] // width + 1) * width, first)
        if last == first + 1:
            into.take([bar_of(records[first], starts[first], ends[first])])
        else:
            lengths = took[first:last]
            named = tuple({request: None for each in requests[first:last] for request in each})
            bounds = (starts[first], max(ends[first:last]))
            into.picture.add_block(Block(lane, *bounds, len(lengths), sum(lengths), max(lengths), name, named))
        first = last
