"""Metrics over OTLP, by the OpenTelemetry SDK's exporter and without its instruments, which cost 7 µs a value.

Endpoint, headers, timeout, compression and certificates are those of ``OTEL_EXPORTER_OTLP_*`` as the SDK reads them. Sums and
histograms are cumulative since the service began.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from time import monotonic, time_ns
from typing import Any

from opentelemetry import context
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from tracekv._version import __version__
from tracekv.views.metrics_model import HistogramPoint, MetricPoints, Point
from tracekv.views.model import AttributeValue
from tracekv.views.otlp import SCOPE_NAME
from tracekv.views.registry import registry

_log = logging.getLogger("tracekv")

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_DEFAULT_INTERVAL_S = 60.0
#: The SDK's instrumentation of HTTP clients looks at this key; it isn't to trace our own posts.
_SUPPRESS = getattr(context, "_SUPPRESS_INSTRUMENTATION_KEY", "suppress_instrumentation")


class OtlpMetrics:
    """Exports the metrics every ``OTEL_METRIC_EXPORT_INTERVAL`` (60 s), and a last time at the end, on a thread of its own.

    Args:
        collect: Gives the metrics; called on that thread.
        resource: Whose metrics they are.
        environ: For the protocol and the interval.

    Attributes:
        exported, failed: Data points handed on and given up.

    Raises:
        ImportError: The exporter of the protocol isn't installed.
        ValueError: The protocol isn't known.
    """

    def __init__(
        self,
        collect: Callable[[], list[MetricPoints]],
        resource: Mapping[str, AttributeValue],
        environ: Mapping[str, str],
    ) -> None:
        self.exported = 0
        self.failed = 0
        self._collect = collect
        self._resource = Resource({name: _attribute(value) for name, value in resource.items()})
        self._start_ns = time_ns()
        self._interval_s = _interval_s(environ)
        self._exporter = _exporter(environ)
        self._has_reported = False
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tracekv-metrics", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> bool:
        """Export a last time and end; False where that took longer than ``timeout_s`` and is left to end with the process."""
        self._is_closing.set()
        self._thread.join(timeout_s)
        # Ends the retries of an export that is under way.
        with contextlib.suppress(Exception):
            self._exporter.shutdown()
        return not self._thread.is_alive()

    def _run(self) -> None:
        with _attached():
            due = monotonic() + self._interval_s
            is_last = False
            while not is_last:
                is_last = self._is_closing.wait(max(0.0, due - monotonic()))
                due = monotonic() + self._interval_s
                self._export()

    def _export(self) -> None:
        points = 0
        reason = ""
        try:
            metrics = self._collect()
            points = sum(len(metric.points) for metric in metrics)
            data = to_metrics_data(metrics, self._resource, self._start_ns, time_ns())
            if self._exporter.export(data) is MetricExportResult.SUCCESS:
                self.exported += points
                return
        except Exception as error:  # whatever an exporter may raise, the next interval tries again
            reason = f" ({type(error).__name__})"
        self.failed += points
        if not self._has_reported and not self._is_closing.is_set():
            self._has_reported = True
            _log.warning(
                "tracekv: metrics can't be sent to %s%s. Check OTEL_EXPORTER_OTLP_METRICS_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT. "
                "Counters go on and are sent again; failures are counted.",
                getattr(self._exporter, "_endpoint", "the endpoint"),
                reason,
            )


def metrics_endpoint_is_set(environ: Mapping[str, str]) -> bool:
    """Whether the OpenTelemetry variables ask for metrics over OTLP."""
    if not any(environ.get(name) for name in ENDPOINT_VARIABLES):
        return False
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporters = [name.strip().lower() for name in environ.get("OTEL_METRICS_EXPORTER", "").split(",") if name.strip()]
    return not exporters or "otlp" in exporters


def to_metrics_data(metrics: list[MetricPoints], resource: Resource, start_ns: int, now_ns: int) -> MetricsData:
    """The SDK's own message, with the times of the series' start and of now (Unix, ns)."""
    scope = InstrumentationScope(SCOPE_NAME, __version__)
    scoped = ScopeMetrics(scope, [_metric(metric, start_ns, now_ns) for metric in metrics], "")
    return MetricsData([ResourceMetrics(resource, [scoped], "")])


def _metric(metric: MetricPoints, start_ns: int, now_ns: int) -> Metric:
    entry = registry().metrics[metric.name]
    temporality = AggregationTemporality.CUMULATIVE
    data: Sum | Gauge | Histogram
    if entry.instrument == "histogram":
        bounds = registry().bounds(metric.name)
        histograms = [
            HistogramDataPoint(
                dict(point.attributes), start_ns, now_ns, point.count, point.sum, point.counts, bounds, point.min, point.max
            )
            for point in metric.points
            if isinstance(point, HistogramPoint)
        ]  # fmt: skip
        data = Histogram(histograms, temporality)
    else:
        numbers = [
            NumberDataPoint(dict(point.attributes), start_ns, now_ns, point.value)
            for point in metric.points
            if isinstance(point, Point)
        ]
        is_monotonic = entry.instrument == "counter"
        data = Gauge(numbers) if entry.instrument == "gauge" else Sum(numbers, temporality, is_monotonic)
    return Metric(metric.name, entry.meaning, entry.unit, data)


def _exporter(environ: Mapping[str, str]) -> MetricExporter:
    protocol = (
        next((environ[name] for name in _PROTOCOL_VARIABLES if environ.get(name)), "http/protobuf").strip().lower()
    )
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http import metric_exporter as http

        return http.OTLPMetricExporter()
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc import metric_exporter as grpc

        return grpc.OTLPMetricExporter()
    raise ValueError(f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol}: metrics are sent as http/protobuf (the default) or grpc")


def _interval_s(environ: Mapping[str, str]) -> float:
    text = environ.get("OTEL_METRIC_EXPORT_INTERVAL", "").strip()
    if not text:
        return _DEFAULT_INTERVAL_S
    try:
        interval_ms = float(text)
    except ValueError:
        interval_ms = 0.0
    if interval_ms > 0:
        return interval_ms / 1e3
    _log.warning("tracekv: OTEL_METRIC_EXPORT_INTERVAL=%s has to be a number of milliseconds; 60000 is used", text)
    return _DEFAULT_INTERVAL_S


def _attribute(value: AttributeValue) -> Any:
    return value if isinstance(value, (str, bool, int, float)) else list(value)


@contextlib.contextmanager
def _attached() -> Iterator[None]:
    """Within it, on this thread, posts aren't instrumented, and the exporters' own log lines are silent: one of ours says it once."""
    ident = threading.get_ident()
    token = context.attach(context.set_value(_SUPPRESS, True))

    def is_ours(record: logging.LogRecord) -> bool:
        return record.thread != ident

    loggers = [
        logging.getLogger(f"opentelemetry.exporter.otlp.proto.{part}")
        for part in ("http.metric_exporter", "grpc.exporter", "grpc.metric_exporter")
    ]
    for logger in loggers:
        logger.addFilter(is_ours)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_ours)
        context.detach(token)
