"""A small OTLP/HTTP endpoint of the standard library, and an environment without OpenTelemetry variables."""

from __future__ import annotations

import gzip
import os
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Sink:
    """What was posted. ``status`` is what it answers; while ``holds`` is set it answers nothing."""

    def __init__(self) -> None:
        self.status = 200
        self.requests: list[ExportTraceServiceRequest] = []
        self.headers: list[Any] = []
        self.paths: list[str] = []
        self.arrived = threading.Event()
        self.may_answer = threading.Event()
        self.may_answer.set()
        sink = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                sink.headers.append(self.headers)
                sink.paths.append(self.path)
                sink.requests.append(ExportTraceServiceRequest.FromString(body))
                sink.arrived.set()
                sink.may_answer.wait(60)
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

    @property
    def span_names(self) -> list[str]:
        return [
            span.name
            for request in self.requests
            for r in request.resource_spans
            for s in r.scope_spans
            for span in s.spans
        ]

    def close(self) -> None:
        self.may_answer.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture(autouse=True)
def _no_otel_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)


@pytest.fixture
def sink(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sink]:
    server = Sink()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
    yield server
    server.close()


@pytest.fixture
def closing() -> Iterator[Callable[[Any], Any]]:
    """Register something that has ``close(timeout_s)``; it is closed at the test's end."""
    opened: list[Any] = []

    def register(thing: Any) -> Any:
        opened.append(thing)
        return thing

    yield register
    for thing in opened:
        thing.close(1.0)
