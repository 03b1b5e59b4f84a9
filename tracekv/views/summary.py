"""What a run did, in numbers: callbacks with their times, layer groups with their bytes, tokens, misses.

Summaries of several processes merge, and encode with msgspec, so that each process can hand its own to whoever prints them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from operator import sub
from typing import Any, cast

import msgspec

from tracekv.journal.naming import KINDS
from tracekv.journal.records import (
    AllocCall,
    BuildCall,
    Call,
    CallCounts,
    Drop,
    IdlePolls,
    LayerHooks,
    Lookup,
    QueryCall,
    Record,
    RegisterCall,
    StoreOperation,
    Transfer,
)
from tracekv.journal.vocabulary import Callback, Direction, Operation, Outcome, Source, Tier
from tracekv.views.durations import Durations
from tracekv.views.facts import MOVED, TELLING, Facts, callback_name
from tracekv.views.story import Moved


class CallbackSummary(msgspec.Struct):
    """One callback. ``errors`` are calls that raised; they are among the calls."""

    durations: Durations
    errors: int = 0


class GroupSummary(msgspec.Struct):
    """One layer group; ``moved`` by direction, tier and source."""

    layer_group_id: int
    window_size: int | None = None
    bytes_per_page: int | None = None
    moved: list[Moved] = []

    def pages(self, direction: Direction, source: Source = Source.REPORTED) -> int:
        """Pages that moved."""
        return sum(moved.pages for moved in self._of(direction, source))

    def nbytes(self, direction: Direction, source: Source = Source.REPORTED) -> int:
        """Bytes that moved."""
        return sum(moved.nbytes for moved in self._of(direction, source))

    def tokens(self, direction: Direction, source: Source = Source.REPORTED) -> int:
        """Tokens whose KV moved."""
        return sum(moved.tokens for moved in self._of(direction, source))

    def stall_ns(self, direction: Direction, source: Source = Source.REPORTED) -> int:
        """Time that the forward pass waited for what moved, as far as the connector tells it."""
        return sum(moved.stall_ns for moved in self._of(direction, source))

    def time_ns(self, direction: Direction, source: Source = Source.REPORTED) -> int:
        """How long the transfers took together."""
        return sum(moved.time_ns for moved in self._of(direction, source))

    def _of(self, direction: Direction, source: Source) -> list[Moved]:
        return [moved for moved in self.moved if moved.direction is direction and moved.source is source]


class Summary(msgspec.Struct):
    """What the records of one or several processes add up to. Ranks of one run each report their shard of the same tokens.

    Tokens count per query and allocation, so that hits and their denominator come from the same events.

    Attributes:
        callbacks: By ``scheduler.NAME`` and ``worker.NAME``.
        computed_tokens: Prompt tokens that were on the device when the connector was asked.
        honoured_tokens: Of the offers that the runtime told about; ``untold_allocations`` it didn't.
        hits: Queries that were offered something.
        store_requests: What was asked of the server by operation; ``store_bytes`` what moved.
        misses: Lookups by reason; ``bounding`` those that a layer group ended, by group.
        lost_records: Overwritten unread: the numbers are too small by what they held.
    """

    callbacks: dict[str, CallbackSummary] = {}
    layer_groups: dict[int, GroupSummary] = {}
    queries: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    offered_tokens: int = 0
    honoured_tokens: int = 0
    untold_allocations: int = 0
    steps: int = 0
    scheduled_tokens: int = 0
    lookups: int = 0
    misses: dict[str, int] = {}
    bounding: dict[int, int] = {}
    drops: dict[str, int] = {}
    store_outcomes: dict[str, int] = {}
    store_requests: dict[str, int] = {}
    store_bytes: dict[str, int] = {}
    hits: int = 0
    records: int = 0
    lost_records: int = 0

    @property
    def loaded_tokens(self) -> int:
        """Tokens loaded, as reported: over the layer groups the largest counts, since each holds every token's part."""
        return max((group.tokens(Direction.LOAD) for group in self.layer_groups.values()), default=0)

    @property
    def saved_tokens(self) -> int:
        """Tokens saved, as reported; over the layer groups the largest."""
        return max((group.tokens(Direction.SAVE) for group in self.layer_groups.values()), default=0)

    @property
    def loaded_bytes(self) -> int:
        """Bytes loaded, as reported."""
        return sum(group.nbytes(Direction.LOAD) for group in self.layer_groups.values())

    @property
    def saved_bytes(self) -> int:
        """Bytes saved, as reported."""
        return sum(group.nbytes(Direction.SAVE) for group in self.layer_groups.values())

    def merge(self, other: Summary) -> None:
        """Add another process's summary; layer groups join by id."""
        for name, callback in other.callbacks.items():
            own = self.callbacks.setdefault(name, CallbackSummary(Durations()))
            own.durations.merge(callback.durations)
            own.errors += callback.errors
        for group_id, group in other.layer_groups.items():
            mine = self.layer_groups.setdefault(group_id, GroupSummary(group_id))
            if group.bytes_per_page is not None:  # else this process has lost what its layout told
                mine.window_size, mine.bytes_per_page = group.window_size, group.bytes_per_page
            for moved in group.moved:
                _merge_moved(mine, moved)
        for field in COUNTS:
            setattr(self, field, getattr(self, field) + getattr(other, field))
        for field in _TALLIES:
            tally = getattr(self, field)
            for key, count in getattr(other, field).items():
                tally[key] = tally.get(key, 0) + count


#: Plain counts of a summary.
COUNTS = (
    "queries", "prompt_tokens", "computed_tokens", "offered_tokens", "honoured_tokens", "untold_allocations", "steps",
    "scheduled_tokens", "lookups", "hits", "records", "lost_records",
)  # fmt: skip
_SUMS = tuple(each.name for each in msgspec.structs.fields(Moved) if each.type is int and each.name != "layer_group")
_TALLIES = ("misses", "bounding", "drops", "store_outcomes", "store_requests", "store_bytes")


class SummaryView:
    """Adds up records of any journal, in any order; ``summary`` may be read at any time by the thread that feeds it."""

    def __init__(self) -> None:
        self.summary = Summary()
        self._facts = Facts()
        self._callbacks: dict[int, CallbackSummary] = {}
        self._moved: dict[tuple[int, Direction, Tier, Source], Moved] = {}

    def lost(self, count: int) -> None:
        """``count`` records were overwritten unread."""
        self.summary.lost_records += count

    def feed(self, record: Record) -> None:
        """Take one record."""
        self.summary.records += 1
        for take in _TAKES.get(type(record), ()):
            take(self, record)

    def feed_all(self, records: Sequence[Record]) -> None:
        """Take several records of one kind; calls are of one callback, and none raised."""
        self.summary.records += len(records)
        for take in _TAKES.get(type(records[0]), ()) if records else ():
            if take is SummaryView._call:
                calls = cast("Sequence[Call]", records)
                self.called(calls[0].callback, Counter([call.ended_ns - call.started_ns for call in calls]))
                continue
            for record in records:
                take(self, record)

    def called(self, callback: int, durations_ns: Mapping[int, int]) -> None:
        """Take calls of which nothing but their durations is to be counted, ``{duration: calls}``, and no records."""
        if durations_ns:
            self._callback(callback).durations.add_all(durations_ns)

    def _call(self, record: Call) -> None:
        callback = self._callback(record.callback)
        callback.durations.add(record.ended_ns - record.started_ns)
        callback.errors += record.error is not None

    def stored(self, operation: Operation, outcome: Outcome, operations: int, requests: int, nbytes: int) -> None:
        """Take operations of a store that were of one kind and ended alike, and no records."""
        summary, name = self.summary, operation._value_
        _count(summary.store_outcomes, _outcome_name(operation, outcome), operations)
        _count(summary.store_requests, name, requests)
        _count(summary.store_bytes, name, nbytes if outcome in MOVED else 0)

    def moved(self, moved: Moved) -> None:
        """Take transfers of one kind, added up, and no records."""
        _merge_moved(self._group(moved.layer_group), moved)

    def _query(self, record: QueryCall) -> None:
        summary = self.summary
        summary.queries += 1
        summary.prompt_tokens += record.prompt_tokens or 0
        summary.computed_tokens += record.computed_tokens
        summary.offered_tokens += record.offered_tokens
        summary.hits += record.offered_tokens > 0

    def _alloc(self, record: AllocCall) -> None:
        self.summary.honoured_tokens += record.honoured_tokens or 0
        self.summary.untold_allocations += record.honoured_tokens is None

    def _build(self, record: BuildCall) -> None:
        self.summary.steps += 1
        self.summary.scheduled_tokens += sum(record.scheduled_tokens)

    def _idle(self, record: IdlePolls) -> None:
        self._several(Callback.GET_FINISHED, record.count, record.sum_ns, record.max_ns)

    def _counted(self, record: CallCounts) -> None:
        for number, calls, sum_ns, max_ns in record.callbacks:
            self._several(number, calls, sum_ns, max_ns)

    def _layers(self, record: LayerHooks) -> None:
        self._hooks(Callback.WAIT_FOR_LAYER_LOAD, record.waits)
        self._hooks(Callback.SAVE_KV_LAYER, record.saves)

    def _transfer(self, record: Transfer) -> None:
        key = (record.layer_group, record.direction, record.tier, record.source)
        known = self._moved.get(key)
        if known is None:
            known = self._moved[key] = _find(self._group(record.layer_group), record.direction, record)
        known.add(record)

    def _lookup(self, record: Lookup) -> None:
        summary = self.summary
        summary.lookups += 1
        if record.reason is not None:
            _count(summary.misses, record.reason.value)
        if record.bounding_layer_group is not None:
            summary.bounding[record.bounding_layer_group] = summary.bounding.get(record.bounding_layer_group, 0) + 1

    def _drop(self, record: Drop) -> None:
        drops = self.summary.drops
        drops[record.reason.value] = drops.get(record.reason.value, 0) + record.blocks

    def _store(self, record: StoreOperation) -> None:
        self.stored(record.operation, record.outcome, 1, record.requests, record.nbytes)

    def _register(self, record: RegisterCall) -> None:
        for facts in record.groups:
            self._group(facts.layer_group_id)

    def _callback(self, number: int) -> CallbackSummary:
        known = self._callbacks.get(number)
        if known is None:
            side, method = callback_name(number)
            name = f"{side.value}.{method}"
            known = self.summary.callbacks.setdefault(name, CallbackSummary(Durations()))
            self._callbacks[number] = known
        return known

    def _several(self, number: int, calls: int, sum_ns: int, max_ns: int) -> None:
        # Only count, sum and maximum are told: the longest as it was, the others at their mean.
        durations = self._callback(number).durations
        durations.add(max_ns)
        others = calls - 1
        if others > 0:
            total = durations.total_ns + sum_ns - max_ns
            durations.add((sum_ns - max_ns) // others, others)
            durations.total_ns = total

    def _hooks(self, callback: Callback, payload: bytes) -> None:
        times = memoryview(payload)[: len(payload) // 16 * 16].cast("q").tolist()
        starts, ends = times[::2], times[1::2]
        took = list(map(sub, ends, starts))
        if 0 in ends or 0 in starts or min(took, default=0) < 0:
            # Not called, or an end of 0: it raised, and has a record of its own.
            took = [max(0, end - start) for start, end in zip(starts, ends, strict=True) if start and end]
        if took:
            self._callback(callback).durations.add_all(Counter(took))

    def _group(self, layer_group: int) -> GroupSummary:
        group = self.summary.layer_groups.setdefault(layer_group, GroupSummary(layer_group))
        facts = self._facts.groups.get(layer_group)
        if facts is not None:
            group.window_size = facts.window_size
            group.bytes_per_page = facts.bytes_per_page
        return group


def _takes(kind: type[Record]) -> Iterator[Callable[[SummaryView, Any], None]]:
    if kind in TELLING:
        yield lambda view, record: view._facts.observe(record)
    if issubclass(kind, Call):
        yield SummaryView._call
    if kind in _TAKES_OF_A_KIND:
        yield _TAKES_OF_A_KIND[kind]


_TAKES_OF_A_KIND: dict[type[Record], Callable[[SummaryView, Any], None]] = {
    QueryCall: SummaryView._query,
    AllocCall: SummaryView._alloc,
    BuildCall: SummaryView._build,
    IdlePolls: SummaryView._idle,
    CallCounts: SummaryView._counted,
    LayerHooks: SummaryView._layers,
    Transfer: SummaryView._transfer,
    Lookup: SummaryView._lookup,
    Drop: SummaryView._drop,
    StoreOperation: SummaryView._store,
    RegisterCall: SummaryView._register,
}
_TAKES = {kind: tuple(_takes(kind)) for kind in KINDS}


@lru_cache
def _outcome_name(operation: Operation, outcome: Outcome) -> str:
    return f"{operation.value}.{outcome.value}"


def _count(tally: dict[str, int], key: str, count: int = 1) -> None:
    tally[key] = tally.get(key, 0) + count


def _find(group: GroupSummary, direction: Direction, like: Transfer | Moved) -> Moved:
    for moved in group.moved:
        if moved.direction is direction and moved.tier is like.tier and moved.source is like.source:
            return moved
    fresh = Moved(direction, group.layer_group_id, like.tier, like.source)
    group.moved.append(fresh)
    return fresh


def _merge_moved(group: GroupSummary, other: Moved) -> None:
    own = _find(group, other.direction, other)
    for name in _SUMS:
        setattr(own, name, getattr(own, name) + getattr(other, name))
