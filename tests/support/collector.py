"""A real OpenTelemetry collector (rotel, from PyPI) in front of a small OTLP/HTTP sink of the standard library."""

from __future__ import annotations

import gzip
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Sink:
    """Keeps what is posted to it. ``status`` is what it answers; while ``may_answer`` is not set it answers nothing."""

    def __init__(self) -> None:
        self.status = 200
        self.bodies: list[bytes] = []
        self.headers: list[Any] = []
        self.paths: list[str] = []
        self.requests: list[ExportTraceServiceRequest] = []
        self.metrics: list[ExportMetricsServiceRequest] = []
        self.arrived = threading.Event()
        self.may_answer = threading.Event()
        self.may_answer.set()
        self._changed = threading.Condition()
        sink = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                sink.arrived.set()
                sink.may_answer.wait(60)
                sink._take(self.path, self.headers, body)
                self.send_response(sink.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def _take(self, path: str, headers: Any, body: bytes) -> None:
        with self._changed:
            self.bodies.append(body)
            self.headers.append(headers)
            self.paths.append(path)
            if path.endswith("/metrics"):
                self.metrics.append(ExportMetricsServiceRequest.FromString(body))
            else:
                self.requests.append(ExportTraceServiceRequest.FromString(body))
            self._changed.notify_all()

    @property
    def spans(self) -> list[Any]:
        """Every span that came, as the protocol's own message."""
        return [
            span
            for request in list(self.requests)
            for group in request.resource_spans
            for scope in group.scope_spans
            for span in scope.spans
        ]

    @property
    def span_names(self) -> list[str]:
        return [span.name for span in self.spans]

    def wait_for_spans(self, count: int, timeout_s: float = 30.0) -> list[Any]:
        """The spans, once there are ``count``."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.spans) >= count, timeout_s), (
                f"{len(self.spans)} of {count} spans came"
            )
        return self.spans

    def close(self) -> None:
        self.may_answer.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@dataclass
class Collector:
    """Where the collector listens."""

    http: str
    grpc: str


def attributes_of(message: Any) -> dict[str, Any]:
    """The attributes of a span, link, event or resource as Python values."""
    return {item.key: _value(item.value) for item in message.attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@contextmanager
def collector(sink_url: str, directory: Path) -> Iterator[Collector]:
    """The collector, sending on to ``sink_url``; it and its files are gone at the end."""
    import rotel

    http, grpc = free_port(), free_port()
    command = [
        str(Path(rotel.__file__).parent / "rotel-agent"), "start",
        "--pid-file", str(directory / "rotel.pid"), "--log-file", str(directory / "rotel.log"),
        "--otlp-http-endpoint", f"127.0.0.1:{http}", "--otlp-grpc-endpoint", f"127.0.0.1:{grpc}",
        "--batch-timeout", "50ms",
        "--exporter", "otlp", "--otlp-exporter-endpoint", sink_url, "--otlp-exporter-protocol", "http",
    ]  # fmt: skip
    with (directory / "rotel.out").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 20
        for port in (http, grpc):
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                except OSError:
                    assert process.poll() is None, (directory / "rotel.out").read_text()
                    assert time.monotonic() < deadline, "the collector didn't come up"
                    time.sleep(0.02)
        yield Collector(f"http://127.0.0.1:{http}", f"http://127.0.0.1:{grpc}")
    finally:
        process.terminate()
        process.wait(10)
