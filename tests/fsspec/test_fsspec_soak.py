"""Thousands of requests of a multi-turn trace through a tiny arena and a store that is cleaned: all right, and memory flat."""

from __future__ import annotations

import threading
from time import monotonic

import pytest

import tracekv
from tests.fsspec.soak import WINDOWS, Soak, Soaked, at_rest, books, footprint
from tracekv import capture
from tracekv_fsspec import Scheduler, Worker

KIB, MIB = 1 << 10, 1 << 20
#: Books that are empty when nothing runs.
EMPTY = (
    "offers", "parked", "copies", "in flight", "queued bytes", "queued batches", "header checks", "pending", "held",
)  # fmt: skip


@pytest.fixture
def soak(configure, monkeypatch, tmp_path):
    """One engine that promises what is staged and takes hints, and one that parks; both traced."""
    monkeypatch.setenv("TRACEKV_AGENT", "off")
    monkeypatch.setenv("TRACEKV_JOURNAL_DIR", str(tmp_path / "journals"))
    monkeypatch.setenv("TRACEKV_BUDGET_PCT", "100")
    monkeypatch.setenv("TRACEKV_ENQUEUE_HOOK", "1")
    monkeypatch.setattr("tracekv_fsspec.parking.PINS_S", 3.0)
    monkeypatch.setattr("tracekv_fsspec.requests.MAX_REQUESTS", 32)
    monkeypatch.setattr("tracekv_fsspec.prefetch.MOST_HINTS", 64)
    capture.shutdown()
    # 48 blocks; a prompt has up to 16, and four run at once.
    shared = {"arena_bytes": 48 * 2 * 4 * KIB, "refresh_ms": 200, "read_deadline_ms": 20_000}
    engines = []
    for way in ({"offer": "staged", "offer_wait_ms": 20}, {"offer": "async", "offer_wait_ms": 0}):
        configure(**shared, **way)
        engines.append(Soaked(WINDOWS, 256, tracekv.trace(Scheduler), tracekv.trace(Worker)))
    yield Soak(engines, (tmp_path / "kv").as_uri(), high=4 * MIB, low=2 * MIB)
    for engine in engines:
        engine.stop()
    capture.shutdown()


def settled(soak):
    """The books at rest."""
    soak.drain()
    deadline = monotonic() + 60
    while True:
        found = [books(engine) for engine in soak.engines]
        is_pinned = not all(map(at_rest, soak.engines))
        left = {name: [each[name] for each in found] for name in EMPTY if any(each[name] for each in found)}
        if not left and not is_pinned:
            return found
        assert monotonic() < deadline, (left, is_pinned)
        threading.Event().wait(0.05)
        for engine in soak.engines:
            engine.run_pass()


def journal_bytes(tmp_path):
    return sum(path.stat().st_blocks * 512 for path in (tmp_path / "journals").rglob("*") if path.is_file())


def soaked(soak, requests, tmp_path):
    """The footprint after half of the requests and after all of them."""
    soak.play(requests // 2)
    half, journals = footprint(soak), journal_bytes(tmp_path)
    soak.play(requests - requests // 2)
    whole = footprint(soak)
    counts = soak.counts
    assert counts.finished + counts.cancelled >= requests
    assert min(counts.parked, counts.replayed, counts.honoured_in_part, counts.deleted_commits) > 0, counts
    assert counts.loaded_blocks > requests
    assert journal_bytes(tmp_path) <= journals
    return half, whole


def test_a_long_trace_is_right_and_leaves_nothing_behind(soak, tmp_path):
    soaked(soak, 500, tmp_path)
    for found in settled(soak):
        assert found["requests"] <= 32


@pytest.mark.soak
def test_ten_thousand_requests_leave_memory_flat(soak, tmp_path):
    half, whole = soaked(soak, 10_000, tmp_path)
    settled(soak)
    assert whole[0] - half[0] < 0.01 * half[0]
    assert whole[1] - half[1] < 4 * MIB
