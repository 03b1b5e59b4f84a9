"""Metrics over OTLP: to a sink of the standard library, and through a real collector, over HTTP and gRPC."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from time import time_ns
from typing import Any

import pytest
from opentelemetry import metrics as opentelemetry_metrics
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality

from tests.metrics.conftest import Start
from tests.metrics.reading import BRING_UP, SOURCE
from tests.support.collector import Sink, attributes_of, collector, free_port
from tests.telemetry.everything import EVERYTHING
from tests.views.sample_run import looked_up, transferred
from tracekv.agent.metrics_otlp import metrics_endpoint_is_set
from tracekv.journal.vocabulary import Direction
from tracekv.views.metrics import HistogramPoint, MetricPoints
from tracekv.views.registry import registry

KINDS = {"counter": "sum", "updowncounter": "sum", "gauge": "gauge", "histogram": "histogram"}


def received(sink: Sink) -> dict[str, Any]:
    """Metrics of the last request by name, as the protocol's own messages."""
    return {
        metric.name: metric
        for group in sink.metrics[-1].resource_metrics
        for scope in group.scope_metrics
        for metric in scope.metrics
    }


def points(metric: Any) -> list[Any]:
    kind: str = metric.WhichOneof("data")
    return list(getattr(metric, kind).data_points)


def check_whole(sink: Sink, told: list[MetricPoints], since_ns: int) -> None:
    """What arrived is what the service told but for what moves with time, with units, kinds, times, resource and scope."""
    arrived = received(sink)
    assert arrived.keys() >= {metric.name for metric in told}
    for metric in told:
        entry, its = registry().metrics[metric.name], arrived[metric.name]
        assert (its.unit, its.description) == (entry.unit, entry.meaning)
        assert its.WhichOneof("data") == KINDS[entry.instrument]
        if entry.instrument != "gauge":
            data = getattr(its, its.WhichOneof("data"))
            assert data.aggregation_temporality == AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
        if its.WhichOneof("data") == "sum":
            assert its.sum.is_monotonic is (entry.instrument == "counter")
        by_attributes = {tuple(sorted(attributes_of(point).items())): point for point in points(its)}
        assert len(by_attributes) == len(metric.points)
        for point in metric.points:
            other = by_attributes[tuple(sorted(point.attributes.items()))]
            assert since_ns <= other.time_unix_nano <= time_ns()
            if entry.instrument != "gauge":
                assert since_ns <= other.start_time_unix_nano <= other.time_unix_nano
            if isinstance(point, HistogramPoint):
                assert list(other.bucket_counts) == point.counts
                assert list(other.explicit_bounds) == registry().bounds(metric.name)
                assert (other.count, other.sum) == (point.count, point.sum)
            elif not metric.name.startswith("tracekv.tracer."):
                kind = "as_double" if entry.unit in ("s", "1") else "as_int"
                assert other.WhichOneof("value") == kind
                assert entry.instrument == "gauge" or getattr(other, kind) == point.value
    (group,) = sink.metrics[-1].resource_metrics
    assert attributes_of(group.resource)["service.name"] == "tracekv"
    assert attributes_of(group.resource)["host.name"] == "node-1"
    assert [scope.scope.name for scope in group.scope_metrics] == ["tracekv"]


def test_metrics_arrive_whole(start: Start, sink: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    since = time_ns()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", sink.url)
    service = start()
    service.feed_all(SOURCE, EVERYTHING)
    told = service.metrics()

    assert service.close(10)
    assert sink.paths == ["/v1/metrics"]
    check_whole(sink, told, since)


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_metrics_arrive_whole_through_a_collector(
    protocol: str, start: Start, sink: Sink, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    since = time_ns()
    with collector(sink.url, tmp_path) as endpoints:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoints.grpc if protocol == "grpc" else endpoints.http)
        service = start()
        service.feed_all(SOURCE, EVERYTHING)
        told = service.metrics()
        assert service.close(10)
        assert sink.arrived.wait(20)
        with sink._changed:
            assert sink._changed.wait_for(lambda: sink.metrics, 20)

    check_whole(sink, told, since)


def test_the_metrics_endpoint_headers_and_interval_come_from_the_environment(
    start: Start, sink: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", f"{sink.url}/elsewhere/metrics")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_HEADERS", "x-tenant=blue")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "20")
    service = start()
    service.feed_all(SOURCE, [*BRING_UP, looked_up()])
    with sink._changed:
        assert sink._changed.wait_for(lambda: len(sink.metrics) >= 3, 20)

    assert sink.paths[0] == "/elsewhere/metrics"
    assert sink.headers[0]["x-tenant"] == "blue"


def test_counters_are_cumulative_over_exports(start: Start, sink: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", sink.url)
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "20")
    service = start()
    service.feed_all(SOURCE, [*BRING_UP, looked_up()])
    with sink._changed:
        assert sink._changed.wait_for(lambda: "tracekv.lookups" in (received(sink) if sink.metrics else {}), 20)
    (first,) = points(received(sink)["tracekv.lookups"])
    service.feed(SOURCE, looked_up())
    assert service.close(10)
    (last,) = points(received(sink)["tracekv.lookups"])

    assert (first.as_int, last.as_int) == (1, 2)
    assert first.start_time_unix_nano == last.start_time_unix_nano


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, True),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://x"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_METRICS_EXPORTER": "none"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_METRICS_EXPORTER": "console, otlp"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_METRICS_EXPORTER": "prometheus"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": "true"}, False),
    ],
)
def test_the_environment_says_whether_metrics_are_sent(environ: dict[str, str], wanted: bool) -> None:
    assert metrics_endpoint_is_set(environ) is wanted


def test_an_odd_protocol_or_interval_is_said_and_stops_nothing(
    start: Start, sink: Sink, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", sink.url)
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "soon")
    assert start().close(10)
    assert "OTEL_METRIC_EXPORT_INTERVAL=soon" in caplog.text
    assert len(sink.metrics) == 1

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    service = start(metrics_port=0)
    assert "OTEL_EXPORTER_OTLP_PROTOCOL=http/json" in caplog.text
    assert service.url is not None


def test_an_endpoint_that_refuses_is_said_once_and_counted(
    start: Start, sink: Sink, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sink.status = 400
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", sink.url)
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "20")
    service = start()
    service.feed_all(SOURCE, BRING_UP)
    with sink._changed:
        assert sink._changed.wait_for(lambda: len(sink.metrics) >= 3, 20)
    (failed,) = [metric for metric in service.metrics() if metric.name == "tracekv.tracer.export.failed"]
    service.close(10)

    assert failed.points[0].value > 0  # type: ignore[union-attr]
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT" in warnings[0]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_a_dead_endpoint_delays_no_end(protocol: str, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "600")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    service = start()
    service.feed_all(SOURCE, BRING_UP)

    service.close(0.2)


@pytest.mark.timeout(60)
def test_an_endpoint_that_hangs_is_not_waited_for(start: Start, sink: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    sink.may_answer.clear()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "600")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", sink.url)
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "10")
    service = start()
    assert sink.arrived.wait(20)
    service.feed_all(SOURCE, [*BRING_UP, transferred(Direction.LOAD, 0, [1], 1, 1, 2)])

    assert service.close(0.2) is False


def test_the_hosts_meter_provider_is_left_alone(start: Start, sink: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    before = opentelemetry_metrics.get_meter_provider()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", sink.url)
    service = start()
    names = {thread.name for thread in threading.enumerate()}
    assert service.close(10)

    assert opentelemetry_metrics.get_meter_provider() is before
    assert "tracekv-metrics" in names
    assert "tracekv-metrics" not in {thread.name for thread in threading.enumerate()}
