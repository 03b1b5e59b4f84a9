from __future__ import annotations

import pytest
import torch

from tracekv import capture
from tracekv.contract import use_runtime


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    """A session of its own, no agent, one thread: the models are tiny."""
    torch.set_num_threads(1)
    monkeypatch.setenv("TRACEKV_AGENT", "off")
    capture.shutdown()
    yield
    capture.shutdown()
    use_runtime(None)
