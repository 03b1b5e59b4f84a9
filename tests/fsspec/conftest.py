"""Settings of the backend, and engines that are stopped at the end."""

from __future__ import annotations

import pytest

from tests.fsspec.engine import Engine
from tests.support.stores import any_url, faulty, records

__all__ = ["any_url", "faulty", "records"]


@pytest.fixture
def configure(monkeypatch, tmp_path):
    """Set the backend's settings, with usable defaults; called without anything it sets just those."""

    def set_all(**settings):
        defaults = {
            "model_id": "test-model",
            "url": (tmp_path / "kv").as_uri(),
            "offer_wait_ms": 20_000,
            "arena_bytes": 8 << 20,
            "read_deadline_ms": 2000,
            "write_deadline_ms": 2000,
        }
        for name, value in {**defaults, **settings}.items():
            variable = f"TRACEKV_FSSPEC__{name.upper()}"
            if value is None:
                monkeypatch.delenv(variable, raising=False)
            else:
                monkeypatch.setenv(variable, str(value))

    set_all()
    return set_all


@pytest.fixture
def engines():
    """Make engines, and stop them at the end."""
    made = []

    def make(*args, **kwargs):
        made.append(Engine(*args, **kwargs))
        return made[-1]

    yield make
    for engine in made:
        engine.stop()
