"""The metrics of one process: what its records add up to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tracekv.journal.layout import JournalFacts
from tracekv.journal.records import (
    AllocCall,
    BindCall,
    BuildCall,
    Call,
    CallCounts,
    CancelLoadCall,
    ClockAnchor,
    ConnectorWrapped,
    Drop,
    Finding,
    FinishCall,
    FinishedCall,
    ForwardCallableCall,
    IdlePolls,
    LayerHooks,
    Lookup,
    Prefetch,
    ProcessStarted,
    QueryCall,
    Record,
    RegisterCall,
    RequestResetCall,
    RunJoined,
    SettingsSeen,
    StoreCeiling,
    StoreOperation,
    TracerFault,
    TracingReduced,
    Transfer,
)
from tracekv.journal.vocabulary import Callback, PrefetchFate, Side, Source
from tracekv.views import names
from tracekv.views.facts import MOVED, UNKNOWN_GROUP, Facts
from tracekv.views.metrics_hooks import HookMetrics
from tracekv.views.metrics_model import Collected, Histogram, Totals, store_engine
from tracekv.views.metrics_overlap import Overlap
from tracekv.views.metrics_prompts import PromptTokens
from tracekv.views.registry import registry

#: Requests in flight that are remembered, each way.
MAX_IN_FLIGHT = 4096
#: The rank of a process that hasn't been told its own.
UNKNOWN_RANK = -1

_CALLBACK_NAMES: dict[int, str] = {callback: f"{callback.side.value}.{callback.method}" for callback in Callback}
_OTHER = "other"
_BREAKER_STATES = tuple(registry().enums["breaker"].words)


class ProcessMetrics:
    """Fed with the records of one process. State is bounded: labels are closed sets, and what is remembered of requests is limited.

    Attributes:
        handlers: What takes a record, by its type; records of other types only count.
        totals: Counters and histograms so far.
        records: Records taken; whoever calls the handlers counts them.
        newest_ns: Time of the newest record, on the process's clock; 0 before the first.
        settings_digest: None while unknown.
        has_worker: Whether this process has a traced worker: then it answers ``get_finished``.
    """

    def __init__(self, source: JournalFacts) -> None:
        self.source = source
        self.facts = Facts()
        self.totals = Totals()
        self.newest_ns = 0
        self.settings_digest: bytes | None = None
        self.has_worker = False
        self.records = self.lost = self.undecodable = self.bytes_written = 0
        self._counts = self.totals.counts
        self._prompts = PromptTokens(self.totals)
        self._overlap = Overlap(self._counts)
        self._durations: dict[int, Histogram] = {}
        self._loading: dict[int, int] = {}
        self._saving: dict[int, int] = {}
        self._breakers: dict[str, str] = {}
        self._cost_ppm: int | None = None
        self._is_reduced = False
        self._hooks = HookMetrics(self._counts, self.facts, self._duration)
        self.handlers: dict[type[Record], Callable[[Any], None]] = {
            Call: self._call,
            BindCall: self._call,
            ForwardCallableCall: self._call,
            CancelLoadCall: self._call,
            QueryCall: self._query,
            AllocCall: self._alloc,
            BuildCall: self._build,
            FinishCall: self._finish,
            FinishedCall: self._finished,
            RequestResetCall: self._reset,
            RegisterCall: self._register,
            IdlePolls: self._idle,
            CallCounts: self._call_counts,
            LayerHooks: self._layer_hooks,
            Transfer: self._transfer,
            Lookup: self._lookup,
            StoreOperation: self._store,
            StoreCeiling: self._ceiling,
            Drop: self._drop,
            Prefetch: self._prefetch,
            ConnectorWrapped: self._wrapped,
            SettingsSeen: self._settings,
            TracerFault: self._fault,
            Finding: self._finding,
            TracingReduced: self._reduced,
            ProcessStarted: self.facts.observe,
            ClockAnchor: self.facts.observe,
            RunJoined: self.facts.observe,
        }

    @property
    def rank(self) -> int:
        """-1 while unknown."""
        return UNKNOWN_RANK if self.facts.rank is None else self.facts.rank

    def collect(self, into: Collected, now_ns: int) -> None:
        """Give out everything; ``now_ns`` is on the process's clock."""
        rank = self.rank
        into.add_all(self.totals, rank)
        into.add((names.METRIC_PROCESSES,), 1, rank)
        into.add((names.METRIC_TRACER_RECORDS_READ,), self.records, rank)
        into.add((names.METRIC_TRACER_RECORDS_LOST,), self.lost, rank)
        into.add((names.METRIC_TRACER_RECORDS_UNDECODABLE,), self.undecodable, rank)
        into.add((names.METRIC_TRACER_WRITTEN,), self.bytes_written, rank)
        into.add((names.METRIC_TRACER_FAULTS,), 0, rank)
        if self.newest_ns:
            into.highest((names.METRIC_TRACER_LAG,), max(0, now_ns - self.newest_ns), rank)
        into.highest((names.METRIC_TRACER_REDUCED,), int(self._is_reduced), rank)
        if self._cost_ppm is not None:
            into.highest((names.METRIC_TRACER_COST,), self._cost_ppm / 1e6, rank)
        for direction, waiting in (("load", self._loading), ("save", self._saving)):
            if self.has_worker:
                oldest = next(iter(waiting.values()), now_ns)
                into.add((names.METRIC_REQUEST_IN_FLIGHT, direction), len(waiting), rank)
                into.highest((names.METRIC_REQUEST_IN_FLIGHT_AGE, direction), max(0, now_ns - oldest), rank)
        for engine, now in self._breakers.items():
            for state in _BREAKER_STATES:
                into.highest((names.METRIC_STORE_BREAKER_STATE, engine, state), int(state == now), rank)

    def kept_totals(self) -> Totals:
        """What stays when the process is gone."""
        kept = Totals()
        kept.merge(self.totals)
        kept.counts[names.METRIC_TRACER_RECORDS_READ,] += self.records
        kept.counts[names.METRIC_TRACER_RECORDS_LOST,] += self.lost
        kept.counts[names.METRIC_TRACER_RECORDS_UNDECODABLE,] += self.undecodable
        kept.counts[names.METRIC_TRACER_WRITTEN,] += self.bytes_written
        return kept

    def group(self, layer_group: int) -> int:
        """The id of a registered layer group, or -1."""
        return layer_group if layer_group in self.facts.groups else UNKNOWN_GROUP

    # -- calls -------------------------------------------------------------------------------------------------------

    def _call(self, record: Call) -> None:
        number, started, ended = record.callback, record.started_ns, record.ended_ns
        durations = self._durations.get(number)
        if durations is None:
            durations = self._duration(number)
        durations.add(ended - started)
        if record.error is not None:
            self._counts[names.METRIC_CALLBACK_EXCEPTIONS, _name(number)] += 1
        if ended > self.newest_ns:
            self.newest_ns = ended
        self._overlap.called(started, ended)
        if number == Callback.WAIT_FOR_SAVE:
            self._pass_ended(ended)

    def _duration(self, number: int) -> Histogram:
        known = _name(number)
        histogram = self.totals.histogram(names.METRIC_CALLBACK_DURATION, known)
        if known != _OTHER:
            self._durations[number] = histogram
        return histogram

    def _pass_ended(self, ended_ns: int) -> None:
        self._counts[names.METRIC_PASSES,] += 1
        self._hooks.pass_ended()
        self._overlap.settle(ended_ns)

    def _query(self, record: QueryCall) -> None:
        self._call(record)
        self._prompts.queried(record)

    def _alloc(self, record: AllocCall) -> None:
        self._call(record)
        self._pages(record.callback, record.pages, "load")
        self._prompts.allocated(record)

    def _build(self, record: BuildCall) -> None:
        self._call(record)
        for _, pages in record.pages:
            self._pages(record.callback, pages, "save")
        self._prompts.scheduled(record)

    def _finish(self, record: FinishCall) -> None:
        self._call(record)
        self._pages(record.callback, record.pages, None)
        self._prompts.finished(record.request_id, record.started_ns)

    def _reset(self, record: RequestResetCall) -> None:
        self._call(record)
        self._prompts.finished(record.request_id)

    def _finished(self, record: FinishedCall) -> None:
        self._call(record)
        self.has_worker = True
        for waiting, given, returned in (
            (self._loading, record.loading_given, record.loading_returned),
            (self._saving, record.saving_given, record.saving_returned),
        ):
            for request_id in given:
                if len(waiting) >= MAX_IN_FLIGHT:
                    del waiting[next(iter(waiting))]
                waiting.setdefault(request_id, record.ended_ns)
            for request_id in returned:
                waiting.pop(request_id, None)

    def _idle(self, record: IdlePolls) -> None:
        self.has_worker = True
        self._duration(Callback.GET_FINISHED).add_summed(record.count, record.sum_ns, record.max_ns)
        self._saw(record.last_ended_ns)

    def _call_counts(self, record: CallCounts) -> None:
        for number, calls, sum_ns, max_ns in record.callbacks:
            self._duration(number).add_summed(calls, sum_ns, max_ns)
            if number == Callback.WAIT_FOR_SAVE:
                self._counts[names.METRIC_PASSES,] += max(0, calls)
        self._saw(record.ended_ns)

    def _saw(self, at_ns: int) -> None:
        if at_ns > self.newest_ns:
            self.newest_ns = at_ns

    def _layer_hooks(self, record: LayerHooks) -> None:
        self._overlap.hooked(record)
        self._hooks.called(record)

    def _register(self, record: RegisterCall) -> None:
        self._call(record)
        self.facts.observe(record)
        self._hooks.registered(record)

    def _wrapped(self, record: ConnectorWrapped) -> None:
        engines = self.facts.engines
        self.facts.observe(record)
        if self.facts.engines != engines:  # what an engine before was given is gone with it
            self._loading.clear()
            self._saving.clear()
        if record.side is Side.WORKER:
            self.has_worker = True
            self._hooks.wrapped(record)

    # -- pages and bytes ---------------------------------------------------------------------------------------------

    def _pages(self, callback: int, pages: list[list[int]], direction: str | None) -> None:
        for layer_group, slots in enumerate(pages):
            if not slots:
                continue
            group, absent = self.group(layer_group), slots.count(-1)
            if absent:
                self._counts[names.METRIC_CALLBACK_ABSENT_PAGES, group, _PAGE_CALLBACKS.get(callback, _OTHER)] += absent
            if direction is not None:
                self._moved(direction, group, "eligible", len(slots) - absent)

    def _moved(self, direction: str, group: int, source: str, pages: int) -> None:
        if pages:
            nbytes = self.facts.bytes_per_page(group)
            self._counts[names.METRIC_TRANSFER_PAGES, direction, group, "", source] += pages
            if nbytes is not None:
                self._counts[names.METRIC_TRANSFER_IO, direction, group, "", source] += pages * nbytes

    def _transfer(self, record: Transfer) -> None:
        self._saw(record.ended_ns)
        counts = self._counts
        direction, tier = record.direction._value_, record.tier._value_
        if record.error is not None:
            counts[names.METRIC_TRANSFER_ERRORS, direction, tier] += 1
            return
        group, source = self.group(record.layer_group), record.source._value_
        pages = len(record.pages) - record.pages.count(-1)
        tier_told = tier if record.source in _HAS_TIER else ""
        counts[names.METRIC_TRANSFER_IO, direction, group, tier_told, source] += max(0, record.nbytes)
        counts[names.METRIC_TRANSFER_PAGES, direction, group, tier_told, source] += pages
        if record.source is not Source.REPORTED:
            return
        self.totals.histogram(names.METRIC_TRANSFER_DURATION, direction, tier).add(record.ended_ns - record.started_ns)
        counts[names.METRIC_TRANSFER_STALL, direction, group] += max(0, record.stall_ns)
        self._prompts.transferred(record)
        self._overlap.transferred(record, group)

    # -- what connectors report --------------------------------------------------------------------------------------

    def _lookup(self, record: Lookup) -> None:
        self._saw(record.ended_ns)
        counts = self._counts
        counts[names.METRIC_LOOKUPS,] += 1
        counts[names.METRIC_LOOKUP_WAIT,] += max(0, record.waited_ns)
        if record.reason is not None:
            counts[names.METRIC_LOOKUP_MISSES, record.reason._value_] += 1
        if record.bounding_layer_group is not None:
            counts[names.METRIC_LOOKUP_BOUNDED, self.group(record.bounding_layer_group)] += 1
        if record.commit_to_offer_ns > 0:
            self.totals.histogram(names.METRIC_LOOKUP_COMMIT_TO_OFFER).add(record.commit_to_offer_ns)

    def _store(self, record: StoreOperation) -> None:
        self._saw(record.ended_ns)
        counts = self._counts
        engine = store_engine(record.engine)
        operation = record.operation._value_
        took = record.ended_ns - record.started_ns
        self.totals.histogram(names.METRIC_STORE_OPERATION_DURATION, engine, operation).add(took)
        counts[names.METRIC_STORE_OPERATIONS, engine, operation, record.outcome._value_] += 1
        counts[names.METRIC_STORE_ATTEMPTS, engine, operation] += max(0, record.attempts)
        counts[names.METRIC_STORE_REQUESTS, engine, operation] += max(0, record.requests)
        counts[names.METRIC_STORE_IO, engine, operation] += max(0, record.nbytes) if record.outcome in MOVED else 0
        self._breakers[engine] = record.breaker

    def _ceiling(self, record: StoreCeiling) -> None:
        self._saw(record.at_ns)  # it belongs to no rank: see Ranks

    def _drop(self, record: Drop) -> None:
        self._saw(record.at_ns)
        labels = record.direction._value_, record.reason._value_
        self._counts[names.METRIC_DROP_IO, *labels] += max(0, record.nbytes)
        self._counts[names.METRIC_DROP_BLOCKS, *labels] += max(0, record.blocks)

    def _prefetch(self, record: Prefetch) -> None:
        self._saw(record.at_ns)
        fate = record.fate._value_
        self._counts[names.METRIC_PREFETCH_IO, fate] += max(0, record.nbytes)
        self._counts[names.METRIC_PREFETCH_BLOCKS, fate] += max(0, record.blocks)
        if record.fate is PrefetchFate.USEFUL:
            self.totals.histogram(names.METRIC_PREFETCH_LEAD).add(record.lead_ns)

    # -- tracekv itself ----------------------------------------------------------------------------------------------

    def _settings(self, record: SettingsSeen) -> None:
        self.settings_digest = record.digest

    def _fault(self, record: TracerFault) -> None:
        self._saw(record.at_ns)
        self._counts[names.METRIC_TRACER_FAULTS,] += 1

    def _finding(self, record: Finding) -> None:
        self._counts[names.METRIC_FINDINGS, record.rule] += 1

    def _reduced(self, record: TracingReduced) -> None:
        self._saw(record.at_ns)
        if record.limit_ppm:  # else the detail was switched, and cost isn't what it is about
            self._cost_ppm = record.cost_ppm
        self._is_reduced = record.is_reduced


_HAS_TIER = frozenset({Source.REPORTED, Source.OBSERVED})
_PAGE_CALLBACKS: dict[int, str] = {
    number: name
    for number, name in _CALLBACK_NAMES.items()
    if name in registry().metrics[names.METRIC_CALLBACK_ABSENT_PAGES].narrowed[names.CALLBACK]
}


def _name(number: int) -> str:
    """``scheduler.NAME`` or ``worker.NAME``, ``other`` for a number that this version doesn't know."""
    return _CALLBACK_NAMES.get(number, _OTHER)
