"""The trace of one process: its bring-up, its end, and what belongs to no pass."""

from __future__ import annotations

from tracekv.journal.records import (
    Call,
    ConnectorWrapped,
    Finding,
    ForwardCallableCall,
    IdlePolls,
    Record,
    RegisterCall,
    TracerFault,
)
from tracekv.journal.vocabulary import Callback, Side
from tracekv.views import ids, names
from tracekv.views._context import Context, fail
from tracekv.views._moments import finding_attributes
from tracekv.views.model import Attributes, Span

#: Callbacks that are no part of a pass, whatever step they name.
_OUTSIDE_PASSES = {
    Callback.SCHEDULER_INIT,
    Callback.WORKER_INIT,
    Callback.WAIT_FOR_INITIALIZATION,
    Callback.REGISTER_FORWARD_PASS_CALLABLE,
    Callback.REGISTER_KV_CACHES,
    Callback.REGISTER_KV_CACHE_LAYOUT,
    Callback.SCHEDULER_SHUTDOWN,
    Callback.WORKER_SHUTDOWN,
}


def belongs_to_process(record: Record) -> bool:
    """Whether a record is told in the process's own trace: bring-up, shutdown, or a callback before the first pass."""
    match record:
        case ForwardCallableCall() | RegisterCall() | TracerFault() | ConnectorWrapped():
            return True
        case IdlePolls():
            return record.step == 0
        case Call():
            return record.callback in _OUTSIDE_PASSES or (type(record) is Call and record.step == 0)
    return False


class ProcessTrace:
    """Makes the spans of one process's own trace; its root ends when the first pass begins, or at the close."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._start_ns: int | None = None
        self._end_ns = 0
        self._not_implemented: list[str] = []
        self._has_ended = False

    def feed(self, record: Record) -> list[Span]:
        """The span of a record that :func:`belongs_to_process`."""
        context = self._context
        trace = context.process_trace()
        parent = ids.root_id(trace)
        match record:
            case ConnectorWrapped():
                self._not_implemented += [f"{record.side.value}.{name}" for name in record.not_implemented]
                context.forget_classes()
                return []
            case TracerFault():
                attributes: Attributes = {names.INSTRUMENT: record.instrument}
                span = context.span(names.TRACER_FAULT, trace, parent, -1, record.at_ns, record.at_ns, attributes)
                fail(span, record.error)
            case Finding():
                attributes = finding_attributes(record)
                span = context.span(names.FINDING, trace, parent, -6, record.at_ns, record.at_ns, attributes)
            case IdlePolls():
                span = idle_polls(context, record, trace, parent)
            case Call():
                span = context.call(record, trace, parent, self._attributes(record))
                self._extend(record)
            case _:
                return []
        return [span]

    def end(self) -> list[Span]:
        """The root, once: from the process's start to the end of the last callback of bring-up."""
        facts = self._context.facts
        if self._has_ended or self._start_ns is None:
            return []
        self._has_ended = True
        trace = self._context.process_trace()
        start = self._start_ns if facts.started is None else min(self._start_ns, facts.started.monotonic_ns)
        attributes: Attributes = {}
        if facts.started is not None:
            attributes = {names.HOST: facts.started.host, names.PID: facts.started.pid}
        if facts.rank is not None and facts.world is not None:
            attributes |= {names.RANK: facts.rank, names.WORLD: facts.world}
        if facts.run_id:
            attributes[names.RUN] = ids.run_label(facts.run_id)
        if self._not_implemented:
            attributes[names.NOT_IMPLEMENTED] = self._not_implemented
        root = self._context.span(names.BRING_UP, trace, None, 0, start, self._end_ns, attributes)
        root.span_id = ids.root_id(trace)
        return [root]

    def _extend(self, record: Call) -> None:
        if self._has_ended:
            return
        self._start_ns = min(self._start_ns or record.started_ns, record.started_ns)
        self._end_ns = max(self._end_ns, record.ended_ns)

    def _attributes(self, record: Call) -> Attributes:
        facts = self._context.facts
        match record:
            case RegisterCall():
                attributes: Attributes = {
                    names.DTYPE: record.dtype,
                    names.GROUPS: [group.layer_group_id for group in record.groups],
                    names.GROUP_WINDOW: [group.window_size or 0 for group in record.groups],
                    names.GROUP_PAGE_BYTES: [group.bytes_per_page for group in record.groups],
                    names.GROUP_SLOTS: [group.num_slots for group in record.groups],
                    names.GROUP_LAYERS: [len(group.layer_ids) for group in record.groups],
                }
                if record.tokens_per_block > 0:
                    attributes[names.BLOCK_TOKENS] = record.tokens_per_block
                return attributes
            case ForwardCallableCall():
                return {names.HAS_CALLABLE: record.has_callable}
            case Call(callback=Callback.SCHEDULER_INIT | Callback.WORKER_INIT):
                side = Side.SCHEDULER if record.callback == Callback.SCHEDULER_INIT else Side.WORKER
                source = facts.source_of(side, "__init__")
                return {} if source is None else {names.CODE_FILE: source.file, names.CODE_LINE: source.line}
        return {}


def idle_polls(context: Context, record: IdlePolls, trace: bytes, parent: bytes) -> Span:
    """One span for ``count`` consecutive polls of ``get_finished`` without an id."""
    name, base = context.base(Callback.GET_FINISHED)
    attributes: Attributes = {**base, names.STEP_NUMBER: record.step}
    if record.count > 1:
        attributes |= {names.CALLS: record.count, names.SUM_NS: record.sum_ns, names.MAX_NS: record.max_ns}
    return context.span(
        name, trace, parent, Callback.GET_FINISHED, record.first_started_ns, record.last_ended_ns, attributes
    )
