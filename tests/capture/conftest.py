from __future__ import annotations

import pytest

from tracekv import capture
from tracekv.journal.current import current


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


@pytest.fixture
def records():
    """Everything recorded so far, optionally of one kind."""

    def read(kind=object):
        assert current.journal is not None, "nothing is traced"
        found, _, lost = current.journal.read(0)
        assert lost == 0
        return [record for record in found if isinstance(record, kind)]

    return read
