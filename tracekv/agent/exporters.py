"""Where finished spans go: a file of OTLP JSON lines, an OTLP/HTTP endpoint. Neither raises, neither blocks the engine."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

from tracekv.views.model import AttributeValue, Span
from tracekv.views.otlp import to_json_line
from tracekv.views.otlp_protobuf import to_request

_log = logging.getLogger("tracekv")

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


class Exporter(Protocol):
    """Takes finished spans. Called from one thread; no method raises.

    Attributes:
        exported, failed: Spans handed on, and spans given up.
    """

    exported: int
    failed: int

    def export(self, spans: Sequence[Span], resource: Mapping[str, AttributeValue]) -> None:
        """Hand spans on, or queue them."""

    def flush(self, timeout_s: float) -> bool:
        """Wait until what was taken is handed on or given up; False where that took longer than ``timeout_s``."""

    def close(self, timeout_s: float) -> bool:
        """Flush and end. What isn't handed on in time is given up and counted."""


class TraceFileExporter:
    """Appends OTLP JSON lines to a file; parent folders are made.

    Each line is one ``O_APPEND`` write, so several processes may share a file. A full disk, a missing permission and the like
    are reported once; the spans concerned are counted as failed, and the next batch tries again.
    """

    def __init__(self, path: str | Path) -> None:
        self.exported = 0
        self.failed = 0
        self._path = Path(path).expanduser()
        self._descriptor: int | None = None
        self._has_reported = False
        self._has_torn_line = False

    def export(self, spans: Sequence[Span], resource: Mapping[str, AttributeValue]) -> None:
        """Append one line."""
        try:
            self._append(to_json_line(spans, resource))
        except OSError as error:
            self.failed += len(spans)
            self._report(error)
        else:
            self.exported += len(spans)

    def flush(self, timeout_s: float) -> bool:
        """Nothing is kept back."""
        return True

    def close(self, timeout_s: float) -> bool:
        """Close the file."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            try:
                os.close(descriptor)
            except OSError as error:
                self._report(error)
        return True

    def _append(self, line: bytes) -> None:
        if self._descriptor is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o644)
        if self._has_torn_line:
            line = b"\n" + line
        written = os.write(self._descriptor, line)
        self._has_torn_line = written < len(line)
        if self._has_torn_line:
            raise OSError(f"{written} of {len(line)} bytes were written; the disk may be full")

    def _report(self, error: OSError) -> None:
        if not self._has_reported:
            self._has_reported = True
            _log.warning(
                "tracekv: spans can't be appended to %s (TRACEKV_TRACE_FILE): %s. They are dropped and counted.",
                self._path,
                error.strerror or error,
            )


class OtlpExporter:
    """Posts spans to an OTLP/HTTP endpoint (protobuf) from a thread of its own, so that a slow endpoint delays nobody.

    Endpoint, headers, timeout, compression, certificates and credential provider are those of ``OTEL_EXPORTER_OTLP_*``, as the
    OpenTelemetry SDK's exporter reads them; its transport, retries included, does the sending. At most ``max_batches`` wait;
    beyond it the oldest is dropped. Failures are reported once and counted.

    Raises:
        ImportError: The ``agent`` extra isn't installed.
    """

    def __init__(self, max_batches: int = 256) -> None:
        from tracekv.agent.transport import OtlpTransport

        self.exported = 0
        self.failed = 0
        self._transport = OtlpTransport()
        self._queue: deque[tuple[int, bytes]] = deque()
        self._max_batches = max_batches
        self._changed = threading.Condition()
        self._is_sending = False
        self._is_closing = False
        self._has_reported = False
        self._thread = threading.Thread(target=self._send_all, name="tracekv-otlp", daemon=True)
        self._thread.start()

    def export(self, spans: Sequence[Span], resource: Mapping[str, AttributeValue]) -> None:
        """Queue a batch."""
        payload = to_request(spans, resource)
        with self._changed:
            if len(self._queue) >= self._max_batches:
                self.failed += self._queue.popleft()[0]
            self._queue.append((len(spans), payload))
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until the queue is sent."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._is_sending, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Send what is queued, for at most ``timeout_s``; a request under way is left to end with the process."""
        deadline = monotonic() + timeout_s
        is_flushed = self.flush(timeout_s)
        with self._changed:
            self._is_closing = True
            self.failed += sum(count for count, _ in self._queue)
            self._queue.clear()
            self._changed.notify_all()
        if is_flushed:
            self._thread.join(max(0.0, deadline - monotonic()))
        self._transport.close()
        return is_flushed

    def _send_all(self) -> None:
        with self._transport.attached():
            while True:
                with self._changed:
                    self._is_sending = False
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._queue or self._is_closing)
                    if not self._queue:
                        return
                    count, payload = self._queue.popleft()
                    self._is_sending = True
                self._send(count, payload)

    def _send(self, count: int, payload: bytes) -> None:
        reason: Any
        try:
            reason = self._transport.send(payload)
        except Exception as error:  # whatever a transport may raise, the sender goes on
            reason = type(error).__name__
        if reason is None:
            self.exported += count
            return
        self.failed += count
        if not self._has_reported:
            self._has_reported = True
            _log.warning(
                "tracekv: spans can't be sent to %s: %s. Check OTEL_EXPORTER_OTLP_ENDPOINT. They are dropped and counted.",
                self._transport.endpoint,
                reason,
            )


def otlp_endpoint_is_set(environ: Mapping[str, str]) -> bool:
    """Whether the OpenTelemetry variables ask for traces over OTLP/HTTP; says so where they ask for another protocol."""
    if not any(environ.get(name) for name in ENDPOINT_VARIABLES):
        return False
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if environ.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "none":
        return False
    protocol = environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    if protocol and protocol.strip().lower() != "http/protobuf":
        _log.warning(
            "tracekv: spans are sent over OTLP/HTTP only, and OTEL_EXPORTER_OTLP_PROTOCOL asks for %s. No spans are sent. "
            "Set it to http/protobuf, and the endpoint to the collector's HTTP port (usually 4318).",
            protocol,
        )
        return False
    return True
