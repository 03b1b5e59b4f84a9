"""The traces of steps: one per pass, rooted at ``step``, with the callbacks as they ran."""

from __future__ import annotations

from collections.abc import Callable

from tracekv.journal.records import (
    BindCall,
    BuildCall,
    Call,
    Drop,
    Finding,
    FinishedCall,
    IdlePolls,
    LayerHooks,
    Prefetch,
    Record,
    StoreOperation,
    Transfer,
)
from tracekv.journal.vocabulary import Callback, Direction
from tracekv.views import ids, names
from tracekv.views._context import Context, Tally
from tracekv.views._moments import drop_attributes, drop_event, finding_event, prefetch_event, store_span
from tracekv.views._process import idle_polls
from tracekv.views.facts import page_attributes
from tracekv.views.model import Attributes, Event, Link, Span

#: Steps kept open: callbacks of one pass may come after the next one has begun (overlapped scheduling).
_OPEN_STEPS = 2
#: Events on one step's root.
_MAX_EVENTS = 128
#: Records that a step keeps while nothing says yet that it is exported.
_MAX_HELD = 64


class _Step:
    __slots__ = (
        "dropped_links", "end_ns", "events", "has_root", "held", "is_exported", "links", "lost", "new_requests", "number",
        "requests", "root", "scheduled_tokens", "start_ns", "tally", "trace",
    )  # fmt: skip

    def __init__(self, number: int, trace: bytes, start_ns: int, *, has_root: bool, is_exported: bool) -> None:
        self.number = number
        self.trace = trace
        self.root = ids.root_id(trace)
        self.start_ns = start_ns
        self.end_ns = start_ns
        self.has_root = has_root
        self.is_exported = is_exported
        #: What happened in it, while it isn't exported: told if it moves something of an exported request after all.
        self.held: list[Record] = []
        self.links: list[Link] = []
        self.dropped_links = 0
        self.requests = self.new_requests = self.scheduled_tokens = 0
        self.tally = Tally()
        self.events: list[Event] = []
        self.lost = 0


class StepTraces:
    """Makes the spans of passes. The root is made by the leader; where no envelope joins processes, by each for itself.

    Args:
        context: Of the journal.
        request_root: ``(trace id, root span id)`` of a request, for the links.
    """

    def __init__(self, context: Context, request_root: Callable[[int], tuple[bytes, bytes]]) -> None:
        self._context = context
        self._request_root = request_root
        self._open: dict[int, _Step] = {}
        self._ended: list[Span] = []
        self._latest = 0
        self._is_enveloped = True
        #: (hook, layer) -> (layer group, attributes): what the spans of a layer's hook share.
        self._hooks: dict[tuple[int, int], tuple[int, Attributes]] = {}

    def call(self, record: Call) -> list[Span]:
        """A callback of a pass."""
        if isinstance(record, BindCall):
            self._is_enveloped = record.has_envelope
        step = self._step(record.step, record.started_ns)
        step.start_ns = min(step.start_ns, record.started_ns)
        step.end_ns = max(step.end_ns, record.ended_ns)
        return self._take(step, record)

    def idle(self, record: IdlePolls) -> list[Span]:
        """Polls without an id; only a single one lies within its pass, more may last long after it."""
        step = self._step(record.step, record.first_started_ns)
        if record.count == 1:
            step.end_ns = max(step.end_ns, record.last_ended_ns)
        return self._take(step, record)

    def hooks(self, record: LayerHooks) -> list[Span]:
        """The per-layer hooks of a pass: a span each, or one per layer group."""
        times = [moment for payload in (record.waits, record.saves) for moment in _moments(payload) if moment]
        if not times:
            return self._take_ended()
        step = self._step(record.step, min(times))
        step.end_ns = max(step.end_ns, *times)
        return self._take(step, record)

    def _take(self, step: _Step, record: Call | IdlePolls | LayerHooks) -> list[Span]:
        if step.is_exported:
            return [*self._take_ended(), *self._tell(step, record)]
        step.held.append(record)
        del step.held[:-_MAX_HELD]
        return self._take_ended()

    def _tell(self, step: _Step, record: Record) -> list[Span]:
        match record:
            case LayerHooks():
                return self._hook_spans(step, record)
            case IdlePolls():
                return [idle_polls(self._context, record, step.trace, step.root)]
            case Call():
                span = self._context.call(record, step.trace, step.root, self._attributes(step, record))
                if isinstance(record, FinishedCall):
                    span.links = self._links(record)
                return [span]
        return []

    def _attributes(self, step: _Step, record: Call) -> Attributes:
        match record:
            case BuildCall():
                return self._built(step, record)
            case BindCall():
                return _bound(record)
            case FinishedCall():
                return _polled(record)
            case Call(callback=Callback.START_LOAD_KV):
                return step.tally.one_way(Direction.LOAD, self._context.facts)
            case Call(callback=Callback.WAIT_FOR_SAVE):
                return step.tally.one_way(Direction.SAVE, self._context.facts)
        return {}

    def _hook_spans(self, step: _Step, record: LayerHooks) -> list[Span]:
        spans: list[Span] = []
        make = self._each_hook if self._context.detail == "full" else self._hooks_by_group
        for callback, payload in ((Callback.WAIT_FOR_LAYER_LOAD, record.waits), (Callback.SAVE_KV_LAYER, record.saves)):
            times = _moments(payload)
            # An end of 0: the hook raised, and is told by a record of its own.
            calls = [
                (layer, started, ended)
                for layer, (started, ended) in enumerate(zip(times[::2], times[1::2], strict=True))
                if started and ended
            ]
            if calls:
                spans += make(step, callback, calls)
        return spans

    def transferred(self, record: Transfer) -> tuple[bytes, bytes] | None:
        """Count what moved; the trace and root of its step, to link to."""
        if record.step == 0:
            return None
        if record.step not in self._open and record.step <= self._latest:
            trace = self._context.step_trace(record.step)
            return trace, ids.root_id(trace)
        step = self._step(record.step, record.started_ns)
        step.tally.add(record)
        if not step.is_exported and self._context.is_exported(record.request_id):
            step.is_exported = True
            held, step.held = step.held, []
            self._ended += [span for earlier in held for span in self._tell(step, earlier)]
        return step.trace, step.root

    def store(self, record: StoreOperation) -> list[Span]:
        """A store operation for no request in particular: in a trace of its process and the step it fell into."""
        context = self._context
        trace = ids.trace_id(context.facts.process_id, "store", self._latest)
        if not context.sampler.is_exported(trace):
            return []
        span = store_span(context, record, trace, None)
        if self._latest:
            step_trace = context.step_trace(self._latest)
            span.links = [Link(step_trace, ids.root_id(step_trace))]
        return [span]

    def moment(self, record: Drop | Prefetch) -> list[Span]:
        """What concerns no open request: an event of the step in progress; a drop outside of any is a span of its own."""
        context = self._context
        step = self._open.get(self._latest)
        if step is None:
            if isinstance(record, Prefetch):
                return []
            trace = ids.trace_id(context.facts.process_id, "store", self._latest)
            if not context.sampler.is_exported(trace):
                return []
            return [context.span(names.DROP, trace, None, -5, record.at_ns, record.at_ns, drop_attributes(record))]
        if len(step.events) < _MAX_EVENTS:
            event = drop_event(context, record) if isinstance(record, Drop) else prefetch_event(context, record)
            step.events.append(event)
        return []

    def found(self, record: Finding) -> bool:
        """A rule was broken for no request: an event of its step; False where that isn't open."""
        step = self._open.get(record.step)
        if step is None:
            return False
        if len(step.events) < _MAX_EVENTS:
            step.events.append(finding_event(self._context, record))
        return True

    def lost(self, count: int) -> None:
        """Records were overwritten unread."""
        for step in self._open.values():
            step.lost += count

    def forget_layers(self) -> None:
        """The caches were registered, or rank or class became known: what is kept about hooks is stale."""
        self._hooks.clear()

    def expire(self, before_ns: int) -> list[Span]:
        """End the steps that nothing has happened in since ``before_ns``."""
        ended = self._end([number for number, step in self._open.items() if step.end_ns < before_ns])
        return [*self._take_ended(), *ended]

    def close(self) -> list[Span]:
        """End all steps."""
        return [*self._take_ended(), *self._end(list(self._open))]

    def run_begins(self) -> None:
        """Steps are numbered anew from here on."""
        self._latest = 0

    def _end(self, numbers: list[int]) -> list[Span]:
        steps = [self._open.pop(number) for number in sorted(numbers)]
        return [self._root(step) for step in steps if step.has_root and step.is_exported]

    def _take_ended(self) -> list[Span]:
        ended, self._ended = self._ended, []
        return ended

    def _step(self, number: int, start_ns: int) -> _Step:
        step = self._open.get(number)
        if step is None:
            # A step that has ended gets no second root from a record that comes late.
            has_root = number > self._latest and (self._context.facts.has_scheduler or not self._is_enveloped)
            self._latest = max(self._latest, number)
            self._ended += self._end([known for known in self._open if known <= self._latest - _OPEN_STEPS])
            context = self._context
            step = self._open[number] = _Step(
                number,
                context.step_trace(number),
                start_ns,
                has_root=has_root,
                is_exported=context.is_sampled_step(number),
            )
        return step

    def _root(self, step: _Step) -> Span:
        context = self._context
        attributes: Attributes = {
            names.STEP_NUMBER: step.number,
            names.REQUESTS: step.requests,
            names.NEW_REQUESTS: step.new_requests,
            names.SCHEDULED_TOKENS: step.scheduled_tokens,
            **step.tally.both_ways(context.facts),
        }
        if context.facts.rank is not None:
            attributes[names.RANK] = context.facts.rank
        if step.lost:
            attributes[names.RECORDS_LOST] = step.lost
        root = context.span(names.STEP, step.trace, None, 0, step.start_ns, step.end_ns, attributes)
        root.span_id = step.root
        root.links = step.links
        root.dropped_links = step.dropped_links
        root.events = step.events
        return root

    def _built(self, step: _Step, record: BuildCall) -> Attributes:
        context = self._context
        step.requests = len(record.request_ids)
        step.new_requests = record.new_requests
        step.scheduled_tokens = sum(record.scheduled_tokens)
        # A link to a request that isn't exported would lead nowhere.
        exported = [
            pair
            for pair in zip(record.request_ids, record.scheduled_tokens, strict=False)
            if context.is_exported(pair[0])
        ]
        for request_id, tokens in exported[: context.max_links]:
            label = context.request_label(request_id)
            attributes: Attributes = {names.REQUEST_ID: label, names.SCHEDULED_TOKENS: tokens}
            step.links.append(Link(*self._request_root(request_id), attributes))
        step.dropped_links += len(exported) - min(len(exported), context.max_links)
        groups = max((len(pages) for _, pages in record.pages), default=0)
        merged: list[list[int]] = [[] for _ in range(groups)]
        for _, pages in record.pages:
            for group, slots in enumerate(pages):
                merged[group] += slots
        return {
            names.REQUESTS: step.requests,
            names.NEW_REQUESTS: step.new_requests,
            names.SCHEDULED_TOKENS: step.scheduled_tokens,
            names.HAS_METADATA: record.has_metadata,
            **(page_attributes(self._context.facts, merged) if merged else {}),
        }

    def _links(self, record: FinishedCall) -> list[Link]:
        concerned = dict.fromkeys(
            [*record.saving_given, *record.loading_given, *record.saving_returned, *record.loading_returned]
        )
        return [
            Link(*self._request_root(request_id), {names.REQUEST_ID: self._context.request_label(request_id)})
            for request_id in [i for i in concerned if self._context.is_exported(i)][: self._context.max_links]
        ]

    def _each_hook(self, step: _Step, callback: int, calls: list[tuple[int, int, int]]) -> list[Span]:
        context, number, trace, parent = self._context, step.number, step.trace, step.root
        name, spans = context.base(callback)[0], []
        for layer, started, ended in calls:
            span = context.span(
                name, trace, parent, callback, started, ended, self._hook(callback, layer)[1].copy(), layer
            )
            span.attributes[names.STEP_NUMBER] = number
            spans.append(span)
        return spans

    def _hooks_by_group(self, step: _Step, callback: int, calls: list[tuple[int, int, int]]) -> list[Span]:
        groups: dict[int, list[tuple[int, int, int]]] = {}
        for call in calls:
            groups.setdefault(self._hook(callback, call[0])[0], []).append(call)
        spans = []
        for group, members in groups.items():
            name, base = self._context.base(callback)
            took = [ended - started for _, started, ended in members]
            attributes: Attributes = {
                **base,
                names.STEP_NUMBER: step.number,
                names.GROUP: group,
                names.CALLS: len(members),
                names.SUM_NS: sum(took),
                names.MAX_NS: max(took),
            }
            spans.append(
                self._context.span(
                    name, step.trace, step.root, callback, members[0][1], members[-1][2], attributes, group
                )
            )
        return spans

    def _hook(self, callback: int, layer: int) -> tuple[int, Attributes]:
        known = self._hooks.get((callback, layer))
        if known is None:
            group = self._context.facts.group_of_layer(layer)
            attributes = {**self._context.base(callback)[1], names.LAYER: layer, names.GROUP: group}
            known = self._hooks[callback, layer] = (group, attributes)
        return known


def _moments(payload: bytes) -> list[int]:
    """The numbers of a record's hook pairs."""
    return memoryview(payload[: len(payload) // 16 * 16]).cast("q").tolist()


def _bound(record: BindCall) -> Attributes:
    attributes: Attributes = {names.HAS_ENVELOPE: record.has_envelope}
    if record.nbytes is not None:
        attributes[names.METADATA_BYTES] = record.nbytes
    if record.digest is not None:
        attributes[names.METADATA_DIGEST] = record.digest.hex()
    return attributes


def _polled(record: FinishedCall) -> Attributes:
    attributes: Attributes = {
        names.SAVING_GIVEN: len(record.saving_given),
        names.SAVING_RETURNED: len(record.saving_returned),
        names.LOADING_GIVEN: len(record.loading_given),
        names.LOADING_RETURNED: len(record.loading_returned),
    }
    if record.answer is not None:
        attributes[names.ANSWER] = record.answer
    return attributes
