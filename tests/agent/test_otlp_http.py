"""OTLP over HTTP to a real socket: what arrives, and what a bad endpoint costs."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry import trace

from tests.support.collector import Sink
from tests.views.sample_run import spans_of, the_run
from tracekv.agent.exporters import OtlpExporter, otlp_endpoint_is_set
from tracekv.agent.transport import sdk_resource
from tracekv.views.model import Span
from tracekv.views.otlp_protobuf import to_request

SPAN = [Span("x", b"t" * 16, b"s" * 8, None, 1, 2, {})]


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_spans_arrive_whole(
    compression: str, sink: Sink, monkeypatch: pytest.MonkeyPatch, closing: Callable[[Any], Any]
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", compression)
    exporter = closing(OtlpExporter())
    spans = spans_of(the_run())
    exporter.export(spans, {"service.name": "tracekv"})

    assert exporter.flush(10)
    (request,) = sink.requests
    assert (
        request.SerializeToString()
        == type(request).FromString(to_request(spans, {"service.name": "tracekv"})).SerializeToString()
    )
    assert sink.paths == ["/v1/traces"]
    assert sink.headers[0]["Content-Type"] == "application/x-protobuf"
    assert sink.headers[0].get("Content-Encoding") == (None if compression == "none" else compression)
    assert (exporter.exported, exporter.failed) == (len(spans), 0)


def test_headers_and_the_traces_endpoint_come_from_the_environment(
    sink: Sink, monkeypatch: pytest.MonkeyPatch, closing: Callable[[Any], Any]
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{sink.url}/elsewhere")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=blue")
    exporter = closing(OtlpExporter())
    exporter.export(SPAN, {})

    assert exporter.flush(10)
    assert sink.paths == ["/elsewhere"]
    assert sink.headers[0]["x-tenant"] == "blue"


def test_an_error_answer_is_said_once_and_counted(
    sink: Sink, caplog: pytest.LogCaptureFixture, closing: Callable[[Any], Any]
) -> None:
    sink.status = 500
    exporter = closing(OtlpExporter())
    for _ in range(3):
        exporter.export(SPAN, {})

    assert exporter.flush(10)
    assert (exporter.exported, exporter.failed) == (0, 3)
    assert [record.name for record in caplog.records] == ["tracekv"]
    assert "500" in caplog.text
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in caplog.text


def test_a_later_success_is_counted_after_failures(sink: Sink, closing: Callable[[Any], Any]) -> None:
    sink.status = 500
    exporter = closing(OtlpExporter())
    exporter.export(SPAN, {})
    assert exporter.flush(10)
    sink.status = 200
    exporter.export(SPAN, {})

    assert exporter.flush(10)
    assert (exporter.exported, exporter.failed) == (1, 1)


def test_the_queue_of_a_hanging_endpoint_is_bounded_and_drops_the_oldest(
    sink: Sink, closing: Callable[[Any], Any]
) -> None:
    sink.may_answer.clear()
    exporter = closing(OtlpExporter(max_batches=4))
    exporter.export([Span("first", b"t" * 16, b"s" * 8, None, 1, 2, {})], {})
    assert sink.arrived.wait(10)
    for n in range(10):
        exporter.export([Span(f"batch-{n}", b"t" * 16, b"s" * 8, None, 1, 2, {})], {})

    assert exporter.failed == 6
    assert not exporter.flush(0.05)
    sink.may_answer.set()
    assert exporter.flush(10)
    assert sink.span_names == ["first", "batch-6", "batch-7", "batch-8", "batch-9"]


def test_closing_on_a_hanging_endpoint_gives_up_and_counts(sink: Sink) -> None:
    sink.may_answer.clear()
    exporter = OtlpExporter()
    exporter.export(SPAN, {})
    assert sink.arrived.wait(10)
    exporter.export(SPAN, {})

    assert exporter.close(0.05) is False
    assert exporter.failed == 1


def test_closing_does_not_wait_for_the_retries_of_a_refusing_endpoint(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    # Left to themselves, the retries would go on for a minute.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "600")
    exporter = OtlpExporter()
    exporter.export(SPAN, {})

    exporter.close(0.1)
    exporter._thread.join(20)
    assert not exporter._thread.is_alive()
    assert (exporter.exported, exporter.failed) == (0, 1)
    assert {record.name for record in caplog.records} <= {"tracekv"}


def test_log_lines_of_other_threads_of_the_same_sdk_still_appear(
    sink: Sink, caplog: pytest.LogCaptureFixture, closing: Callable[[Any], Any]
) -> None:
    closing(OtlpExporter())
    logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter").warning("the host's own")

    assert "the host's own" in caplog.text


def test_the_host_s_tracer_provider_is_left_alone(sink: Sink, closing: Callable[[Any], Any]) -> None:
    before = trace.get_tracer_provider()
    exporter = closing(OtlpExporter())
    exporter.export(SPAN, sdk_resource())

    assert exporter.flush(10)
    assert trace.get_tracer_provider() is before


def test_the_resource_is_the_sdk_s_with_our_default_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sdk_resource()["service.name"] == "tracekv"
    assert sdk_resource()["telemetry.sdk.language"] == "python"

    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=lab,service.name=engine")
    assert sdk_resource()["service.name"] == "engine"
    assert sdk_resource()["deployment.environment.name"] == "lab"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "engine-2")
    assert sdk_resource()["service.name"] == "engine-2"


@pytest.mark.parametrize(
    ("environ", "is_set"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x:4318/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4318", "OTEL_SDK_DISABLED": "TRUE"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4318", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4318", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, True),
    ],
)
def test_the_environment_decides_whether_spans_are_sent(environ: dict[str, str], is_set: bool) -> None:
    assert otlp_endpoint_is_set(environ) is is_set


def test_another_protocol_is_refused_with_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}

    assert not otlp_endpoint_is_set(environ)
    assert "http/protobuf" in caplog.text


def test_no_thread_is_left_after_a_close(sink: Sink) -> None:
    exporter = OtlpExporter()
    exporter.export(SPAN, {})

    assert exporter.close(10)
    assert exporter._thread not in threading.enumerate()
