"""What changes in an engine that runs: the control word of its journal, and the budget of tracing."""

from __future__ import annotations

import logging

import pytest

import tracekv
from tests.support.connectors import FlatScheduler, TensorWorker, request
from tracekv.capture import budget
from tracekv.contract import SchedulerOutput
from tracekv.journal.current import current
from tracekv.journal.layout import with_detail
from tracekv.journal.reader import RingReader
from tracekv.journal.records import BuildCall, Call, CallCounts, LayerHooks, QueryCall, TracingReduced
from tracekv.journal.vocabulary import Callback


class Engine:
    """One pass after another, as a runtime would drive the pair."""

    def __init__(self):
        self.scheduler, self.worker = tracekv.trace(FlatScheduler)(None), tracekv.trace(TensorWorker)(None)

    def step(self):
        self.worker.bind_connector_meta(self.scheduler.build_connector_meta(SchedulerOutput()))
        self.worker.start_load_kv(None)
        self.worker.wait_for_layer_load(0, None)
        self.worker.wait_for_save(None)
        self.worker.get_finished([], [])
        assert self.worker.get_connector_meta() == {"plan": 1}


def set_detail(detail):
    reader = RingReader(current.journal.path)
    reader.set_control(with_detail(reader.control(), detail))
    reader.close()


def test_detail_off_through_the_control_word_stops_records_and_economy_brings_them_back(records):
    engine = Engine()
    engine.step()
    before = len(records(Call))
    set_detail("off")
    for _ in range(3):
        engine.step()
    assert len(records(Call)) == before
    set_detail("economy")
    engine.step()
    assert len(records(BuildCall)) == 2
    assert len(records(LayerHooks)) == 2


def test_the_journal_says_once_that_the_detail_was_switched_off_and_on_again(records):
    engine = Engine()
    engine.step()
    set_detail("off")
    for _ in range(3):
        engine.step()
    set_detail("full")
    engine.step()
    told = records(TracingReduced)
    assert [(each.is_off, each.is_reduced, each.cost_ppm, each.limit_ppm) for each in told] == [
        (True, True, 0, 0),
        (False, False, 0, 0),
    ]
    first, second = records(BuildCall)
    assert first.ended_ns < told[0].at_ns < told[1].at_ns < second.ended_ns
    assert second.step == first.step + 1  # the passes between were not counted: nothing else tells of them


@pytest.fixture
def every_step_is_judged(monkeypatch):
    monkeypatch.setattr(budget, "_WINDOW_NS", 1)


def test_over_its_budget_tracing_only_counts_and_says_so(records, monkeypatch, caplog, every_step_is_judged):
    monkeypatch.setenv("TRACEKV_BUDGET_PCT", "0.0001")
    engine = Engine()
    with caplog.at_level(logging.WARNING, "tracekv"):
        for _ in range(4):
            engine.step()
    engine.scheduler.get_num_new_matched_tokens(request(), 0)
    (change,) = records(TracingReduced)
    assert change.is_reduced
    assert change.cost_ppm > change.limit_ppm == 1
    assert len(records(BuildCall)) == 1
    assert len(records(QueryCall)) == 1  # requests are still told one by one
    assert "TRACEKV_BUDGET_PCT" in caplog.text
    assert len(caplog.records) == 1


def test_after_a_pause_records_are_full_again_and_the_counts_are_told(records, monkeypatch, every_step_is_judged):
    monkeypatch.setenv("TRACEKV_BUDGET_PCT", "0.0001")
    engine = Engine()
    engine.step()
    engine.step()
    its_budget = engine.scheduler._tracekv_recorder._budget
    assert its_budget.is_reduced
    its_budget._limit, its_budget._resumes_ns = 1e6, 0
    engine.step()
    engine.step()
    assert [change.is_reduced for change in records(TracingReduced)] == [True, False]
    counted = {code: calls for counts in records(CallCounts) for code, calls, _, _ in counts.callbacks}
    assert counted[Callback.WAIT_FOR_SAVE] >= 1
    total = len(records(BuildCall)) + counted[Callback.BUILD_CONNECTOR_META]
    assert total == 4


def test_within_its_budget_nothing_changes(records, every_step_is_judged):
    engine = Engine()
    engine.scheduler._tracekv_recorder._budget._limit = 1e6
    for _ in range(5):
        engine.step()
    assert records(TracingReduced) == []
    assert len(records(BuildCall)) == 5
