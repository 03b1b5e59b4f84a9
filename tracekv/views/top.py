"""What engines do at this moment, of all processes together: a plain struct for the screen of ``tracekv top``.

A :class:`TopView` takes the records of one process. What a process was in the middle of needs its latest records only, what it has
done in all needs a few kinds of all of them: :data:`COUNTED` says which.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from tracekv.journal.records import (
    AllocCall,
    Finding,
    FinishCall,
    FinishedCall,
    Lookup,
    QueryCall,
    Record,
    StoreCeiling,
    StoreOperation,
    TracerFault,
    TracingReduced,
    Transfer,
)
from tracekv.journal.vocabulary import Direction, Operation, Source
from tracekv.views import ids, timing
from tracekv.views.facts import MOVED, count_pages
from tracekv.views.inflight import InFlightView, all_moves, settle

#: Kinds that are counted from the beginning; the others matter for what is going on now.
COUNTED: tuple[type[Record], ...] = (
    QueryCall, Lookup, AllocCall, FinishCall, FinishedCall, Transfer, StoreOperation, StoreCeiling, Finding, TracerFault,
    TracingReduced,
)  # fmt: skip
#: The row of a store's own operations, beside the layer groups.
STORE_ROW = -1
_WAYS = {way: way.value for way in Direction}
_STORE_WAYS = {Operation.READ: Direction.LOAD.value, Operation.PUT: Direction.SAVE.value}
#: Transfers and store operations of late that are kept: as many as a window has, unless far more come than a screen is for.
_MOST_FLOWS = 1 << 15
#: Lookups that wait for their query, and offers that wait for pages.
_MOST_KNOWN = 1024


class _Flow(msgspec.Struct):
    """One transfer or store operation of late."""

    begin_ns: int
    end_ns: int
    row: tuple[str, int]
    nbytes: int
    stall_ns: int


class _Asked(NamedTuple):
    """Prompt tokens that a query of late asked for, or that an allocation took of its offer; not every query has one."""

    end_ns: int
    queries: int
    queried: int
    computed: int
    honoured: int


class TopView:
    """The records of one process. One thread feeds it.

    Args:
        window_s: How far back "of late" goes.
        since_ns: What ended before (monotonic, of the process) is not counted; 0 for all.
    """

    def __init__(self, *, window_s: float, since_ns: int = 0) -> None:
        self.window_ns = int(window_s * 1e9)
        self._since_ns = since_ns
        self.inflight = InFlightView()
        self.facts = self.inflight.facts
        self.tokens: Counter[str] = Counter()
        self.missed: Counter[str] = Counter()
        self.bytes: Counter[tuple[str, int]] = Counter()
        self.rules: Counter[tuple[str, str]] = Counter()
        self.ceilings: dict[str, int] = {}
        self.faults = 0
        self.is_reduced = False
        self.cost_ppm = 0
        self.stall_ns = 0
        self.longest_stall_ns = 0
        self.last_ns = 0
        self.lookups: dict[int, Lookup] = {}
        self._offers: dict[int, int] = {}
        self._flows: deque[_Flow] = deque(maxlen=_MOST_FLOWS)
        self._asked: deque[_Asked] = deque(maxlen=_MOST_FLOWS)
        self._counting: dict[type[Record], Callable[[Any], None]] = {
            QueryCall: self._queried,
            AllocCall: self._allocated,
            Lookup: self._looked_up,
            Transfer: self._moved,
            StoreOperation: self._stored,
            StoreCeiling: self._measured,
            Finding: self._found,
            TracerFault: self._failed,
            TracingReduced: self._reduced,
        }

    def feed(self, record: Record) -> None:
        """Take a record, for what is going on and for what is counted."""
        self.inflight.feed(record)
        self.last_ns = max(self.last_ns, self.inflight.last_ns, getattr(record, "last_ended_ns", 0))
        self._count(record)

    def recall(self, record: Record) -> None:
        """Take a record of long ago: it is counted, and what may be open since then, a parked load or held pages, is kept."""
        self._count(record)
        kind = type(record)
        is_told = kind is FinishCall or kind is FinishedCall or (isinstance(record, QueryCall) and record.is_async)
        if is_told or (isinstance(record, AllocCall) and record.request_id in self.inflight.requests):
            self.inflight.feed(record)

    def _count(self, record: Record) -> None:
        counting = self._counting.get(type(record))
        # Without a time of their own are the store's best and the tracer's state, which hold until the next one.
        if counting is not None and getattr(record, "ended_ns", self._since_ns) >= self._since_ns:
            counting(record)

    def _queried(self, record: QueryCall) -> None:
        self.tokens["queried"] += record.prompt_tokens or 0
        self.tokens["computed"] += record.computed_tokens
        self.tokens["offered"] += record.offered_tokens
        self.tokens["requests"] += 1
        self._asked.append(_Asked(record.ended_ns, 1, record.prompt_tokens or 0, record.computed_tokens, 0))
        # A connector tells of its lookup inside the query, so before the query's own record.
        told = self.lookups.pop(record.request_id, None)
        left = (record.prompt_tokens or 0) - record.computed_tokens - record.offered_tokens
        if left > 0:
            self.missed["not told" if told is None else "complete" if told.reason is None else told.reason.value] += (
                left
            )
        _keep(self._offers, record.request_id, record.offered_tokens)

    def _allocated(self, record: AllocCall) -> None:
        offered = self._offers.pop(record.request_id, 0)
        honoured = offered if record.honoured_tokens is None else record.honoured_tokens
        self.tokens["honoured"] += honoured
        self._asked.append(_Asked(record.ended_ns, 0, 0, 0, honoured))

    def _looked_up(self, record: Lookup) -> None:
        _keep(self.lookups, record.request_id, record)

    def _moved(self, record: Transfer) -> None:
        if record.source is not Source.REPORTED:
            return
        stall_ns = record.stall_ns
        if stall_ns:
            self.stall_ns += stall_ns
            self.longest_stall_ns = max(self.longest_stall_ns, stall_ns)
        self._flow(record, _WAYS[record.direction], record.layer_group, 0 if record.error else record.nbytes, stall_ns)

    def _stored(self, record: StoreOperation) -> None:
        way = _STORE_WAYS.get(record.operation)
        if way is not None:
            self._flow(record, way, STORE_ROW, record.nbytes if record.outcome in MOVED else 0, 0)

    def _flow(self, record: Transfer | StoreOperation, way: str, group: int, nbytes: int, stall_ns: int) -> None:
        row = (way, group)
        self.bytes[row] += nbytes
        self._flows.append(_Flow(record.started_ns, record.ended_ns, row, nbytes, stall_ns))

    def _measured(self, record: StoreCeiling) -> None:
        self.ceilings[record.direction.value] = record.bytes_per_s

    def _found(self, record: Finding) -> None:
        if record.at_ns >= self._since_ns:
            self.rules[record.severity, record.rule] += 1

    def _failed(self, record: TracerFault) -> None:
        self.faults += 1

    def _reduced(self, record: TracingReduced) -> None:
        self.is_reduced, self.cost_ppm = record.is_reduced, record.cost_ppm

    def flows(self, now_ns: int) -> list[_Flow]:
        """What ended in the window before ``now_ns``."""
        return [flow for flow in self._flows if flow.end_ns > now_ns - self.window_ns]

    def asked(self, now_ns: int) -> Counter[str]:
        """The tokens of what was asked in the window before ``now_ns``, as in :attr:`tokens`."""
        late = [each for each in self._asked if each.end_ns > now_ns - self.window_ns]
        return Counter(
            requests=sum(each.queries for each in late),
            queried=sum(each.queried for each in late),
            computed=sum(each.computed for each in late),
            honoured=sum(each.honoured for each in late),
        )


def _keep(known: dict[int, Any], request_id: int, what: Any) -> None:
    known[request_id] = what
    if len(known) > _MOST_KNOWN:
        del known[next(iter(known))]


class ProcessLine(msgspec.Struct):
    """One process. ``lag_s`` is how long ago its last record was written; None while nothing is known."""

    rank: int | None
    world: int | None
    pid: int
    host: str
    run: str | None
    is_alive: bool
    inside: str | None
    inside_s: float
    step: int
    lag_s: float | None
    records: int
    lost: int
    written_bytes: int


class MoveLine(msgspec.Struct):
    """KV in flight, of one rank."""

    request: str
    direction: str
    layer_group: int
    rank: int | None
    pages: int
    nbytes: int | None
    age_s: float
    is_alive: bool


class RateLine(msgspec.Struct):
    """Bytes one way of one layer group, or of the store itself (``STORE_ROW``).

    Attributes:
        per_s: Over the window.
        moving_per_s: Over the time in which something of it moved.
        ceiling_per_s: What the store was measured to give at best that way; None where it wasn't.
    """

    direction: str
    layer_group: int
    window_size: int
    total_bytes: int
    per_s: float
    moving_per_s: float | None
    ceiling_per_s: int | None


class Top(msgspec.Struct):
    """Everything that one screen shows.

    Attributes:
        tokens: Prompt tokens by what became of them; ``late_tokens`` those of the window.
        missed: Prompt tokens that had to be computed, by the reason that the connector told.
        stall_s: In the window; ``stall_total_s`` since the start.
        rules: ``(severity, rule) -> times``; ``judged`` says of which records.
        since_unix_ns: What ended before isn't in any count; None where all is.
    """

    at_unix_ns: int
    window_s: float
    processes: list[ProcessLine]
    moves: list[MoveLine]
    tokens: dict[str, int]
    missed: dict[str, int]
    rates: list[RateLine]
    stall_s: float
    stall_total_s: float
    longest_stall_s: float
    open_requests: int
    held_pages: int
    held_requests: int
    oldest_held_s: float
    rules: dict[str, int]
    judged: str
    undecodable: int
    faults: int
    reduced: int
    late_tokens: dict[str, int]
    since_unix_ns: int | None = None
    notes: list[str] = []


class Seen(msgspec.Struct):
    """One process at the moment of the screen: its view, and what only a reader of its journal knows.

    Attributes:
        now_ns: What ages are counted back from, on the process's clock; what is of late is counted back from ``late_ns``.
    """

    view: TopView
    line: ProcessLine
    now_ns: int
    key: bytes
    undecodable: int = 0
    late_ns: int = 0


def screen(
    seen: Sequence[Seen], *, at_unix_ns: int, window_s: float, hashed: bool, rules: Mapping[str, int], judged: str
) -> Top:
    """All processes in one struct."""
    settle([each.view.inflight for each in seen])
    top = Top(
        at_unix_ns, window_s, [each.line for each in seen], _moves(seen, hashed=hashed),
        _sum(each.view.tokens for each in seen), _sum(each.view.missed for each in seen),
        _rates(seen, window_s), 0.0, 0.0, 0.0, 0, 0, 0, 0.0, dict(rules), judged,
        sum(each.undecodable for each in seen), sum(each.view.faults for each in seen), sum(each.view.is_reduced for each in seen),
        _sum(each.view.asked(each.late_ns) for each in seen),
    )  # fmt: skip
    for each in seen:
        view = each.view
        top.stall_s += sum(flow.stall_ns for flow in view.flows(each.late_ns)) / 1e9
        top.stall_total_s += view.stall_ns / 1e9
        top.longest_stall_s = max(top.longest_stall_s, view.longest_stall_ns / 1e9)
        for request in view.inflight.requests.values():
            top.open_requests += view.facts.has_scheduler
            if request.is_held:
                top.held_requests += 1
                top.held_pages += sum(map(count_pages, request.pages))
                top.oldest_held_s = max(top.oldest_held_s, (each.now_ns - request.since_ns) / 1e9)
        for (severity, rule), times in view.rules.items():
            top.rules[f"{severity} {rule}"] = top.rules.get(f"{severity} {rule}", 0) + times
    return top


def _sum(counters: Iterable[Counter[str]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for each in counters:
        total.update(each)
    return dict(total)


def _moves(seen: Sequence[Seen], *, hashed: bool) -> list[MoveLine]:
    found = []
    for each, moves in zip(seen, all_moves([each.view.inflight for each in seen]), strict=True):
        found += [
            MoveLine(
                ids.request_label(each.key, move.request_id, hashed=hashed), move.direction.value, move.layer_group,
                each.line.rank, len(move.pages), move.nbytes, max(0.0, (each.now_ns - move.since_ns) / 1e9), each.line.is_alive,
            )
            for move in moves
        ]  # fmt: skip
    return sorted(found, key=lambda move: (not move.is_alive, -move.age_s))


def _rates(seen: Sequence[Seen], window_s: float) -> list[RateLine]:
    total: Counter[tuple[str, int]] = sum((each.view.bytes for each in seen), Counter())
    late: Counter[tuple[str, int]] = Counter()
    busy_ns: Counter[tuple[str, int]] = Counter()
    ceilings: dict[str, int] = {}
    windows: dict[int, int] = {}
    for each in seen:
        ceilings.update(each.view.ceilings)
        windows.update({group: facts.window_size or 0 for group, facts in each.view.facts.groups.items()})
        spans: dict[tuple[str, int], list[timing.Interval]] = {}
        for flow in each.view.flows(each.late_ns):
            late[flow.row] += flow.nbytes
            spans.setdefault(flow.row, []).append((flow.begin_ns, flow.end_ns))
        for row, intervals in spans.items():
            busy_ns[row] += timing.length(timing.merged(intervals))
    return [
        RateLine(
            way, group, windows.get(group, 0), total[way, group], late[way, group] / window_s,
            late[way, group] / (busy_ns[way, group] / 1e9) if busy_ns[way, group] else None, ceilings.get(way),
        )
        for way, group in sorted(total, key=lambda row: (row[0], row[1] == STORE_ROW, row[1]))
    ]  # fmt: skip
