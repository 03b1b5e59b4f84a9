"""What every test may ask for."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.support.seaweed import S3Server, seaweed

# No test asserts a time: a slow machine is no failure.
settings.register_profile("tracekv", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tracekv")

# An arena is reserved memory, and lives as long as its engine: many a test makes several, and ends none.
os.environ.setdefault("TRACEKV_FSSPEC__ARENA_BYTES", str(64 << 20))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs a GPU where there is none; it is told as deselected, not as skipped."""
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        items[:] = [item for item in items if item not in marked]
        config.hook.pytest_deselected(items=marked)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """One S3 server for all tests that want one; it is started for the first of them."""
    with seaweed() as server:
        yield server


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The S3 server, with the AWS variables naming it for the time of this test."""
    for name, value in s3_server.environ().items():
        monkeypatch.setenv(name, value)
    return s3_server
