"""The traces of requests: one per request, rooted at ``request``, with the scheduler's callbacks and what moved."""

from __future__ import annotations

from collections import OrderedDict

from tracekv.journal.records import (
    AllocCall,
    BuildCall,
    Call,
    CancelLoadCall,
    Drop,
    Enqueued,
    Finding,
    FinishCall,
    FinishedCall,
    Lookup,
    Prefetch,
    QueryCall,
    RequestResetCall,
    StoreOperation,
    Transfer,
)
from tracekv.journal.vocabulary import Direction
from tracekv.views import ids, names
from tracekv.views._context import Context, fail, one_way
from tracekv.views._moments import (
    drop_attributes,
    drop_event,
    finding_attributes,
    finding_event,
    prefetch_event,
    store_span,
)
from tracekv.views._request_root import root_attributes
from tracekv.views.facts import count_pages, page_attributes
from tracekv.views.model import Attributes, Event, Link, Span
from tracekv.views.story import Story

#: Events on one request's root.
_MAX_EVENTS = 128


class _Open:
    __slots__ = ("events", "lookups", "part", "query", "root", "story", "trace")

    def __init__(self, story: Story, trace: bytes, root: bytes, part: int) -> None:
        self.story = story
        self.trace = trace
        self.part = part
        self.root = root
        self.events: list[Event] = []
        #: Lookups whose query isn't told yet: it is written when it returns.
        self.lookups: list[Lookup] = []
        #: (span id, started, ended) of the last query.
        self.query: tuple[bytes, int, int] | None = None

    def event(self, event: Event) -> None:
        if len(self.events) < _MAX_EVENTS:
            self.events.append(event)


class RequestTraces:
    """Makes the spans of requests; stories are kept by the process that has the scheduler, others only add what moved.

    Args:
        context: Of the journal.
        max_open: Requests kept open; beyond it the one that was quiet for longest is ended as abandoned.
    """

    def __init__(self, context: Context, max_open: int) -> None:
        self._context = context
        self._max_open = max_open
        self._open: OrderedDict[int, _Open] = OrderedDict()
        #: Request id -> parts of its story that have ended.
        self._ended: OrderedDict[int, int] = OrderedDict()
        self.abandoned = 0

    def root(self, request_id: int) -> tuple[bytes, bytes]:
        """``(trace id, span id)`` of a request's root, open or not, of this process or not."""
        known = self._open.get(request_id)
        if known is not None:
            return known.trace, known.root
        return self._context.request_trace(request_id), self._context.request_root(request_id)

    def call(self, record: QueryCall | AllocCall | FinishCall | CancelLoadCall | RequestResetCall) -> list[Span]:
        """A scheduler callback about one request."""
        if not self._context.is_exported(record.request_id):
            return []
        if isinstance(record, FinishCall) and record.request_id in self._ended and record.request_id not in self._open:
            # Announced twice (contract-v2.md section 4): the story has been told.
            return [self._callback(record, *self.root(record.request_id))]
        spans, known = self._story(record.request_id, record.started_ns)
        story = known.story
        span = self._callback(record, known.trace, known.root)
        match record:
            case QueryCall():
                story.queried(record)
                known.query = (span.span_id, record.started_ns, record.ended_ns)
                spans += self._lookups(known)
            case AllocCall():
                story.allocated(record)
            case FinishCall():
                story.finished(record)
            case RequestResetCall():
                story.reset(record)
                known.event(Event(names.EVENT_RESET, span.start_ns))
        spans.append(span)
        if isinstance(record, FinishCall) and story.held_since_ns is None:
            spans += self._end(record.request_id, "finished", record.ended_ns)
        return spans

    def enqueued(self, record: Enqueued) -> list[Span]:
        """A request entered the engine, where the hook for it is on."""
        self._context.callers.learn(self._context.run, record)
        if not self._context.is_exported(record.request_id):
            return []
        spans, known = self._story(record.request_id, record.at_ns)
        known.story.enqueued(record)
        return spans

    def lookup(self, record: Lookup) -> list[Span]:
        """A connector's search: the child of its query, which is told later, when it returns."""
        if not self._context.is_exported(record.request_id):
            return []
        known = self._open.get(record.request_id)
        if known is None and not self._context.facts.has_scheduler:
            return [self._lookup(record, *self.root(record.request_id))]
        spans: list[Span] = []
        if known is None:
            spans, known = self._story(record.request_id, record.started_ns)
        if known.query is None or record.ended_ns > known.query[2]:
            spans += self._lookups(known)
            known.lookups.append(record)
            return spans
        known.lookups.append(record)
        return [*spans, *self._lookups(known)]

    def transferred(self, record: Transfer, step: tuple[bytes, bytes] | None) -> list[Span]:
        """KV of a request moved; linked to the step in which it did."""
        if not self._context.is_exported(record.request_id):
            return []
        known = self._open.get(record.request_id)
        trace, root = self.root(record.request_id)
        context, facts = self._context, self._context.facts
        pages = count_pages(record.pages)
        attributes: Attributes = {
            **one_way(facts, {record.layer_group: (pages, record.nbytes)}, record.source),
            names.REQUEST_ID: context.request_label(record.request_id),
            names.DIRECTION: record.direction.value,
            names.TIER: record.tier.value,
            names.GROUP: record.layer_group,
            names.PAGES_ABSENT: len(record.pages) - pages,
            names.TOKENS: record.tokens,
            names.QUEUED_NS: record.queued_ns,
            names.READ_NS: record.read_ns,
            names.VERIFY_NS: record.verify_ns,
            names.COPY_NS: record.copy_ns,
            names.STALL_NS: record.stall_ns,
            names.STEP_NUMBER: record.step,
        }
        if facts.rank is not None:
            attributes[names.RANK] = facts.rank
        is_load = record.direction is Direction.LOAD
        what = -3 if is_load else -4
        name = names.LOAD if is_load else names.SAVE
        # A connector may move several batches that began together: the first page tells them apart.
        which = (record.layer_group << 40) + (record.pages[0] if record.pages else 0)
        span = context.span(name, trace, root, what, record.started_ns, record.ended_ns, attributes, which)
        if step is not None:
            span.links = [Link(*step)]
        if record.error is not None:
            fail(span, record.error)
        if known is not None:
            known.story.transferred(record)
        return [span]

    def store(self, record: StoreOperation, request_id: int) -> list[Span]:
        """A store operation for a request."""
        if not self._context.is_exported(request_id):
            return []
        return [store_span(self._context, record, *self.root(request_id))]

    def moment(self, record: Drop | Prefetch) -> list[Span] | None:
        """An event of an open request; a span of its own for a drop after the end; None where no request is named."""
        if record.request_id is None:
            return None
        if not self._context.is_exported(record.request_id):
            return []
        known = self._open.get(record.request_id)
        if known is None:
            if isinstance(record, Prefetch):
                return None
            trace, root = self.root(record.request_id)
            attributes = {
                names.REQUEST_ID: self._context.request_label(record.request_id),
                **drop_attributes(record),
            }
            return [self._context.span(names.DROP, trace, root, -5, record.at_ns, record.at_ns, attributes)]
        if isinstance(record, Drop):
            known.story.dropped(record)
            known.event(drop_event(self._context, record))
        else:
            known.story.prefetched(record)
            known.event(prefetch_event(self._context, record))
        return []

    def found(self, record: Finding, request_id: int) -> list[Span]:
        """A rule was broken for a request: an event of it, or a span below its root where it has ended."""
        if not self._context.is_exported(request_id):
            return []
        known = self._open.get(request_id)
        if known is not None:
            known.story.found(record)
            known.event(finding_event(self._context, record))
            return []
        trace, root = self.root(request_id)
        attributes = {names.REQUEST_ID: self._context.request_label(request_id), **finding_attributes(record)}
        return [self._context.span(names.FINDING, trace, root, -6, record.at_ns, record.at_ns, attributes)]

    def scheduled(self, record: BuildCall) -> None:
        """A pass was planned: its requests are alive."""
        for request_id, tokens in zip(record.request_ids, record.scheduled_tokens, strict=False):
            known = self._open.get(request_id)
            if known is not None:
                known.story.scheduled((record,), tokens)
                self._open.move_to_end(request_id)

    def polled(self, record: FinishedCall) -> list[Span]:
        """``get_finished`` gave ids back: kept pages are released, parked requests go on."""
        spans = []
        at = self._context.facts.unix_ns(record.ended_ns)
        for request_id in record.loading_returned:
            if (known := self._open.get(request_id)) is not None:
                known.event(Event(names.EVENT_LOADED, at))
        for request_id in record.saving_returned:
            if (known := self._open.get(request_id)) is not None:
                known.event(Event(names.EVENT_SAVED, at))
                if known.story.held_since_ns is not None:
                    known.story.released(record.ended_ns)
                    spans += self._end(request_id, "finished", record.ended_ns)
        return spans

    def lost(self, count: int) -> None:
        """Records were overwritten unread."""
        for known in self._open.values():
            known.story.records_lost += count

    def expire(self, before_ns: int) -> list[Span]:
        """End as abandoned what nothing has happened to since ``before_ns``: cancelled requests are never announced."""
        quiet = [request_id for request_id, known in self._open.items() if known.story.last_ns < before_ns]
        return [span for request_id in quiet for span in self._end(request_id, "abandoned", None)]

    def close(self) -> list[Span]:
        """End every story that is still open, as abandoned."""
        return [span for request_id in list(self._open) for span in self._end(request_id, "abandoned", None)]

    def run_begins(self) -> None:
        """Requests are numbered anew from here on."""
        self._ended.clear()

    def _story(self, request_id: int, at_ns: int) -> tuple[list[Span], _Open]:
        known = self._open.get(request_id)
        if known is not None:
            self._open.move_to_end(request_id)
            return [], known
        spans: list[Span] = []
        while len(self._open) >= self._max_open:
            spans += self._end(next(iter(self._open)), "abandoned", None)
        story, part = Story(request_id, at_ns, at_ns), self._ended.get(request_id, 0)
        context = self._context
        known = _Open(story, context.request_trace(request_id), context.request_root(request_id, part), part)
        self._open[request_id] = known
        return spans, known

    def _end(self, request_id: int, outcome: str, at_ns: int | None) -> list[Span]:
        known = self._open.pop(request_id)
        self._ended[request_id] = known.part + 1
        self._ended.move_to_end(request_id)
        while len(self._ended) > self._max_open:
            self._ended.popitem(last=False)
        if outcome == "abandoned":
            self.abandoned += 1
        spans = self._lookups(known)
        story = known.story
        story.outcome = outcome
        story.ended_ns = max(story.last_ns, at_ns or 0)
        context = self._context
        caller, derived = context.caller(request_id), context.derived_trace(request_id)
        is_joined = caller is not None and caller.trace_id == known.trace
        parent = context.request_root(request_id) if known.part else caller.span_id if caller and is_joined else None
        attributes = root_attributes(context, story, known.part)
        root = self._context.span(names.REQUEST, known.trace, parent, 0, story.started_ns, story.ended_ns, attributes)
        root.span_id = known.root
        root.events = known.events
        if caller is not None and not is_joined:
            root.links = [Link(caller.trace_id, caller.span_id)]
        elif is_joined and (context.facts.world or 1) > 1:
            # A rank whose reader doesn't know the caller tells its part in the derived trace.
            root.links = [Link(derived, ids.root_id(derived))]
        return [*spans, root]

    def _callback(self, record: Call, trace: bytes, root: bytes) -> Span:
        attributes: Attributes = {}
        match record:
            case QueryCall():
                attributes = {
                    names.COMPUTED_TOKENS: record.computed_tokens,
                    names.OFFERED_TOKENS: record.offered_tokens,
                    names.IS_ASYNC: record.is_async,
                }
                if record.prompt_tokens is not None:
                    attributes[names.PROMPT_TOKENS] = record.prompt_tokens
                if record.answer is not None:
                    attributes[names.ANSWER] = record.answer
            case AllocCall():
                attributes = page_attributes(self._context.facts, record.pages)
                if record.honoured_tokens is not None:
                    attributes[names.HONOURED_TOKENS] = record.honoured_tokens
            case FinishCall():
                attributes = page_attributes(self._context.facts, record.pages)
                attributes[names.KEEPS_PAGES] = record.keeps_pages
                if record.answer is not None:
                    attributes[names.ANSWER] = record.answer
            case CancelLoadCall():
                attributes = {names.CANCEL_START: record.start, names.CANCEL_END: record.end}
        request_id: int = record.request_id  # type: ignore[attr-defined]  # each kind of record that comes here has one
        attributes[names.REQUEST_ID] = self._context.request_label(request_id)
        return self._context.call(record, trace, root, attributes, which=request_id & 0x7FFFFFFF)

    def _lookups(self, known: _Open) -> list[Span]:
        spans = []
        for record in known.lookups:
            known.story.looked_up(record)
            query = known.query
            is_inside = query is not None and query[1] <= record.started_ns and record.ended_ns <= query[2]
            parent = query[0] if query is not None and is_inside else known.root
            spans.append(self._lookup(record, known.trace, parent))
        known.lookups = []
        return spans

    def _lookup(self, record: Lookup, trace: bytes, parent: bytes) -> Span:
        attributes: Attributes = {
            names.REQUEST_ID: self._context.request_label(record.request_id),
            names.PROMPT_TOKENS: record.prompt_tokens,
            names.COMPUTED_TOKENS: record.computed_tokens,
            names.STORED_TOKENS: record.stored_tokens,
            names.STAGED_TOKENS: record.staged_tokens,
            names.OFFERED_TOKENS: record.offered_tokens,
            names.WAITED_NS: record.waited_ns,
        }
        if record.commit_to_offer_ns:
            attributes[names.COMMIT_TO_OFFER_NS] = record.commit_to_offer_ns
        if record.group_tokens:
            attributes[names.GROUP_TOKENS] = list(record.group_tokens)
        if record.bounding_layer_group is not None:
            attributes[names.BOUNDING_GROUP] = record.bounding_layer_group
        if record.reason is not None:
            attributes[names.MISS_REASON] = record.reason.value
        if record.key is not None:
            attributes[names.KEY] = record.key.hex()
        if self._context.facts.rank is not None:
            attributes[names.RANK] = self._context.facts.rank
        return self._context.span(names.LOOKUP, trace, parent, -6, record.started_ns, record.ended_ns, attributes)


CONCERNS_A_REQUEST = (QueryCall, AllocCall, FinishCall, CancelLoadCall, RequestResetCall)
