from __future__ import annotations

import functools

import pytest

from tracekv import capture


@pytest.fixture(autouse=True)
def _own_session(monkeypatch, tmp_path):
    """Engines of a test trace into a journal of the test's own and store below its folder."""
    monkeypatch.setenv("TRACEKV_AGENT", "off")
    monkeypatch.setenv("TRACEKV_JOURNAL_DIR", str(tmp_path / "journals"))
    monkeypatch.setenv("TRACEKV_FSSPEC__URL", (tmp_path / "kv").as_uri())
    monkeypatch.setenv("TRACEKV_FSSPEC__MODEL_ID", "integration")
    monkeypatch.setenv("TRACEKV_FSSPEC__OFFER_WAIT_MS", "10000")
    monkeypatch.setenv("TRACEKV_FSSPEC__ARENA_BYTES", str(64 << 20))
    capture.shutdown()
    yield
    capture.shutdown()


@functools.cache
def _model(preset):
    from tracekv.harness import build_model

    return build_model(preset)


@pytest.fixture(params=["llama", "gemma3"])
def preset(request):
    return request.param


@pytest.fixture
def model(preset):
    return _model(preset)


@pytest.fixture
def mode(preset):
    """llama goes through the flat callbacks, gemma3 through the per-layer-group ones."""
    return {"llama": "v1", "gemma3": "v2"}[preset]
