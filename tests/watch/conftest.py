from __future__ import annotations

import pytest
import torch

from tests.support.traced import model, records
from tracekv import capture
from tracekv.contract import use_runtime

__all__ = ["model", "records"]


@pytest.fixture(autouse=True)
def _own_session(monkeypatch, tmp_path):
    torch.set_num_threads(1)
    monkeypatch.setenv("TRACEKV_AGENT", "off")
    monkeypatch.setenv("TRACEKV_BUDGET_PCT", "100")
    monkeypatch.setenv("TRACEKV_JOURNAL_DIR", str(tmp_path / "journals"))
    monkeypatch.setenv("TRACEKV_WATCH", "1")
    monkeypatch.setenv("KV_CACHE_FOLDER", str(tmp_path / "kv"))
    capture.shutdown()
    yield
    capture.shutdown()
    use_runtime(None)
