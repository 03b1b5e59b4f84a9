"""tracekv_fsspec over its cells (one rank, nothing parked): the rules name nothing."""

from __future__ import annotations

import pytest

import tracekv
from tracekv import capture
from tracekv.harness import Executor, build_model
from tracekv.journal.current import current
from tracekv.journal.records import Transfer
from tracekv.journal.vocabulary import Direction
from tracekv.testing.corpus import judge
from tracekv.testing.corpus.stage import Stage
from tracekv_fsspec import Scheduler, Worker

CELLS = {
    "v1": {"mode": "v1"},
    "v1-chunked": {"mode": "v1", "chunk_tokens": 64},
    "v2-partial-reuse": {"partial_reuse": True},
    "two-groups": {"preset": "gemma3"},
    "two-groups-chunked": {"preset": "gemma3", "chunk_tokens": 64},
}


@pytest.fixture(autouse=True)
def _own_store(monkeypatch, tmp_path):
    monkeypatch.setenv("TRACEKV_AGENT", "off")
    monkeypatch.setenv("TRACEKV_JOURNAL_DIR", str(tmp_path / "journals"))
    monkeypatch.setenv("TRACEKV_BUDGET_PCT", "100")
    monkeypatch.setenv("TRACEKV_FSSPEC__URL", (tmp_path / "kv").as_uri())
    monkeypatch.setenv("TRACEKV_FSSPEC__MODEL_ID", "clean")
    monkeypatch.setenv("TRACEKV_FSSPEC__ARENA_BYTES", str(64 << 20))
    capture.shutdown()
    yield
    capture.shutdown()


@pytest.mark.parametrize("name", CELLS)
def test_the_persistent_connector_breaks_no_rule(name):
    options = {"num_blocks": 48, **CELLS[name]}
    model = build_model(options.pop("preset", "llama"))
    stage = Stage()
    prompt = stage.prompt(1, 167)
    for _ in range(2):
        engine = Executor(model, tracekv.trace(Scheduler), tracekv.trace(Worker), **options)
        stage.serve(engine, prompt)
        for seed in range(3, 7):  # so many that the device forgets the first: it comes from the store again
            stage.serve(engine, stage.prompt(seed, 400))
        stage.serve(engine, prompt, stage.prompt(2, 128), stage.prompt(3, 9))
        stage.serve(engine, prompt[:101] + stage.prompt(4, 40), new=35)
        stage.serve(engine, prompt, cache_salt="tenant")
        stage.serve(engine, prompt, lora_task_id=7)
        engine.shutdown()
    assert not stage.errors
    records, _, lost = current.journal.read(0)
    assert lost == 0
    moved = {record.direction for record in records if isinstance(record, Transfer)}
    assert moved == {Direction.LOAD, Direction.SAVE}
    assert judge([("engine", record) for record in records]) == []
