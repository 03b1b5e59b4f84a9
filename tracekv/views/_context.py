"""What the traces of requests, steps and the process share: ids, names of requests, and the span of one callback."""

from __future__ import annotations

from tracekv.journal.records import Call, Transfer
from tracekv.journal.vocabulary import Direction, Source
from tracekv.views import ids, names
from tracekv.views.facts import Facts, callback_name, count_pages
from tracekv.views.model import Attributes, Span, Status
from tracekv.views.sampling import Caller, Callers, Sampler

#: Derived trace ids that are kept: a request's is asked for with each of its records.
_KEPT_TRACES = 8192


class Context:
    """Settings and facts of one journal.

    Attributes:
        run: What trace ids are derived from; settled once, before the first span of a request or step.
        detail: ``full`` or ``economy`` (the per-layer hooks as one span per layer group).
        step_sample: A step that moves nothing of an exported request is exported once in so many.
    """

    def __init__(
        self,
        facts: Facts,
        *,
        detail: str,
        hash_request_ids: bool,
        max_links: int,
        sampler: Sampler | None = None,
        step_sample: int = 1,
        callers: Callers | None = None,
    ) -> None:
        self.facts = facts
        self.detail = detail
        self.hash_request_ids = hash_request_ids
        self.max_links = max_links
        self.sampler = sampler or Sampler()
        self.step_sample = step_sample
        self.callers = callers or Callers()
        self.run = b""
        self._base: dict[int, tuple[str, Attributes]] = {}
        self._derived: dict[int, bytes] = {}

    def settle(self) -> None:
        """Take run and rank from the facts; they may come in the middle of a journal."""
        self.run = self.facts.run
        self._base.clear()
        self._derived.clear()

    def derived_trace(self, request_id: int) -> bytes:
        """The trace id that run id and request id make, the same in every process of the run."""
        known = self._derived.get(request_id)
        if known is None:
            if len(self._derived) >= _KEPT_TRACES:
                self._derived.clear()
            known = self._derived[request_id] = ids.trace_id(self.run, "request", request_id)
        return known

    def caller(self, request_id: int) -> Caller | None:
        """Who sent a request, where a journal tells."""
        return self.callers.of(self.run, request_id)

    def request_trace(self, request_id: int) -> bytes:
        """The trace that a request's spans are in: its caller's where that is known, else the derived one."""
        caller = self.caller(request_id)
        return self.derived_trace(request_id) if caller is None else caller.trace_id

    def request_root(self, request_id: int, part: int = 0) -> bytes:
        """The span id of a request's root; a caller's trace may hold those of several requests."""
        return ids.root_id(self.derived_trace(request_id), part)

    def is_exported(self, request_id: int) -> bool:
        """Whether a request's spans are exported."""
        return self.sampler.is_exported(self.derived_trace(request_id), self.caller(request_id))

    def is_sampled_step(self, step: int) -> bool:
        """Whether a step is exported whatever it moves; every rank says the same."""
        return (step - 1) % self.step_sample == 0 and not self.sampler.is_off

    def step_trace(self, step: int) -> bytes:
        """The trace id of a step, the same in every process of the run."""
        return ids.trace_id(self.run, "step", step)

    def process_trace(self) -> bytes:
        """The trace id of this process's bring-up."""
        return ids.trace_id(self.facts.process_id, "process", 0)

    def request_label(self, request_id: int) -> str:
        """A request's id, or its digest."""
        return ids.request_label(self.run, request_id, hashed=self.hash_request_ids)

    def base(self, callback: int) -> tuple[str, Attributes]:
        """Span name and the attributes that every span of a callback has. The dict is shared: copy it."""
        known = self._base.get(callback)
        if known is None:
            side, method = callback_name(callback)
            attributes: Attributes = {
                names.CALLBACK: f"{side.value}.{method}",
                names.CODE_FUNCTION: self.facts.function(side, method),
            }
            if self.facts.rank is not None:
                attributes[names.RANK] = self.facts.rank
            known = self._base[callback] = (method, attributes)
        return known

    def forget_classes(self) -> None:
        """A class was wrapped: functions have to be named anew."""
        self._base.clear()

    def call(self, record: Call, trace: bytes, parent: bytes, attributes: Attributes, which: int = 0) -> Span:
        """The span of one callback."""
        name, base = self.base(record.callback)
        span = self.span(
            name, trace, parent, record.callback, record.started_ns, record.ended_ns, {**base, **attributes}, which
        )
        span.attributes[names.STEP_NUMBER] = record.step
        if record.error is not None:
            fail(span, record.error)
        return span

    def span(
        self,
        name: str,
        trace: bytes,
        parent: bytes | None,
        what: int,
        started_ns: int,
        ended_ns: int,
        attributes: Attributes,
        which: int = 0,
    ) -> Span:
        """A span of this process; an end before the start (records of a torn journal) becomes an empty span."""
        start = self.facts.unix_ns(started_ns)
        return Span(
            name,
            trace,
            ids.span_id(trace, self.facts.process_id, what, started_ns, which),
            parent,
            start,
            max(start, self.facts.unix_ns(ended_ns)),
            attributes,
        )


def fail(span: Span, error: str) -> None:
    """Mark a span as failed; ``error`` is a class or an outcome, never a message: messages may hold what is private."""
    span.status = Status.ERROR
    span.attributes[names.ERROR_TYPE] = error


Moves = dict[int, tuple[int, int]]


class Tally:
    """Pages and bytes that moved, by direction, source and layer group.

    The same bytes can be known twice, as reported and as observed: of each direction the best source counts.
    """

    def __init__(self) -> None:
        self._moved: dict[tuple[Direction, Source], Moves] = {}

    def add(self, record: Transfer) -> None:
        """Count a transfer that succeeded."""
        if record.error is not None:
            return
        moves = self._moved.setdefault((record.direction, record.source), {})
        pages, nbytes = moves.get(record.layer_group, (0, 0))
        pages += count_pages(record.pages)
        moves[record.layer_group] = (pages, nbytes + record.nbytes)

    def both_ways(self, facts: Facts) -> Attributes:
        """For the root of a step."""
        return both_ways(facts, self._best(Direction.LOAD)[1], self._best(Direction.SAVE)[1])

    def one_way(self, direction: Direction, facts: Facts) -> Attributes:
        """For the callback in which it happened."""
        source, moves = self._best(direction)
        return one_way(facts, moves, source)

    def _best(self, direction: Direction) -> tuple[Source, Moves]:
        known = (source for source in Source if (direction, source) in self._moved)
        best = next(known, Source.REPORTED)
        return best, self._moved.get((direction, best), {})


def both_ways(facts: Facts, loads: Moves, saves: Moves) -> Attributes:
    """What moved, ``{layer_group: (pages, bytes)}`` each way; empty where nothing did."""
    groups = sorted(loads.keys() | saves.keys())
    if not groups:
        return {}
    none = (0, 0)
    return {
        names.LOAD_PAGES: sum(pages for pages, _ in loads.values()),
        names.LOAD_BYTES: sum(nbytes for _, nbytes in loads.values()),
        names.SAVE_PAGES: sum(pages for pages, _ in saves.values()),
        names.SAVE_BYTES: sum(nbytes for _, nbytes in saves.values()),
        names.GROUPS: groups,
        names.GROUP_WINDOW: [facts.window(group) for group in groups],
        names.GROUP_LOAD_BYTES: [loads.get(group, none)[1] for group in groups],
        names.GROUP_SAVE_BYTES: [saves.get(group, none)[1] for group in groups],
    }


def one_way(facts: Facts, moves: Moves, source: Source) -> Attributes:
    """What moved, ``{layer_group: (pages, bytes)}``; empty where nothing did."""
    if not moves:
        return {}
    groups = sorted(moves)
    return {
        names.SOURCE: source.value,
        names.PAGES: sum(pages for pages, _ in moves.values()),
        names.BYTES: sum(nbytes for _, nbytes in moves.values()),
        names.GROUPS: groups,
        names.GROUP_PAGES: [moves[group][0] for group in groups],
        names.GROUP_BYTES: [moves[group][1] for group in groups],
        names.GROUP_WINDOW: [facts.window(group) for group in groups],
    }
