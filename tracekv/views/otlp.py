"""Spans as OTLP JSON lines, and back. Needs no OpenTelemetry package.

A line is one ``TracesData`` message in the OTLP JSON mapping: lowerCamelCase names, ids in hex, 64-bit integers as strings.

Source: the OpenTelemetry protocol specification, "JSON Protobuf Encoding".
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tracekv._version import __version__
from tracekv.views.model import Attributes, AttributeValue, Event, Kind, Link, Span, Status

SCOPE_NAME = "tracekv"

_encode = msgspec.json.Encoder().encode
_log = logging.getLogger("tracekv")


def to_json_line(spans: Iterable[Span], resource: Mapping[str, AttributeValue]) -> bytes:
    """One line, with its line end, that holds ``spans`` under one resource."""
    scope_spans = {"scope": {"name": SCOPE_NAME, "version": __version__}, "spans": [_span(span) for span in spans]}
    data = {"resourceSpans": [{"resource": {"attributes": _attributes(resource)}, "scopeSpans": [scope_spans]}]}
    return _encode(data) + b"\n"


def read_trace_file(path: str | Path, offset: int = 0) -> Iterator[Span]:
    """The spans of a file of OTLP JSON lines from byte ``offset`` on, in the order of the file, whoever wrote it.

    Lines that hold other signals are passed over. A line that is no JSON (a writer was killed in the middle of it, or the disk
    was full) is passed over too; how many there were is logged once, at the end.

    Raises:
        OSError: The file can't be read.
    """
    broken = 0
    with Path(path).open("rb") as lines:
        lines.seek(offset)
        for line in lines:
            if not line.strip():
                continue
            try:
                data = msgspec.json.decode(line)
                spans = [span for group in _many(data, "resourceSpans") for span in _read_group(group)]
            except (msgspec.MsgspecError, ValueError, TypeError, AttributeError):
                broken += 1
                continue
            yield from spans
    if broken:
        _log.warning("tracekv: %d lines of the trace file %s hold no OTLP JSON and were passed over", broken, path)


def _span(span: Span) -> dict[str, Any]:
    encoded: dict[str, Any] = {
        "traceId": span.trace_id.hex(),
        "spanId": span.span_id.hex(),
        "name": span.name,
        "kind": int(span.kind),
        "startTimeUnixNano": str(span.start_ns),
        "endTimeUnixNano": str(span.end_ns),
        "attributes": _attributes(span.attributes),
    }
    if span.parent_span_id is not None:
        encoded["parentSpanId"] = span.parent_span_id.hex()
    if span.events:
        encoded["events"] = [
            {"timeUnixNano": str(event.unix_ns), "name": event.name, "attributes": _attributes(event.attributes)}
            for event in span.events
        ]
    if span.links:
        encoded["links"] = [
            {"traceId": link.trace_id.hex(), "spanId": link.span_id.hex(), "attributes": _attributes(link.attributes)}
            for link in span.links
        ]
    if span.dropped_links:
        encoded["droppedLinksCount"] = span.dropped_links
    if span.status is not Status.UNSET:
        encoded["status"] = {"code": int(span.status)}
        if span.status_message:
            encoded["status"]["message"] = span.status_message
    return encoded


#: Encoded attributes made before: most spans share most of theirs.
_made: dict[tuple[str, str | int], msgspec.Raw] = {}
_MADE_AT_MOST = 8192


def _attributes(attributes: Mapping[str, AttributeValue]) -> list[Any]:
    items: list[Any] = []
    for key, value in attributes.items():
        # By exact type, since True and 1.0 equal 1. Large numbers are times and sizes, which seldom come twice.
        if type(value) is str or (type(value) is int and -1 <= value < 1024):
            made = _made.get((key, value))
            if made is None:
                if len(_made) >= _MADE_AT_MOST:
                    _made.clear()
                made = _made[key, value] = msgspec.Raw(_encode({"key": key, "value": _value(value)}))
            items.append(made)
        else:
            items.append({"key": key, "value": _value(value)})
    return items


def _value(value: AttributeValue) -> dict[str, Any]:
    if isinstance(value, str):
        return {"stringValue": value}
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value if value - value == 0 else _odd_double(value)}
    return {"arrayValue": {"values": [_value(item) for item in value]}}


def _odd_double(value: float) -> str:
    if value != value:
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


# -- reading: proto3's JSON mapping allows more than we write --------------------------------------------------------------------


def _many(message: Mapping[str, Any], name: str) -> Sequence[Any]:
    return _get(message, name) or ()


def _get(message: Mapping[str, Any], name: str) -> Any:
    if name in message:
        return message[name]
    snake = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)
    return message.get(snake)


def _read_group(group: Mapping[str, Any]) -> Iterator[Span]:
    for scope in [*_many(group, "scopeSpans"), *_many(group, "instrumentationLibrarySpans")]:
        for span in _many(scope, "spans"):
            yield _read_span(span)


def _read_span(span: Mapping[str, Any]) -> Span:
    status = _get(span, "status") or {}
    parent = _get(span, "parentSpanId")
    return Span(
        name=_get(span, "name") or "",
        trace_id=bytes.fromhex(_get(span, "traceId")),
        span_id=bytes.fromhex(_get(span, "spanId")),
        parent_span_id=bytes.fromhex(parent) if parent else None,
        start_ns=int(_get(span, "startTimeUnixNano") or 0),
        end_ns=int(_get(span, "endTimeUnixNano") or 0),
        attributes=_read_attributes(span),
        kind=Kind(_enum(_get(span, "kind"), "SPAN_KIND_", Kind)),
        links=[
            Link(bytes.fromhex(_get(link, "traceId")), bytes.fromhex(_get(link, "spanId")), _read_attributes(link))
            for link in _many(span, "links")
        ],
        events=[
            Event(_get(event, "name") or "", int(_get(event, "timeUnixNano") or 0), _read_attributes(event))
            for event in _many(span, "events")
        ],
        status=Status(_enum(_get(status, "code"), "STATUS_CODE_", Status)),
        status_message=_get(status, "message") or "",
        dropped_links=int(_get(span, "droppedLinksCount") or 0),
    )


def _enum(value: Any, prefix: str, names: type[Kind] | type[Status]) -> int:
    """An enum's number, from a number or from a name such as ``SPAN_KIND_CLIENT``."""
    if isinstance(value, str) and not value.isdigit():
        return int(names[value.removeprefix(prefix)])
    return int(value or 0)


def _read_attributes(message: Mapping[str, Any]) -> Attributes:
    return {_get(item, "key"): _read_value(_get(item, "value") or {}) for item in _many(message, "attributes")}


def _read_value(value: Mapping[str, Any]) -> Any:
    for name, convert in _READERS.items():
        found = _get(value, name)
        if found is not None:
            return convert(found)
    return ""


def _read_array(array: Mapping[str, Any]) -> list[Any]:
    return [_read_value(item) for item in _many(array, "values")]


def _read_map(array: Mapping[str, Any]) -> dict[str, Any]:
    return {_get(item, "key"): _read_value(_get(item, "value") or {}) for item in _many(array, "values")}


_READERS: dict[str, Any] = {
    "stringValue": str,
    "intValue": int,
    "boolValue": bool,
    "doubleValue": float,
    "arrayValue": _read_array,
    "kvlistValue": _read_map,
    "bytesValue": str,
}
