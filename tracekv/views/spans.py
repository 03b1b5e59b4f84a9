"""Records to spans: a trace per request, a trace per step, a trace per process.

A :class:`SpanView` reads the records of one journal. What it makes of several journals of a run fits together, since ids are derived
from the run id, the request id and the step (:mod:`tracekv.views.ids`). While the run id isn't known, records wait.
"""

from __future__ import annotations

from tracekv.journal.records import (
    BindCall,
    BuildCall,
    Call,
    ConnectorWrapped,
    Drop,
    Enqueued,
    Finding,
    FinishedCall,
    IdlePolls,
    LayerHooks,
    Lookup,
    Prefetch,
    ProcessStarted,
    Record,
    RegisterCall,
    RunJoined,
    StoreOperation,
    Transfer,
)
from tracekv.journal.vocabulary import Source
from tracekv.views._context import Context
from tracekv.views._process import ProcessTrace, belongs_to_process
from tracekv.views._request_traces import CONCERNS_A_REQUEST, RequestTraces
from tracekv.views._steps import StepTraces
from tracekv.views.facts import Facts
from tracekv.views.model import Event, Kind, Link, Span, Status
from tracekv.views.sampling import Callers, Sampler

__all__ = ["Event", "Kind", "Link", "Span", "SpanView", "Status"]

#: How long bring-up waits for a rank to be told, and a step for a further callback.
_BRING_UP_PATIENCE_NS = 10_000_000_000
_STEP_PATIENCE_NS = 1_000_000_000


class SpanView:
    """Consumes the records of one journal, in the order in which they were written, and yields finished spans.

    Not thread-safe: one reader feeds it. Memory is bounded: by ``max_requests`` open stories, two open steps and ``max_held`` records
    that wait for the run id. Where a bound is reached, the oldest goes first: a story is ended as abandoned; the wait for a
    run id is given up, and trace ids are derived from the process id from then on.

    Args:
        detail: ``full``: a span per call of a per-layer hook; ``economy``: one per layer group, hook and pass.
        hash_request_ids: Digests instead of request and client ids.
        max_links: Requests that a step's root links to; the rest is counted.
        request_timeout_s: A story in which nothing happened for so long is ended as abandoned (:meth:`expire`).
        sampler: Which requests are exported; all by default. No span is made of one that isn't.
        step_sample: A step is exported when it moves something of an exported request, otherwise once in so many.
        callers: Shared by views of the same run, so that each knows the callers that any of their journals tells.
    """

    def __init__(
        self,
        *,
        detail: str = "economy",
        hash_request_ids: bool = False,
        max_requests: int = 4096,
        max_held: int = 8192,
        max_links: int = 128,
        request_timeout_s: float = 600.0,
        sampler: Sampler | None = None,
        step_sample: int = 1,
        callers: Callers | None = None,
    ) -> None:
        self.facts = Facts()
        self._context = Context(
            self.facts,
            detail=detail,
            hash_request_ids=hash_request_ids,
            max_links=max_links,
            sampler=sampler,
            step_sample=step_sample,
            callers=callers,
        )
        self._requests = RequestTraces(self._context, max_requests)
        self._steps = StepTraces(self._context, self._requests.root)
        self._process = ProcessTrace(self._context)
        self._held: list[Record] | None = []
        self._held_since_ns: int | None = None
        self._max_held = max_held
        self._timeout_ns = int(request_timeout_s * 1e9)
        self.records = 0
        self.records_lost = 0

    @property
    def detail(self) -> str:
        """``full``, ``economy`` or ``off`` (nothing is made of what comes); may be changed at any time."""
        return self._context.detail

    @detail.setter
    def detail(self, detail: str) -> None:
        self._context.detail = detail

    @property
    def abandoned(self) -> int:
        """Stories ended without an announced end."""
        return self._requests.abandoned

    def feed(self, record: Record) -> list[Span]:
        """Take one record; the spans that are finished by it."""
        self.records += 1
        engines = self.facts.engines
        self.facts.observe(record)
        ended = self._engine_ends() if engines and self.facts.engines != engines else []
        if isinstance(record, RunJoined):
            return self._release() if self._held is not None else self._settle()
        if self._context.detail == "off":
            return ended
        if self._held is None:
            return [*ended, *self._view(record)]
        self._held.append(record)
        # A worker that is bound bare metadata will never be told of a run.
        is_alone = isinstance(record, BindCall) and not record.has_envelope
        return self._release() if is_alone or len(self._held) > self._max_held else []

    def lost(self, count: int) -> None:
        """``count`` records were overwritten before they were read; what is open may be incomplete and says so."""
        self.records_lost += count
        self._requests.lost(count)
        self._steps.lost(count)

    def expire(self, now_ns: int) -> list[Span]:
        """End what nothing has happened to for too long; ``now_ns`` is the monotonic time of the journal's host.

        Call it now and then, also while no records come: cancelled requests are never announced, and the last pass before
        a pause ends only here.
        """
        spans: list[Span] = []
        if self._held:
            self._held_since_ns = self._held_since_ns or now_ns
            if now_ns - self._held_since_ns > _BRING_UP_PATIENCE_NS:
                told = [record for record in self._held if belongs_to_process(record)]
                self._held = [record for record in self._held if not belongs_to_process(record)]
                spans += [span for record in told for span in self._view(record)]
        spans += self._steps.expire(now_ns - _STEP_PATIENCE_NS)
        spans += self._requests.expire(now_ns - self._timeout_ns)
        return spans

    def close(self) -> list[Span]:
        """No more records will come: end everything, open requests as abandoned."""
        spans = self._release() if self._held is not None else []
        return [*spans, *self._bring_up_ends(), *self._requests.close(), *self._steps.close()]

    def _engine_ends(self) -> list[Span]:
        """Another engine of this process begins: what the one before left open ends with it."""
        spans = self._release() if self._held is not None else []
        return [*spans, *self._requests.close(), *self._steps.close()]

    def _bring_up_ends(self) -> list[Span]:
        spans = self._process.end()
        return [] if self._context.sampler.is_off else spans

    def _release(self) -> list[Span]:
        held, self._held = self._held or [], None
        self._context.settle()
        return [span for record in held for span in self._view(record)]

    def _settle(self) -> list[Span]:
        if self.facts.run != self._context.run:
            self._requests.run_begins()
            self._steps.run_begins()
        self._context.settle()
        self._steps.forget_layers()
        return []

    def _found(self, record: Finding) -> list[Span]:
        if record.request_id is not None:
            return self._requests.found(record, record.request_id)
        if self._steps.found(record):
            return []
        told = self._process.feed(record)
        return [] if self._context.sampler.is_off else told

    def _view(self, record: Record) -> list[Span]:
        if belongs_to_process(record):
            if isinstance(record, (RegisterCall, ConnectorWrapped)):
                self._steps.forget_layers()
            told = self._process.feed(record)
            return [] if self._context.sampler.is_off else told
        match record:
            case LayerHooks():
                return self._steps.hooks(record)
            case Transfer():
                step = self._steps.transferred(record)
                # A plan is no movement: it counts where nothing better is known, and has no span.
                return [] if record.source is Source.PLANNED else self._requests.transferred(record, step)
            case Lookup():
                return self._requests.lookup(record)
            case StoreOperation():
                if record.request_id is None:
                    return self._steps.store(record)
                return self._requests.store(record, record.request_id)
            case Drop() | Prefetch():
                spans = self._requests.moment(record)
                return self._steps.moment(record) if spans is None else spans
            case Finding():
                return self._found(record)
            case Enqueued():
                return self._requests.enqueued(record)
            case IdlePolls():
                return self._steps.idle(record)
            case BuildCall():
                self._requests.scheduled(record)
                return [*self._bring_up_ends(), *self._steps.call(record)]
            case FinishedCall():
                return [*self._steps.call(record), *self._requests.polled(record)]
            case BindCall():
                return [*self._bring_up_ends(), *self._steps.call(record)]
            case Call():
                return (
                    self._requests.call(record) if isinstance(record, CONCERNS_A_REQUEST) else self._steps.call(record)
                )
            case ProcessStarted() | _:
                return []
