"""What connectors report besides transfers: store operations as spans, drops and prefetches as events."""

from __future__ import annotations

from tracekv.journal.records import Drop, Finding, Prefetch, StoreOperation
from tracekv.journal.vocabulary import Outcome
from tracekv.views import names
from tracekv.views._context import Context, fail
from tracekv.views.model import Attributes, Event, Kind, Span

#: Outcomes that are an answer, not a failure.
_ANSWERS = {Outcome.OK, Outcome.EXISTS, Outcome.MISSING}
#: Engines without a server behind them.
_LOCAL_ENGINES = {"local", "memory", "file"}


def store_span(context: Context, record: StoreOperation, trace: bytes, parent: bytes | None) -> Span:
    """One logical operation on a store. What wasn't there is no error; what was there and unusable is one."""
    attributes: Attributes = {
        names.STORE_ENGINE: record.engine,
        names.STORE_OUTCOME: record.outcome.value,
        names.STORE_ATTEMPTS: record.attempts,
        names.STORE_REQUESTS: record.requests,
        names.STORE_BREAKER: record.breaker,
        names.RANK: record.rank,
        names.BLOCKS: record.blocks,
        names.BYTES: record.nbytes,
        names.QUEUED_NS: record.queued_ns,
        names.TRANSFER_NS: record.transfer_ns,
        names.VERIFY_NS: record.verify_ns,
    }
    if record.bucket is not None:
        attributes[names.S3_BUCKET] = record.bucket
    if record.key is not None:
        attributes[names.KEY] = record.key.hex()
    if record.layer_group is not None:
        attributes[names.GROUP] = record.layer_group
    if record.request_id is not None:
        attributes[names.REQUEST_ID] = context.request_label(record.request_id)
    # Two threads may begin at the same nanosecond: the object's digest tells them apart.
    which = int.from_bytes((record.key or b"")[:4], "little")
    name = names.STORE + record.operation.value
    span = context.span(name, trace, parent, -2, record.started_ns, record.ended_ns, attributes, which)
    span.kind = Kind.INTERNAL if record.engine in _LOCAL_ENGINES else Kind.CLIENT
    if record.outcome not in _ANSWERS:
        fail(span, record.error or record.outcome.value)
    return span


def drop_event(context: Context, record: Drop) -> Event:
    """Blocks that were given up."""
    return Event(names.EVENT_DROP, context.facts.unix_ns(record.at_ns), drop_attributes(record))


def drop_attributes(record: Drop) -> Attributes:
    """Direction, reason and amount of a drop."""
    attributes: Attributes = {
        names.DIRECTION: record.direction.value,
        names.REASON: record.reason.value,
        names.BLOCKS: record.blocks,
        names.BYTES: record.nbytes,
    }
    if record.layer_group is not None:
        attributes[names.GROUP] = record.layer_group
    return attributes


def finding_event(context: Context, record: Finding) -> Event:
    """A rule that was broken."""
    return Event(names.EVENT_FINDING, context.facts.unix_ns(record.at_ns), finding_attributes(record))


def finding_attributes(record: Finding) -> Attributes:
    """Which rule, how bad, and about what."""
    attributes: Attributes = {
        names.RULE: record.rule,
        names.SEVERITY: record.severity,
        names.SUBJECT: record.subject,
        names.WHAT: record.what,
    }
    if record.caused_by is not None:
        attributes[names.CAUSED_BY] = record.caused_by
    return attributes


def prefetch_event(context: Context, record: Prefetch) -> Event:
    """What became of blocks that were read ahead."""
    attributes: Attributes = {
        names.FATE: record.fate.value,
        names.BLOCKS: record.blocks,
        names.BYTES: record.nbytes,
        names.LEAD_NS: record.lead_ns,
    }
    return Event(names.EVENT_PREFETCH, context.facts.unix_ns(record.at_ns), attributes)
