"""A small OTLP endpoint, a real collector, and an environment without OpenTelemetry variables."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.collector import Collector, Sink, collector


@pytest.fixture(autouse=True)
def _no_otel_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("OTEL_", "TRACEKV_")):
            monkeypatch.delenv(name)


@pytest.fixture
def sink(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sink]:
    server = Sink()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
    yield server
    server.close()


@pytest.fixture
def behind_collector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Collector, Sink]]:
    """A real collector and the sink that it sends on to."""
    server = Sink()
    with collector(server.url, tmp_path_factory.mktemp("rotel")) as there:
        yield there, server
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
