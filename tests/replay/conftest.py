from __future__ import annotations

import functools

import pytest
import torch

from tracekv import capture
from tracekv.contract import use_runtime
from tracekv.harness import build_model
from tracekv.journal.current import current


@functools.cache
def _model(preset):
    return build_model(preset, num_hidden_layers=2 if preset == "llama" else 4)


@pytest.fixture(autouse=True)
def _own_session(monkeypatch, tmp_path):
    torch.set_num_threads(1)
    monkeypatch.setenv("TRACEKV_AGENT", "off")
    monkeypatch.setenv("TRACEKV_BUDGET_PCT", "100")
    monkeypatch.setenv("TRACEKV_JOURNAL_DIR", str(tmp_path / "journals"))
    monkeypatch.setenv("TRACEKV_RECORD", "replay")
    monkeypatch.setenv("TRACEKV_FSSPEC__URL", (tmp_path / "fsspec").as_uri())
    monkeypatch.setenv("TRACEKV_FSSPEC__MODEL_ID", "replay")
    monkeypatch.setenv("TRACEKV_FSSPEC__OFFER_WAIT_MS", "10000")
    monkeypatch.setenv("KV_CACHE_FOLDER", str(tmp_path / "kv"))
    capture.shutdown()
    yield
    capture.shutdown()
    use_runtime(None)


@pytest.fixture
def model():
    return _model


@pytest.fixture
def records():
    """Everything recorded so far, optionally of one kind."""

    def read(kind=object):
        found, _, lost = current.journal.read(0)
        assert lost == 0
        return [record for record in found if isinstance(record, kind)]

    return read
