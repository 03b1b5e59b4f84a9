"""``bench prefill`` in small: it measures what it says, through the connector's own ways."""

from __future__ import annotations

import msgspec
import pytest

from tracekv.bench import prefill_engine, prefill_parts
from tracekv.bench.prefill import PrefillCost
from tracekv.bench.prefill_tables import prefill_body

KEYS = {
    "save_slowdown_pct", "idle_step_us", "query_us_1024", "warm_ttft_ratio_arena", "warm_ttft_ratio_hint", "warm_ttft_ratio_store",
    "staging_ratio_s3", "staging_ratio_disk", "commit_to_offer_ms",
}  # fmt: skip


@pytest.fixture
def small(monkeypatch):
    """Two layers, short prompts, few steps."""
    monkeypatch.setattr(prefill_engine, "LAYERS", 2)
    monkeypatch.setitem(prefill_engine.MODEL, "num_hidden_layers", 2)
    for name, count in {"SAVE_TOKENS": 128, "WARM_TOKENS": 256, "REST_TOKENS": 32}.items():
        monkeypatch.setattr(prefill_engine, name, count)
    monkeypatch.setattr(prefill_parts, "IDLE_LAYERS", 2)
    monkeypatch.setattr(prefill_parts, "IDLE_REQUESTS", 2)
    monkeypatch.setattr(prefill_parts, "STAGED_MIB", 2)


def test_every_number_is_measured_and_told_with_its_spread_and_goal(small, tmp_path):
    cost = prefill_engine.measured(2, None, tmp_path)
    told = msgspec.to_builtins(cost)
    assert told.keys() >= KEYS
    assert cost.staging_ratio_s3 is None
    for name in KEYS - {"staging_ratio_s3"}:
        low, high = cost.spread[name]
        assert low <= told[name] <= high
    for name in KEYS - {"staging_ratio_s3", "save_slowdown_pct"}:
        assert told[name] > 0
    body = prefill_body(msgspec.convert(told, PrefillCost))
    assert "<= 1.15" in body
    assert f"{2 * 2 * 2 * 64 * 4:,} bytes of KV per token" in body
    assert "S3" not in body


@pytest.mark.s3
def test_staging_is_measured_from_s3_and_leaves_nothing_there(small, s3):
    url = f"s3://{s3.bucket}/bench-prefill"
    with prefill_parts.Staging(url) as staging:
        speeds = staging.measure(2)
    assert {name: len(found) for name, found in speeds.items()} == {"hint": 2, "reader": 2}
    assert min(min(found) for found in speeds.values()) > 0
    from tracekv_fsspec.store import open_store

    store = open_store(url, {})
    assert list(store.list("")) == []
    store.close()
