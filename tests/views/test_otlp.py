"""Spans as OTLP: JSON lines and protobuf say the same, and both come back through the protocol's own messages."""

from __future__ import annotations

import base64
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from tests.views.sample_run import spans_of, the_run
from tracekv.views.model import Event, Kind, Link, Span, Status
from tracekv.views.otlp import read_trace_file, to_json_line
from tracekv.views.otlp_protobuf import to_request

RESOURCE = {"service.name": "tracekv", "process.pid": 4711, "host.arch": "amd64"}

_int64 = st.integers(-(2**63), 2**63 - 1)
_text = st.text(st.characters(codec="utf-8"), max_size=20)
_scalar = st.one_of(_text, st.booleans(), _int64, st.floats())
_value = st.one_of(
    _scalar, st.lists(_int64, max_size=4), st.lists(_text, max_size=4), st.lists(st.floats(), max_size=3)
)
_attributes = st.dictionaries(_text, _value, max_size=5)
_time = st.integers(0, 2**64 - 1)
_spans = st.builds(
    Span,
    name=_text,
    trace_id=st.binary(min_size=16, max_size=16),
    span_id=st.binary(min_size=8, max_size=8),
    parent_span_id=st.one_of(st.none(), st.binary(min_size=8, max_size=8)),
    start_ns=_time,
    end_ns=_time,
    attributes=_attributes,
    kind=st.sampled_from(Kind),
    links=st.lists(
        st.builds(Link, st.binary(min_size=16, max_size=16), st.binary(min_size=8, max_size=8), _attributes)
    ),
    events=st.lists(st.builds(Event, _text, _time, _attributes)),
    status=st.just(Status.UNSET),
    dropped_links=st.integers(0, 2**32 - 1),
)


def messages_of_json(line: bytes) -> TracesData:
    """The line through protobuf's own JSON parser, which wants bytes in base64 where OTLP has hex."""

    def convert(node: Any) -> Any:
        if isinstance(node, list):
            return [convert(item) for item in node]
        if isinstance(node, dict):
            is_id = {"traceId", "spanId", "parentSpanId"}
            return {
                key: base64.b64encode(bytes.fromhex(value)).decode() if key in is_id else convert(value)
                for key, value in node.items()
            }
        return node

    return json_format.Parse(json.dumps(convert(json.loads(line))), TracesData())


def spans_of_message(data: TracesData) -> list[Any]:
    return list(data.resource_spans[0].scope_spans[0].spans)


@given(st.lists(_spans, max_size=4))
def test_json_and_protobuf_are_the_same_messages(spans: list[Span]) -> None:
    from_json = messages_of_json(to_json_line(spans, RESOURCE))
    from_protobuf = TracesData.FromString(to_request(spans, RESOURCE))

    # Older protobuf prints the sign of a NaN.
    assert repr(from_json).replace("-nan", "nan") == repr(from_protobuf).replace("-nan", "nan")


@given(st.lists(_spans, min_size=1, max_size=3))
def test_a_line_reads_back_as_the_spans_that_were_written(spans: list[Span]) -> None:
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        file.write(to_json_line(spans, RESOURCE))
        file.flush()

        assert repr(list(read_trace_file(file.name))) == repr(spans)


def test_a_run_s_messages_have_ids_times_and_types_as_they_were() -> None:
    spans = spans_of(the_run())
    request = ExportTraceServiceRequest.FromString(to_request(spans, RESOURCE))
    (resource_spans,) = request.resource_spans
    (scope_spans,) = resource_spans.scope_spans

    assert {item.key: item.value.WhichOneof("value") for item in resource_spans.resource.attributes} == {
        "service.name": "string_value",
        "process.pid": "int_value",
        "host.arch": "string_value",
    }
    assert scope_spans.scope.name == "tracekv"
    assert len(scope_spans.spans) == len(spans)
    for span, message in zip(spans, scope_spans.spans, strict=True):
        assert (message.trace_id, message.span_id, message.parent_span_id) == (
            span.trace_id,
            span.span_id,
            span.parent_span_id or b"",
        )
        assert (message.name, message.kind) == (span.name, span.kind)
        assert (message.start_time_unix_nano, message.end_time_unix_nano) == (span.start_ns, span.end_ns)
        assert [item.key for item in message.attributes] == list(span.attributes)
        assert len(message.links) == len(span.links)
        assert [event.name for event in message.events] == [event.name for event in span.events]
        assert message.status.code == span.status


@pytest.mark.parametrize(
    ("value", "kind"),
    [(True, "bool_value"), (1, "int_value"), (1.0, "double_value"), ("1", "string_value"), (-1, "int_value")],
)
def test_a_value_keeps_its_type_whatever_equal_value_came_before(value: Any, kind: str) -> None:
    span = Span("x", b"t" * 16, b"s" * 8, None, 1, 2, {"a": value})
    for encode in (
        lambda s: TracesData.FromString(to_request(s, {})),
        lambda s: messages_of_json(to_json_line(s, {})),
    ):
        encode(
            [
                Span("x", b"t" * 16, b"s" * 8, None, 1, 2, {"a": 1}),
                Span("x", b"t" * 16, b"s" * 8, None, 1, 2, {"a": True}),
            ]
        )
        (message,) = spans_of_message(encode([span]))
        assert message.attributes[0].value.WhichOneof("value") == kind


def test_a_failed_span_has_status_code_2_and_its_message() -> None:
    span = Span("x", b"t" * 16, b"s" * 8, None, 1, 2, {}, status=Status.ERROR, status_message="gone")

    for data in (TracesData.FromString(to_request([span], {})), messages_of_json(to_json_line([span], {}))):
        (message,) = spans_of_message(data)
        assert (message.status.code, message.status.message) == (2, "gone")


def test_a_line_is_one_line_with_hex_ids_and_64_bit_numbers_as_strings() -> None:
    span = Span("two\nlines", b"\xab" * 16, b"\xcd" * 8, None, 1, 2, {"n": 5})
    line = to_json_line([span], {})
    (written,) = json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"]

    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert written["traceId"] == "ab" * 16
    assert written["startTimeUnixNano"] == "1"
    assert written["attributes"] == [{"key": "n", "value": {"intValue": "5"}}]
    assert "parentSpanId" not in written


def test_a_file_that_another_writer_made_is_read(tmp_path: Path) -> None:
    path = tmp_path / "others.jsonl"
    span = {
        "traceId": "AB" * 16, "spanId": "CD" * 8, "parentSpanId": "", "name": "op", "kind": "SPAN_KIND_CLIENT",
        "startTimeUnixNano": 5, "endTimeUnixNano": "7", "status": {"code": "STATUS_CODE_ERROR"},
        "attributes": [
            {"key": "i", "value": {"intValue": 3}}, {"key": "d", "value": {"doubleValue": "NaN"}},
            {"key": "m", "value": {"kvlistValue": {"values": [{"key": "x", "value": {"boolValue": False}}]}}},
            {"key": "empty", "value": {}},
        ],
    }  # fmt: skip
    snake = {"trace_id": "ab" * 16, "span_id": "cd" * 8, "name": "old", "start_time_unix_nano": "9"}
    lines = [
        {"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]},
        {"resourceMetrics": []},
        {"resource_spans": [{"instrumentation_library_spans": [{"spans": [snake]}]}]},
    ]
    path.write_text("\n\n".join(json.dumps(line) for line in lines))

    first, second = read_trace_file(path)
    assert (first.trace_id, first.kind, first.status) == (b"\xab" * 16, Kind.CLIENT, Status.ERROR)
    assert first.parent_span_id is None
    assert (first.start_ns, first.end_ns) == (5, 7)
    assert first.attributes["i"] == 3
    assert first.attributes["m"] == {"x": False}
    assert (second.name, second.start_ns) == ("old", 9)


def test_a_torn_line_is_passed_over_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "torn.jsonl"
    line = to_json_line([Span("x", b"t" * 16, b"s" * 8, None, 1, 2, {})], {})
    path.write_bytes(line + line[:50] + b"\n" + line + line[:10])

    assert len(list(read_trace_file(path))) == 2
    assert "2 lines" in caplog.text
    assert str(path) in caplog.text


def test_what_was_appended_after_an_offset_can_be_read_alone(tmp_path: Path) -> None:
    path = tmp_path / "shared.jsonl"
    first, second = (to_json_line([Span(name, b"t" * 16, b"s" * 8, None, 1, 2, {})], {}) for name in ("old", "new"))
    path.write_bytes(first + second)

    assert [span.name for span in read_trace_file(path, len(first))] == ["new"]


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        list(read_trace_file(tmp_path / "none.jsonl"))
