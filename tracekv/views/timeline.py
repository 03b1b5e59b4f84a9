"""What a process did as bars on lanes: the one picture that the report draws and Perfetto opens.

A bar stands for what one record tells, from its start to its end. Which lane it lies on follows from the record alone, so that live
and recorded journals look alike. Lanes of several layer groups stand one below the other, as do loads and saves.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from enum import IntEnum
from operator import sub
from typing import NamedTuple

import msgspec

from tracekv.journal.records import (
    AllocCall,
    BindCall,
    BuildCall,
    Call,
    CallCounts,
    CancelLoadCall,
    Drop,
    Enqueued,
    Finding,
    FinishCall,
    FinishedCall,
    IdlePolls,
    LayerHooks,
    Lookup,
    Prefetch,
    QueryCall,
    Record,
    RequestResetCall,
    StoreOperation,
    TracerFault,
    TracingReduced,
    Transfer,
)
from tracekv.journal.vocabulary import Callback, Direction, MissReason, Operation, Outcome, Side, Source, Tier
from tracekv.views.facts import TELLING, UNKNOWN_GROUP, Facts, callback_name, hook_times
from tracekv.views.stories import Stories
from tracekv.views.story import Story


class Row(IntEnum):
    """Kinds of lanes, in the order in which they stand below a process."""

    __hash__ = int.__hash__

    REQUESTS = 0
    EVENTS = 1
    LOOKUPS = 2
    SCHEDULER = 3
    WORKER = 4
    PASSES = 5
    HOOKS = 6
    LOADS = 7
    SAVES = 8
    STORE = 9
    IDLE = 10
    COUNTED = 11


class Lane(NamedTuple):
    """A lane of one process; lanes sort as they stand.

    Attributes:
        group: Layer group, -2 where the lane is of none.
        what: A store operation; of transfers how their bytes are known, where the connector doesn't report them.
    """

    row: Row
    group: int = -2
    what: str = ""

    @property
    def label(self) -> str:
        """Its name for people."""
        group = f", group {'?' if self.group == UNKNOWN_GROUP else self.group}" if self.group != -2 else ""
        what = f" {self.what}" if self.what and self.row is Row.STORE else f" ({self.what})" if self.what else ""
        return f"{_LABELS[self.row]}{group}{what}"


_LABELS = {
    Row.REQUESTS: "requests",
    Row.EVENTS: "events",
    Row.LOOKUPS: "lookups",
    Row.SCHEDULER: "scheduler callbacks",
    Row.WORKER: "worker callbacks",
    Row.PASSES: "forward passes",
    Row.HOOKS: "layer hooks",
    Row.LOADS: "load",
    Row.SAVES: "save",
    Row.STORE: "store",
    Row.IDLE: "idle polls",
    Row.COUNTED: "only counted",
}
_WAIT, _SAVE = Callback.WAIT_FOR_LAYER_LOAD.method, Callback.SAVE_KV_LAYER.method
_EVENTS = Lane(Row.EVENTS)
_SIDES = {Side.SCHEDULER: Lane(Row.SCHEDULER), Side.WORKER: Lane(Row.WORKER)}
PASSES = Lane(Row.PASSES)
_IDLE = Lane(Row.IDLE)
_COUNTED = Lane(Row.COUNTED)


class Bar(msgspec.Struct, gc=False):
    """Something that took from ``start_ns`` to ``end_ns`` (monotonic, of its process); a moment where they are equal.

    Attributes:
        requests: Ids of the requests that it was for.
        step: The pass it belongs to, 0 for none.
        layer: Of a per-layer hook, else -1.
        error: Class name of what went wrong, or None.
        record: What it was made from; of a per-layer hook all hooks of its pass, of a request its story.
    """

    lane: Lane
    name: str
    start_ns: int
    end_ns: int
    requests: tuple[int, ...]
    step: int
    layer: int
    error: str | None
    record: Record | Story


class Block(NamedTuple):
    """Several bars of one name, from the start of the first to the end of the last."""

    lane: Lane
    first_ns: int
    last_ns: int
    bars: int
    busy_ns: int
    longest_ns: int
    name: str
    requests: tuple[int, ...] = ()


class Timeline:
    """Consumes the records of one journal and gives the bars that each of them ends. Keeps the pass in progress and open requests.

    Attributes:
        facts: The process.
    """

    def __init__(self, facts: Facts | None = None) -> None:
        self.facts = facts or Facts()
        self._stories = Stories()
        self._pass_step = -1
        self._pass_start_ns = 0
        self._spans: tuple[int, list[tuple[int, tuple[int, int]]]] | None = None

    def feed(self, record: Record) -> list[Bar]:
        """Take one record."""
        kind = type(record)
        if kind in TELLING:
            self.facts.observe(record)
            self._spans = None
        return self.bars(record) + self.requests((record,))

    def requests(self, records: Iterable[Record]) -> list[Bar]:
        """Only the bars of requests that some records end."""
        # Only the process with the scheduler knows of requests; others move their part of them.
        if not self.facts.has_scheduler:
            return []
        return [_request(story) for story in self._stories.feed_all(records)]

    def close(self) -> list[Bar]:
        """No more records come: the requests that are still open."""
        return [_request(story) for story in self._stories.close()]

    def bars(self, record: Record) -> list[Bar]:
        """Only the bars of a record itself: its own first, then those of what it ends."""
        match record:
            case LayerHooks():
                return self.hooks(record)
            case Transfer():
                return [self._transfer(record)]
            case Call():
                return self._call(record)
            case IdlePolls():
                return [self._idle(record)]
            case Lookup():
                return [
                    _bar(
                        *lane_of_lookup(record.reason), record.started_ns, record.ended_ns, record, requests_of(record)
                    )
                ]
            case StoreOperation():
                return [_store(record)]
            case CallCounts():
                calls = sum(count for _, count, _, _ in record.callbacks)
                name = f"{calls} calls, only counted"
                return [_bar(_COUNTED, name, record.started_ns, record.ended_ns, record, step=record.step)]
            case Drop() | Prefetch() | Enqueued() | Finding() | TracerFault() | TracingReduced():
                return [_moment(record)]
        return []

    def hooks(self, record: LayerHooks) -> list[Bar]:
        """The per-layer hooks of a pass in the order of time, each a bar; one that raised has a record of its own."""
        bars = []
        for method, payload in ((_WAIT, record.waits), (_SAVE, record.saves)):
            for layer, (started, ended) in enumerate(hook_times(payload)):
                if started and ended:
                    lane = Lane(Row.HOOKS, self.facts.group_of_layer(layer))
                    bars.append(Bar(lane, method, started, max(started, ended), (), record.step, layer, None, record))
        bars.sort(key=lambda bar: bar.start_ns)
        return bars

    def hook_blocks(self, record: LayerHooks) -> list[Block]:
        """As :meth:`hooks`, those of one hook and layer group together: for pictures in which each is too short to be seen."""
        blocks = []
        for method, payload in ((_WAIT, record.waits), (_SAVE, record.saves)):
            times = memoryview(payload)[: len(payload) // 16 * 16].cast("q").tolist()
            for group, (first, last) in self.spans_of_groups(len(times) // 2):
                starts, ends = times[2 * first : 2 * last : 2], times[2 * first + 1 : 2 * last : 2]
                if 0 in starts or 0 in ends:
                    pairs = [(start, end) for start, end in zip(starts, ends, strict=True) if start and end]
                    starts, ends = [start for start, _ in pairs], [end for _, end in pairs]
                if starts:
                    took = list(map(sub, ends, starts))
                    lane = Lane(Row.HOOKS, group)
                    blocks.append(Block(lane, min(starts), max(ends), len(took), sum(took), max(took), method))
        return blocks

    def spans_of_groups(self, layers: int) -> list[tuple[int, tuple[int, int]]]:
        """Runs of layers that are of one group, as ``(group, (first, last + 1))``."""
        if self._spans is None or self._spans[0] != layers:
            spans: list[tuple[int, tuple[int, int]]] = []
            for layer in range(layers):
                group = self.facts.group_of_layer(layer)
                if spans and spans[-1][0] == group:
                    spans[-1] = (group, (spans[-1][1][0], layer + 1))
                else:
                    spans.append((group, (layer, layer + 1)))
            self._spans = (layers, spans)
        return self._spans[1]

    def _call(self, record: Call) -> list[Bar]:
        lane, name = lane_of(record.callback)
        start = record.started_ns
        requests = () if type(record) is Call else requests_of(record)
        bars = [Bar(lane, name, start, max(start, record.ended_ns), requests, record.step, -1, record.error, record)]
        if isinstance(record, BindCall):
            self._pass_step, self._pass_start_ns = record.step, record.started_ns
        elif record.callback == Callback.WAIT_FOR_SAVE and self._pass_step == record.step:
            name = f"pass {record.step}"
            bars.append(_bar(PASSES, name, self._pass_start_ns, record.ended_ns, record, step=record.step))
            self._pass_step = -1
        return bars

    def _idle(self, record: IdlePolls) -> Bar:
        # Several polls may last across callbacks of the same thread: they get a lane of their own.
        lane = _SIDES[Side.WORKER] if record.count == 1 else _IDLE
        name = "get_finished" if record.count == 1 else f"get_finished, {record.count} times"
        return _bar(lane, name, record.first_started_ns, record.last_ended_ns, record, step=record.step)

    def _transfer(self, record: Transfer) -> Bar:
        lane, name = lane_of_transfers(record.direction, record.layer_group, record.source, record.tier)
        requests = (record.request_id,)
        return _bar(lane, name, record.started_ns, record.ended_ns, record, requests, record.step, record.error)


@functools.lru_cache(1024)
def lane_of_transfers(direction: Direction, layer_group: int, source: Source, tier: Tier) -> tuple[Lane, str]:
    """Where transfers lie, and their name."""
    row = Row.LOADS if direction is Direction.LOAD else Row.SAVES
    what = "" if source is Source.REPORTED else source.value
    return Lane(row, layer_group, what), f"{direction.value} {tier.value}"


@functools.cache
def lane_of_lookup(reason: MissReason | None) -> tuple[Lane, str]:
    """Where lookups lie, and their name."""
    return Lane(Row.LOOKUPS), f"lookup: {reason.value}" if reason else "lookup"


@functools.cache
def lane_of_store(operation: Operation, outcome: Outcome) -> tuple[Lane, str]:
    """Where operations of a store lie, and their name."""
    return Lane(Row.STORE, what=operation.value), f"{operation.value} {outcome.value}"


@functools.lru_cache
def lane_of(callback: int) -> tuple[Lane, str]:
    """Where the bars of a callback lie, and their name."""
    side, method = callback_name(callback)
    return _SIDES[side], method


def _bar(
    lane: Lane,
    name: str,
    start_ns: int,
    end_ns: int,
    record: Record,
    requests: tuple[int, ...] = (),
    step: int = 0,
    error: str | None = None,
) -> Bar:
    # An end before the start (records of a torn journal) is a moment.
    return Bar(lane, name, start_ns, max(start_ns, end_ns), requests, step, -1, error, record)


def _request(story: Story) -> Bar:
    lane = Lane(Row.REQUESTS)
    return Bar(
        lane,
        "request",
        story.started_ns,
        max(story.started_ns, story.ended_ns),
        (story.request_id,),
        0,
        -1,
        None,
        story,
    )


def _store(record: StoreOperation) -> Bar:
    lane, name = lane_of_store(record.operation, record.outcome)
    return _bar(lane, name, record.started_ns, record.ended_ns, record, requests_of(record), error=record.error)


def _moment(record: Drop | Prefetch | Enqueued | Finding | TracerFault | TracingReduced) -> Bar:
    error = None
    match record:
        case Drop():
            name = f"drop: {record.reason.value}"
        case Prefetch():
            name = f"prefetch: {record.fate.value}"
        case Enqueued():
            name = "enqueued"
        case Finding():
            name = f"{record.severity}: {record.rule}"
        case TracerFault():
            name, error = f"tracer fault: {record.instrument}", record.error
        case TracingReduced():
            reduced = "tracing off" if record.is_off else "tracing reduced"
            name = reduced if record.is_reduced else "tracing as before"
    request_id: int | None = getattr(record, "request_id", None)
    requests = () if request_id is None else (request_id,)
    return _bar(_EVENTS, name, record.at_ns, record.at_ns, record, requests, getattr(record, "step", 0), error)


#: Records that name one request, or a store's operation, which may be for none.
_OF_ONE = frozenset(
    (StoreOperation, Transfer, QueryCall, AllocCall, FinishCall, Lookup, CancelLoadCall, RequestResetCall)
)


def requests_of(record: Record) -> tuple[int, ...]:
    """The requests that a callback was for, or that moved."""
    if type(record) in _OF_ONE:
        request_id: int | None = record.request_id  # type: ignore[attr-defined]
        return () if request_id is None else (request_id,)
    match record:
        case BuildCall():
            return tuple(record.request_ids)
        case FinishedCall():
            return tuple(
                dict.fromkeys(
                    (
                        *record.saving_given,
                        *record.loading_given,
                        *record.saving_returned,
                        *record.loading_returned,
                    )
                )
            )
    return ()
