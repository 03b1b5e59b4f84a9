"""Where finished spans go: a file of OTLP JSON lines, an OTLP endpoint. Neither raises, neither blocks the engine."""

from __future__ import annotations

import logging
import os
import stat
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tracekv.views.model import AttributeValue, Span
from tracekv.views.otlp import to_json_line
from tracekv.views.otlp_protobuf import to_request

if TYPE_CHECKING:
    from tracekv.agent.transport import Transport

_log = logging.getLogger("tracekv")

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


#: What the queue of an endpoint holds at most, encoded.
_QUEUE_BYTES = 32 << 20
Done = Callable[[], None]


class Exporter(Protocol):
    """Takes finished spans. Called from one thread; no method raises.

    Attributes:
        name: What its place in a journal's state is called.
        exported, failed: Spans handed on, and spans given up.
    """

    name: str
    exported: int
    failed: int

    def export(self, spans: Sequence[Span], resource: Mapping[str, AttributeValue], done: Done | None = None) -> None:
        """Hand spans on, or queue them.

        Args:
            done: Called, on any thread, when they and all before them are handed on or given up. Also for no spans at all.
        """

    def flush(self, timeout_s: float) -> bool:
        """Wait until what was taken is handed on or given up; False where that took longer than ``timeout_s``."""

    def close(self, timeout_s: float) -> bool:
        """Flush and end. What isn't handed on in time is given up and counted."""


class TraceFileExporter:
    """Appends OTLP JSON lines to a file; parent folders are made.

    Each line is one ``O_APPEND`` write, so several processes may share a file. A full disk, a missing permission and the like
    are reported once; the spans concerned are counted as failed, and the next batch tries again.
    """

    name = "file"

    def __init__(self, path: str | Path) -> None:
        self.exported = 0
        self.failed = 0
        self._path = Path(path).expanduser()
        self._descriptor: int | None = None
        self._has_reported = False
        self._has_torn_line = False

    def export(self, spans: Sequence[Span], resource: Mapping[str, AttributeValue], done: Done | None = None) -> None:
        """Append one line."""
        try:
            if spans:
                self._append(to_json_line(spans, resource))
        except OSError as error:
            self.failed += len(spans)
            self._report(error)
        else:
            self.exported += len(spans)
        if done is not None:
            done()

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
            self._has_torn_line = _ends_within_a_line(self._path, self._descriptor)
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


def _ends_within_a_line(path: Path, descriptor: int) -> bool:
    """Whether whoever wrote to a file before was killed in the middle of a line."""
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or not found.st_size:
        return False
    try:
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:  # it may be written, and not read
        return False


class _Batch(NamedTuple):
    """An encoded request; without spans only a mark, to say when all before it is sent."""

    spans: int
    payload: bytes
    done: Done | None


class OtlpExporter:
    """Sends spans to an OTLP endpoint from a thread of its own, so that a slow endpoint delays nobody.

    Protocol (``http/protobuf``, the default, or ``grpc``), endpoint, headers, timeout, compression, certificates and credential
    provider are those of ``OTEL_EXPORTER_OTLP_*``, as the OpenTelemetry SDK's exporters read them; their transport does the
    sending. At most ``max_batches``, and 32 MiB, wait; beyond it the oldest is dropped. Failures are counted, and each outage is
    reported once.

    Raises:
        ImportError: The ``agent`` extra isn't installed.
    """

    name = "otlp"

    def __init__(self, max_batches: int = 256, transport: Transport | None = None) -> None:
        from tracekv.agent.transport import transport_from

        self.exported = 0
        self.failed = 0
        self._transport = transport or transport_from(os.environ)
        self._queue: deque[_Batch] = deque()
        self._queue_bytes = 0
        self._max_batches = max_batches
        self._changed = threading.Condition()
        self._is_sending = False
        self._is_closing = False
        self._has_reported = False
        self._thread = threading.Thread(target=self._send_all, name="tracekv-otlp", daemon=True)
        self._thread.start()

    def export(self, spans: Sequence[Span], resource: Mapping[str, AttributeValue], done: Done | None = None) -> None:
        """Queue a batch."""
        payload = to_request(spans, resource) if spans else b""
        given_up: list[_Batch] = []
        with self._changed:
            while len(self._queue) >= self._max_batches or self._queue_bytes + len(payload) > _QUEUE_BYTES:
                if not self._queue:
                    break
                given_up.append(self._queue.popleft())
                self._queue_bytes -= len(given_up[-1].payload)
                self.failed += given_up[-1].spans
            self._queue.append(_Batch(len(spans), payload, done))
            self._queue_bytes += len(payload)
            self._changed.notify_all()
        for batch in given_up:
            if batch.done is not None:
                batch.done()

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
            self.failed += sum(batch.spans for batch in self._queue)
            self._queue.clear()
            self._queue_bytes = 0
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
                    batch = self._queue.popleft()
                    self._queue_bytes -= len(batch.payload)
                    self._is_sending = True
                if batch.spans:
                    self._send(batch)
                if batch.done is not None:
                    batch.done()

    def _send(self, batch: _Batch) -> None:
        reason: Any
        try:
            reason = self._transport.send(batch.payload)
        except Exception as error:  # whatever a transport may raise, the sender goes on
            reason = type(error).__name__
        if reason is None:
            self.exported += batch.spans
            self._has_reported = False
            return
        self.failed += batch.spans
        if not self._has_reported:
            self._has_reported = True
            _log.warning(
                "tracekv: spans can't be sent to %s: %s. Check OTEL_EXPORTER_OTLP_ENDPOINT. They are dropped and counted.",
                self._transport.endpoint,
                reason,
            )


def otlp_protocol(environ: Mapping[str, str]) -> str:
    """The protocol that the OpenTelemetry variables ask for: ``http/protobuf`` where they name none."""
    protocol = environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    return (protocol or "").strip().lower() or "http/protobuf"


def otlp_endpoint_is_set(environ: Mapping[str, str]) -> bool:
    """Whether the OpenTelemetry variables ask for traces over OTLP; says so where they ask for a protocol that isn't known."""
    if not any(environ.get(name) for name in ENDPOINT_VARIABLES):
        return False
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if environ.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "none":
        return False
    if otlp_protocol(environ) not in ("http/protobuf", "grpc"):
        _log.warning(
            "tracekv: no spans are sent, since OTEL_EXPORTER_OTLP_PROTOCOL asks for %s. Set it to http/protobuf or grpc, and the "
            "endpoint to the collector's port for it (usually 4318 or 4317).",
            otlp_protocol(environ),
        )
        return False
    return True
