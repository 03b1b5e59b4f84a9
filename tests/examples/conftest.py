from __future__ import annotations

import functools

import pytest
import torch

from tracekv.contract import use_runtime
from tracekv.harness import build_model


@functools.cache
def _model(preset):
    return build_model(preset, num_hidden_layers=2 if preset == "llama" else 4)


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch, tmp_path):
    torch.set_num_threads(1)
    monkeypatch.setenv("KV_CACHE_FOLDER", str(tmp_path / "kv"))
    yield
    use_runtime(None)


@pytest.fixture
def model():
    return _model
