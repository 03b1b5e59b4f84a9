"""The traces of steps: one per pass, rooted at ``step``, with the callbacks as they ran."""

from __future__ import annotations

from collections.abc import Callable

from tracekv.journal.records import (
    BindCall,
    BuildCall,
    Call,
    Drop,
    FinishedCall,
    IdlePolls,
    LayerHooks,
    Prefetch,
    StoreOperation,
    Transfer,
)
from tracekv.journal.vocabulary import Callback, Direction
from tracekv.views import ids, names
from tracekv.views._context import Context, Tally
from tracekv.views._moments import drop_attributes, drop_event, prefetch_event, store_span
from tracekv.views._process import idle_polls
from tracekv.views.facts import page_attributes
from tracekv.views.model import Attributes, Event, Link, Span

#: Steps kept open: callbacks of one pass may come after the next one has begun (overlapped scheduling).
_OPEN_STEPS = 2
#: Events on one step's root.
_MAX_EVENTS = 128


class _Step:
    __slots__ = (
        "dropped_links", "end_ns", "events", "has_root", "links", "lost", "new_requests", "number", "requests",
        "root", "scheduled_tokens", "start_ns", "tally", "trace",
    )  # fmt: skip

    def __init__(self, number: int, trace: bytes, start_ns: int, *, has_root: bool) -> None:
        self.number = number
        self.trace = trace
        self.root = ids.root_id(trace)
        self.start_ns = start_ns
        self.end_ns = start_ns
        self.has_root = has_root
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
        attributes: Attributes = {}
        match record:
            case BuildCall():
                attributes = self._built(record)
            case BindCall():
                self._is_enveloped = record.has_envelope
                attributes = _bound(record)
            case FinishedCall():
                attributes = _polled(record)
        step = self._step(record.step, record.started_ns)
        step.start_ns = min(step.start_ns, record.started_ns)
        step.end_ns = max(step.end_ns, record.ended_ns)
        if record.callback == Callback.START_LOAD_KV:
            attributes = step.tally.one_way(Direction.LOAD, self._context.facts)
        elif record.callback == Callback.WAIT_FOR_SAVE:
            attributes = step.tally.one_way(Direction.SAVE, self._context.facts)
        span = self._context.call(record, step.trace, step.root, attributes)
        if isinstance(record, FinishedCall):
            span.links = self._links(record)
        return [*self._take_ended(), span]

    def idle(self, record: IdlePolls) -> list[Span]:
        """Polls without an id; only a single one lies within its pass, more may last long after it."""
        step = self._step(record.step, record.first_started_ns)
        if record.count == 1:
            step.end_ns = max(step.end_ns, record.last_ended_ns)
        return [*self._take_ended(), idle_polls(self._context, record, step.trace, step.root)]

    def hooks(self, record: LayerHooks) -> list[Span]:
        """The per-layer hooks of a pass: a span each, or one per layer group."""
        spans: list[Span] = []
        make = self._each_hook if self._context.detail == "full" else self._hooks_by_group
        for callback, payload in ((Callback.WAIT_FOR_LAYER_LOAD, record.waits), (Callback.SAVE_KV_LAYER, record.saves)):
            times = memoryview(payload[: len(payload) // 16 * 16]).cast("q").tolist()
            # An end of 0: the hook raised, and is told by a record of its own.
            calls = [
                (layer, started, ended)
                for layer, (started, ended) in enumerate(zip(times[::2], times[1::2], strict=True))
                if started and ended
            ]
            if calls:
                step = self._step(record.step, calls[0][1])
                step.end_ns = max(step.end_ns, calls[-1][2])
                spans += make(step, callback, calls)
        return [*self._take_ended(), *spans]

    def transferred(self, record: Transfer) -> tuple[bytes, bytes] | None:
        """Count what moved; the trace and root of its step, to link to."""
        if record.step == 0:
            return None
        if record.step not in self._open and record.step <= self._latest:
            trace = self._context.step_trace(record.step)
            return trace, ids.root_id(trace)
        step = self._step(record.step, record.started_ns)
        step.tally.add(record)
        return step.trace, step.root

    def store(self, record: StoreOperation) -> list[Span]:
        """A store operation for no request in particular: in a trace of its process and the step it fell into."""
        context = self._context
        trace = ids.trace_id(context.facts.process_id, "store", self._latest)
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
            return [context.span(names.DROP, trace, None, -5, record.at_ns, record.at_ns, drop_attributes(record))]
        if len(step.events) < _MAX_EVENTS:
            event = drop_event(context, record) if isinstance(record, Drop) else prefetch_event(context, record)
            step.events.append(event)
        return []

    def lost(self, count: int) -> None:
        """Records were overwritten unread."""
        for step in self._open.values():
            step.lost += count

    def forget_layers(self) -> None:
        """The caches were registered, or rank or class became known: what is kept about hooks is stale."""
        self._hooks.clear()

    def expire(self, before_ns: int) -> list[Span]:
        """End the steps that nothing has happened in since ``before_ns``."""
        return self._end([number for number, step in self._open.items() if step.end_ns < before_ns])

    def close(self) -> list[Span]:
        """End all steps."""
        return [*self._take_ended(), *self._end(list(self._open))]

    def _end(self, numbers: list[int]) -> list[Span]:
        steps = [self._open.pop(number) for number in sorted(numbers)]
        return [self._root(step) for step in steps if step.has_root]

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
            step = self._open[number] = _Step(number, self._context.step_trace(number), start_ns, has_root=has_root)
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

    def _built(self, record: BuildCall) -> Attributes:
        step = self._step(record.step, record.started_ns)
        step.requests = len(record.request_ids)
        step.new_requests = record.new_requests
        step.scheduled_tokens = sum(record.scheduled_tokens)
        for request_id, tokens in zip(
            record.request_ids[: self._context.max_links], record.scheduled_tokens, strict=False
        ):
            label = self._context.request_label(request_id)
            attributes: Attributes = {names.REQUEST_ID: label, names.SCHEDULED_TOKENS: tokens}
            step.links.append(Link(*self._request_root(request_id), attributes))
        step.dropped_links = len(record.request_ids) - len(step.links)
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
            for request_id in list(concerned)[: self._context.max_links]
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
