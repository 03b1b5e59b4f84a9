"""The plain callbacks of a large run: a pass has several of them, and they tell little more than when they began and ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tracekv.journal.arrays import np, npt
from tracekv.journal.columns import Columns, Ints, Rows, alike
from tracekv.journal.process_scan import Batch
from tracekv.journal.records import BindCall, Call, IdlePolls, Record
from tracekv.journal.vocabulary import Callback
from tracekv.views.bulk.drawing import Durations, Spans, draw, own_bars
from tracekv.views.into import Into
from tracekv.views.runs import Segment
from tracekv.views.timeline import PASSES, Bar, lane_of

#: What a column holds.
_MOST = (1 << 63) - 1


class _Calls(NamedTuple):
    """Calls as columns.

    Attributes:
        singly: Those that raised, or that columns can't hold, decoded; what isn't of this version is in neither.
        callbacks: -1 for what may end no pass.
    """

    numbers: Ints
    callbacks: Ints
    starts: Ints
    ends: Ints
    steps: Ints
    is_plain: npt.NDArray[np.bool_]
    singly: list[Record]


def take_calls(segment: Segment, into: Into) -> None:
    """The plain callbacks, the binds and the idle polls of a process, and the passes that they enclose."""
    durations = Durations(into.view)
    passes = _Passes()
    for found in segment.batches_by_kind(BindCall, Call, IdlePolls):
        binds, calls = (_read(segment, kind, found[kind]) for kind in (BindCall, Call))
        _take_plain(segment, binds, found[BindCall], into, durations)
        _take_plain(segment, calls, found[Call], into, durations)
        _draw_passes(segment, *passes.between(binds, calls), calls, found[Call], into)
        _take_polls(segment, found[IdlePolls], into, durations)
    durations.close()


def _read(segment: Segment, kind: type[Call], batch: Batch) -> _Calls:
    columns = Columns(kind, batch.payloads)
    callbacks, starts, ends, steps = columns.ints(), columns.ints(), columns.ints(), columns.ints()
    columns.nil()
    singly: list[Record] = []
    for at in np.flatnonzero(columns.odd).tolist():
        record = segment.process.decoded(batch.payloads[at])
        callbacks[at] = -1
        if record is None:
            continue
        singly.append(record)
        if isinstance(record, Call) and max(record.started_ns, record.ended_ns, record.step, record.callback) <= _MOST:
            callbacks[at], starts[at] = record.callback, record.started_ns
            ends[at], steps[at] = record.ended_ns, record.step
    numbers = np.asarray(batch.numbers, np.int64)
    return _Calls(numbers, callbacks, starts, ends, steps, ~columns.odd, singly)


def _take_plain(segment: Segment, calls: _Calls, batch: Batch, into: Into, durations: Durations) -> None:
    for record in calls.singly:
        into.view.feed(record)
        into.take(into.timeline.bars(record)[:1])
    into.view.summary.records += int(calls.is_plain.sum())
    for (callback,), rows in alike(calls.is_plain, calls.callbacks):
        starts, ends = calls.starts[rows], calls.ends[rows]
        durations.add(callback, ends - starts)
        draw(*lane_of(callback), Spans(starts, ends, own_bars(segment, batch.payloads, rows, into)), into)


class _Passes:
    """Finds the passes: from a bind to the first ``wait_for_save`` of its step, unless another bind comes before."""

    def __init__(self) -> None:
        #: The last bind so far while its pass goes on: number, start and step.
        self._open = (-1, 0, -1)

    def between(self, binds: _Calls, calls: _Calls) -> tuple[Ints, Rows]:
        """Where the passes begin that a batch's calls end, and the places of those calls."""
        known = np.flatnonzero(binds.callbacks >= 0)
        columns = zip(self._open, (binds.numbers, binds.starts, binds.steps), strict=True)
        numbers, starts, steps = (np.append(np.int64(before), column[known]) for before, column in columns)
        saves = np.flatnonzero(calls.callbacks == Callback.WAIT_FOR_SAVE)
        bind = np.searchsorted(numbers, calls.numbers[saves]) - 1
        ends_it = steps[bind] == calls.steps[saves]
        bind, first = np.unique(bind[ends_it], return_index=True)
        is_over = bool(bind.size) and int(bind[-1]) == len(numbers) - 1
        self._open = (int(numbers[-1]), int(starts[-1]), -1 if is_over else int(steps[-1]))
        return starts[bind], saves[ends_it][first]


def _draw_passes(segment: Segment, starts: Ints, saves: Rows, calls: _Calls, batch: Batch, into: Into) -> None:
    ends = calls.ends[saves]

    def bar(at: int) -> Sequence[Bar]:
        record = segment.process.decoded(batch.payloads[saves[at]])
        if record is None:
            return ()
        begun, step = int(starts[at]), int(calls.steps[saves[at]])
        return (Bar(PASSES, f"pass {step}", begun, max(begun, int(ends[at])), (), step, -1, None, record),)

    draw(PASSES, "pass", Spans(starts, ends, bar), into)


def _take_polls(segment: Segment, batch: Batch, into: Into, durations: Durations) -> None:
    columns = Columns(IdlePolls, batch.payloads)
    _, counts, _, longest, starts, ends = (columns.ints() for _ in range(6))
    is_one = ~columns.odd & (counts == 1)
    for at in np.flatnonzero(~is_one).tolist():
        record = segment.process.decoded(batch.payloads[at])
        if record is not None:
            into.take_singly(record)
    rows = np.flatnonzero(is_one)
    into.view.summary.records += len(rows)
    durations.add(Callback.GET_FINISHED, longest[rows])
    bars = own_bars(segment, batch.payloads, rows, into)
    draw(*lane_of(Callback.GET_FINISHED), Spans(starts[rows], ends[rows], bars), into)
