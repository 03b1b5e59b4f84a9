"""Spans as the bytes of an OTLP ``ExportTraceServiceRequest``, written field by field.

Measured for spans with seven attributes: 5 µs a span; through messages of ``opentelemetry-proto`` 19 µs, through SDK spans 35 or more.
Most of it is saved by keeping the bytes of attributes that come again. Tests parse the result with ``opentelemetry-proto``.

Source: the ``.proto`` files of the OpenTelemetry protocol, 1.x (field numbers), and the protocol buffers' wire format.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping

from tracekv._version import __version__
from tracekv.views.model import AttributeValue, Event, Link, Span, Status
from tracekv.views.otlp import SCOPE_NAME

# A field's first byte is ``number << 3 | wire type``: 0 varint, 1 eight bytes, 2 length-delimited.
_REQUEST_RESOURCE_SPANS = 1 << 3 | 2
_RESOURCE_SPANS_RESOURCE = 1 << 3 | 2
_RESOURCE_SPANS_SCOPE_SPANS = 2 << 3 | 2
_RESOURCE_ATTRIBUTES = 1 << 3 | 2
_SCOPE_SPANS_SCOPE = 1 << 3 | 2
_SCOPE_SPANS_SPANS = 2 << 3 | 2
_SCOPE_NAME = 1 << 3 | 2
_SCOPE_VERSION = 2 << 3 | 2
_SPAN_TRACE_ID = bytes((1 << 3 | 2, 16))
_SPAN_SPAN_ID = bytes((2 << 3 | 2, 8))
_SPAN_PARENT = bytes((4 << 3 | 2, 8))
_SPAN_NAME = 5 << 3 | 2
_SPAN_KIND = 6 << 3
_SPAN_START = 7 << 3 | 1
_SPAN_END = 8 << 3 | 1
_SPAN_ATTRIBUTES = 9 << 3 | 2
_SPAN_EVENTS = 11 << 3 | 2
_SPAN_LINKS = 13 << 3 | 2
_SPAN_DROPPED_LINKS = bytes((14 << 3,))
_SPAN_STATUS = 15 << 3 | 2
_EVENT_TIME = 1 << 3 | 1
_EVENT_NAME = 2 << 3 | 2
_EVENT_ATTRIBUTES = 3 << 3 | 2
_LINK_TRACE_ID = bytes((1 << 3 | 2, 16))
_LINK_SPAN_ID = bytes((2 << 3 | 2, 8))
_LINK_ATTRIBUTES = 4 << 3 | 2
_STATUS_MESSAGE = 2 << 3 | 2
_STATUS_CODE = 3 << 3
_KEY_VALUE_KEY = 1 << 3 | 2
_KEY_VALUE_VALUE = 2 << 3 | 2
_ANY_STRING = 1 << 3 | 2
_ANY_BOOL = 2 << 3
_ANY_INT = bytes((3 << 3,))
_ANY_DOUBLE = 4 << 3 | 1
_ANY_ARRAY = 5 << 3 | 2
_ARRAY_VALUES = 1 << 3 | 2

_times = struct.Struct("<BQBQ").pack
_time = struct.Struct("<BQ").pack
_double = struct.Struct("<Bd").pack


def to_request(spans: Iterable[Span], resource: Mapping[str, AttributeValue]) -> bytes:
    """A serialized request that holds ``spans`` under one resource; a ``TracesData`` message has the same bytes."""
    scope = _field(_SCOPE_NAME, SCOPE_NAME.encode()) + _field(_SCOPE_VERSION, __version__.encode())
    scope_spans = b"".join([_field(_SCOPE_SPANS_SCOPE, scope), *[_span(span) for span in spans]])
    return _field(
        _REQUEST_RESOURCE_SPANS,
        _field(_RESOURCE_SPANS_RESOURCE, _attributes(_RESOURCE_ATTRIBUTES, resource))
        + _field(_RESOURCE_SPANS_SCOPE_SPANS, scope_spans),
    )


def _span(span: Span) -> bytes:
    parts = [_SPAN_TRACE_ID, span.trace_id, _SPAN_SPAN_ID, span.span_id]
    if span.parent_span_id is not None:
        parts += (_SPAN_PARENT, span.parent_span_id)
    parts += (
        _field(_SPAN_NAME, span.name.encode()),
        bytes((_SPAN_KIND, span.kind)),
        _times(_SPAN_START, span.start_ns, _SPAN_END, span.end_ns),
        _attributes(_SPAN_ATTRIBUTES, span.attributes),
    )
    parts += [_event(event) for event in span.events]
    parts += [_link(link) for link in span.links]
    if span.dropped_links:
        parts.append(_SPAN_DROPPED_LINKS + _varint(span.dropped_links))
    if span.status is not Status.UNSET:
        message = _field(_STATUS_MESSAGE, span.status_message.encode()) if span.status_message else b""
        parts.append(_field(_SPAN_STATUS, message + bytes((_STATUS_CODE, span.status))))
    return _field(_SCOPE_SPANS_SPANS, b"".join(parts))


def _event(event: Event) -> bytes:
    name = _field(_EVENT_NAME, event.name.encode())
    attributes = _attributes(_EVENT_ATTRIBUTES, event.attributes)
    return _field(_SPAN_EVENTS, _time(_EVENT_TIME, event.unix_ns) + name + attributes)


def _link(link: Link) -> bytes:
    ids = b"".join((_LINK_TRACE_ID, link.trace_id, _LINK_SPAN_ID, link.span_id))
    return _field(_SPAN_LINKS, ids + _attributes(_LINK_ATTRIBUTES, link.attributes))


#: Bytes of attributes made before, by the field that they stand in.
_made: dict[tuple[int, str, str | int], bytes] = {}
_MADE_AT_MOST = 8192


def _attributes(tag: int, attributes: Mapping[str, AttributeValue]) -> bytes:
    parts = []
    for key, value in attributes.items():
        # By exact type, since True and 1.0 equal 1. Large numbers are times and sizes, which seldom come twice.
        if type(value) is str or (type(value) is int and -1 <= value < 1024):
            made = _made.get((tag, key, value))
            if made is None:
                if len(_made) >= _MADE_AT_MOST:
                    _made.clear()
                made = _made[tag, key, value] = _attribute(tag, key, value)
            parts.append(made)
        else:
            parts.append(_attribute(tag, key, value))
    return b"".join(parts)


def _attribute(tag: int, key: str, value: AttributeValue) -> bytes:
    return _field(tag, _field(_KEY_VALUE_KEY, key.encode()) + _field(_KEY_VALUE_VALUE, _any(value)))


def _any(value: AttributeValue) -> bytes:
    if isinstance(value, str):
        return _field(_ANY_STRING, value.encode())
    if isinstance(value, bool):
        return bytes((_ANY_BOOL, value))
    if isinstance(value, int):
        return _ANY_INT + _varint(value & 0xFFFFFFFFFFFFFFFF)  # two's complement, as the wire format has it
    if isinstance(value, float):
        return _double(_ANY_DOUBLE, value)
    return _field(_ANY_ARRAY, b"".join([_field(_ARRAY_VALUES, _any(item)) for item in value]))


def _field(tag: int, content: bytes) -> bytes:
    """A length-delimited field."""
    size = len(content)
    return bytes((tag, size)) + content if size < 0x80 else bytes((tag,)) + _varint(size) + content


def _varint(number: int) -> bytes:
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
