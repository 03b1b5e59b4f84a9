"""Services that are closed, and an environment without OpenTelemetry variables."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.collector import Sink
from tracekv.agent.metrics import MetricsService
from tracekv.settings import Settings

Start = Callable[..., MetricsService]


@pytest.fixture(autouse=True)
def _no_otel_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)


@pytest.fixture
def sink() -> Iterator[Sink]:
    server = Sink()
    yield server
    server.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a service with settings; it is closed at the test's end."""
    started: list[MetricsService] = []

    def make(**settings: object) -> MetricsService:
        told = {"agent": "external", "journal_dir": str(tmp_path / "journals")} | settings
        service = MetricsService(Settings(**told), {"service.name": "tracekv", "host.name": "node-1"})  # type: ignore[arg-type]
        started.append(service)
        service.start()
        return service

    yield make
    for service in started:
        service.close(1.0)
