"""The metrics of a node: fed with the records of all its ranks, served to Prometheus and sent over OTLP."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from time import monotonic, perf_counter_ns, process_time_ns
from typing import TYPE_CHECKING, Protocol

from tracekv.journal.directory import default_directory
from tracekv.journal.layout import JournalFacts
from tracekv.journal.process import boot_id
from tracekv.journal.records import Record
from tracekv.settings import Settings
from tracekv.views import names
from tracekv.views.metrics import MetricsView
from tracekv.views.metrics_model import Collected, MetricPoints
from tracekv.views.model import AttributeValue

if TYPE_CHECKING:
    from tracekv.agent.metrics_otlp import OtlpMetrics
    from tracekv.agent.prometheus import PrometheusEndpoint

_log = logging.getLogger("tracekv")

#: Name of the file, in the folder of the journals, that holds the endpoint's URL.
ENDPOINT_FILE = "metrics-endpoint"
#: How soon a port that was taken is tried again: an agent that just ends may have it.
SERVE_AGAIN_S = 5.0


class Exports(Protocol):
    """An exporter, as far as its health goes.

    Attributes:
        exported, failed: What it handed on, and what it gave up.
    """

    exported: int
    failed: int


class MetricsService:
    """Adds up records and gives the metrics out. Records may be fed on one thread while others scrape.

    Nothing that goes wrong here reaches who feeds: a record on which the metrics fail is left out and counted, a port that is
    taken or a part that isn't installed is said once, and the rest goes on. A port is taken once it is free.

    Args:
        settings: ``metrics_port`` and ``journal_dir``; without a port there is no Prometheus endpoint.
        resource: Whose metrics they are: ``target_info``, and the resource over OTLP.

    Attributes:
        url: Of the Prometheus endpoint; None while there is none. It is also in the file :data:`ENDPOINT_FILE`.
    """

    def __init__(self, settings: Settings, resource: Mapping[str, AttributeValue]) -> None:
        self.url: str | None = None
        self._settings = settings
        self._resource = dict(resource)
        self._lock = threading.Lock()
        self._view = MetricsView(settings_differ=_say_settings_differ)
        self._faults = 0
        self._exporters: list[tuple[str, Exports]] = []
        self._endpoint: PrometheusEndpoint | None = None
        self._endpoint_file: Path | None = None
        self._serve_at = float("inf")
        self._has_said_taken = False
        self._otlp: OtlpMetrics | None = None
        self._boot_id = boot_id()
        self._cpu_since_ns = process_time_ns()
        self._pid = os.getpid()

    # -- what comes in -----------------------------------------------------------------------------------------------

    def feed(self, source: JournalFacts, record: Record) -> None:
        """Take one record that ``source`` wrote."""
        self.feed_all(source, (record,))

    def feed_all(self, source: JournalFacts, records: Iterable[Record]) -> None:
        """Take records that ``source`` wrote; cheaper than one by one."""
        rest = iter(records)
        with self._lock:
            while True:
                try:
                    self._view.feed_all(source, rest)
                except Exception as error:  # one record is left out, the next ones are taken
                    self._fault(error)
                else:
                    return

    def lost(self, source: JournalFacts, count: int) -> None:
        """``count`` records of ``source`` were overwritten before they were read."""
        with self._lock:
            self._view.lost(source, count)

    def journal(self, source: JournalFacts, *, bytes_written: int = 0, undecodable: int = 0) -> None:
        """What a reader knows of a journal beside its records: totals since it began."""
        with self._lock:
            self._view.journal(source, bytes_written=bytes_written, undecodable=undecodable)

    def ended(self, source: JournalFacts) -> None:
        """No more records of ``source`` will come: its counters stay, what it held is gone."""
        with self._lock:
            self._view.ended(source)

    def watch(self, exporter: Exports) -> None:
        """Tell of an exporter of spans, how much it handed on and gave up."""
        self._exporters.append(("spans", exporter))

    # -- what goes out -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to serve, where ``TRACEKV_METRICS_PORT`` is set, and to send, where the ``OTEL_*`` variables name an endpoint."""
        if self._settings.metrics_port is not None:
            self._serve(self._settings.metrics_port)
        self._send()

    def tick(self) -> None:
        """Called again and again: serve where the port was taken before and is free now."""
        if monotonic() >= self._serve_at and self._settings.metrics_port is not None:
            self._serve(self._settings.metrics_port)

    def metrics(self) -> list[MetricPoints]:
        """All metrics as they are now. From any thread."""
        collected = Collected()
        with self._lock:
            self._view.collect(collected, now_ns=perf_counter_ns(), boot_id=self._boot_id)
            faults = self._faults
        collected.add((names.METRIC_TRACER_VIEW_FAULTS,), faults)
        if self._settings.agent != "thread":
            # In a thread of an engine the processor time would be the engine's.
            collected.add((names.METRIC_TRACER_CPU,), process_time_ns() - self._cpu_since_ns)
        for signal, exporter in self._exporters:
            collected.add((names.METRIC_TRACER_EXPORTED, signal), exporter.exported)
            collected.add((names.METRIC_TRACER_EXPORT_FAILED, signal), exporter.failed)
        return collected.metrics()

    def close(self, timeout_s: float = 2.0) -> bool:
        """Stop serving and send a last time; False where that took longer than ``timeout_s``. Does nothing in a forked child."""
        if os.getpid() != self._pid:
            return True
        deadline = monotonic() + timeout_s
        self._serve_at = float("inf")
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.close()
            self._withdraw()
        otlp, self._otlp = self._otlp, None
        return otlp is None or otlp.close(max(0.0, deadline - monotonic()))

    def _serve(self, port: int) -> None:
        self._serve_at = float("inf")
        try:
            from tracekv.agent.prometheus import PrometheusEndpoint
        except ImportError as error:
            _say_missing("metrics are not served to Prometheus", error)
            return
        try:
            self._endpoint = PrometheusEndpoint(port, self.metrics, self._resource)
        except OSError as error:
            self._serve_at = monotonic() + SERVE_AGAIN_S
            if not self._has_said_taken:
                self._has_said_taken = True
                _log.warning(
                    "tracekv: no metrics are served on 127.0.0.1:%d (%s). They will be once it is free; or set TRACEKV_METRICS_PORT "
                    "to a free port, or to 0",
                    port,
                    error.strerror or error,
                )
            return
        self.url = self._endpoint.url
        _log.info("tracekv: metrics are served on %s", self.url)
        self._publish(self.url)

    def _send(self) -> None:
        try:
            from tracekv.agent.metrics_otlp import OtlpMetrics, metrics_endpoint_is_set

            if metrics_endpoint_is_set(os.environ):
                self._otlp = OtlpMetrics(self.metrics, self._resource, os.environ)
                self._exporters.append(("metrics", self._otlp))
        except ImportError as error:
            _say_missing("no metrics are sent over OTLP", error)
        except Exception as error:  # the endpoint for Prometheus goes on
            _log.warning("tracekv: no metrics are sent over OTLP: %s", error)

    def _publish(self, url: str) -> None:
        try:
            folder = default_directory() if self._settings.journal_dir is None else Path(self._settings.journal_dir)
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = folder / ENDPOINT_FILE
            fresh = folder / f"{ENDPOINT_FILE}.{os.getpid()}"
            fresh.write_text(url + "\n")
            fresh.replace(path)
            self._endpoint_file = path
        except OSError as error:
            _log.warning("tracekv: the endpoint %s can't be published in a file: %s", url, error)

    def _withdraw(self) -> None:
        path, self._endpoint_file = self._endpoint_file, None
        if path is not None:
            # Another agent may have published its own meanwhile.
            with contextlib.suppress(OSError):
                if path.read_text().strip() == self.url:
                    path.unlink()
        self.url = None

    def _fault(self, error: Exception) -> None:
        self._faults += 1
        if self._faults == 1:
            _log.warning(
                "tracekv: metrics failed on a record (%s) and leave it out; further failures are counted",
                type(error).__name__,
                exc_info=error,
            )


def _say_settings_differ(reference: int, other: int) -> None:
    _log.warning(
        "tracekv: rank %d has other settings than rank %d of the same run. Give all ranks the same TRACEKV_* variables; "
        "`tracekv doctor` shows them as resolved",
        other,
        reference,
    )


def _say_missing(what: str, error: ImportError) -> None:
    _log.warning(
        "tracekv: %s, since %s isn't installed. Install the extra: pip install 'tracekv[agent]'", what, error.name
    )
