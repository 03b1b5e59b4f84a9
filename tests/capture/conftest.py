from __future__ import annotations

import pytest

from tests.support.traced import records
from tracekv import capture

__all__ = ["records"]


@pytest.fixture(autouse=True)
def _own_session(monkeypatch, tmp_path):
    """Each test records into a journal of its own, which nobody but the test reads."""
    for name in ("TRACEKV_TRACE_FILE", "TRACEKV_DETAIL", "TRACEKV_CONNECTOR", "TRACEKV_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRACEKV_AGENT", "off")
    monkeypatch.setenv("TRACEKV_JOURNAL_DIR", str(tmp_path / "journals"))
    capture.shutdown()
    yield
    capture.shutdown()
