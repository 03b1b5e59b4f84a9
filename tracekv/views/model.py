"""A finished span as the views make it: plain data, far cheaper than an SDK span, and encoded to OTLP as it is."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import msgspec

Scalar = str | bool | int | float
AttributeValue = Scalar | Sequence[Scalar]
Attributes = dict[str, AttributeValue]


class Kind(IntEnum):
    """OTLP's SpanKind."""

    UNSPECIFIED = 0
    INTERNAL = 1
    SERVER = 2
    CLIENT = 3
    PRODUCER = 4
    CONSUMER = 5


class Status(IntEnum):
    """OTLP's StatusCode."""

    UNSET = 0
    OK = 1
    ERROR = 2


class Link(msgspec.Struct, gc=False):
    """A relation to a span of another trace."""

    trace_id: bytes
    span_id: bytes
    attributes: Attributes = {}


class Event(msgspec.Struct, gc=False):
    """Something that happened at one moment of a span."""

    name: str
    unix_ns: int
    attributes: Attributes = {}


class Span(msgspec.Struct, gc=False):
    """A finished span.

    Attributes:
        trace_id: 16 bytes.
        span_id, parent_span_id: 8 bytes; the parent is None for a root.
        start_ns, end_ns: Unix time in nanoseconds.
        dropped_links: Links left out because there were too many.
    """

    name: str
    trace_id: bytes
    span_id: bytes
    parent_span_id: bytes | None
    start_ns: int
    end_ns: int
    attributes: Attributes
    kind: Kind = Kind.INTERNAL
    links: Sequence[Link] = ()
    events: Sequence[Event] = ()
    status: Status = Status.UNSET
    status_message: str = ""
    dropped_links: int = 0
