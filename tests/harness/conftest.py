from __future__ import annotations

import functools

import pytest
import torch

from tracekv.contract import use_runtime
from tracekv.harness import build_model


@pytest.fixture(autouse=True)
def _one_thread_and_one_rank():
    torch.set_num_threads(1)
    yield
    use_runtime(None)


@functools.cache
def _model(preset, entries):
    return build_model(preset, **dict(entries))


@pytest.fixture
def model():
    """``model(preset, **config)``, built once per session: executors take turns with it."""

    def get(preset, **config):
        return _model(preset, tuple(sorted({"num_hidden_layers": 2, **config}.items())))

    return get
