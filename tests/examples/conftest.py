from __future__ import annotations

import pytest
import torch

from tests.support.traced import model
from tracekv.contract import use_runtime

__all__ = ["model"]


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch, tmp_path):
    torch.set_num_threads(1)
    monkeypatch.setenv("KV_CACHE_FOLDER", str(tmp_path / "kv"))
    yield
    use_runtime(None)
