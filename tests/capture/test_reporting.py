"""What a connector tells of itself: that no call of it can hurt the connector, or those who read."""

from __future__ import annotations

import logging
import time
from time import perf_counter_ns

import pytest

import tracekv
from tests.support.connectors import TensorWorker
from tracekv import reporting
from tracekv.journal.records import Transfer
from tracekv.journal.vocabulary import Direction, DropReason, Tier


@pytest.fixture(autouse=True)
def _nothing_said_yet(monkeypatch):
    monkeypatch.setattr(reporting, "_said", set())


def test_a_transfer_that_is_none_is_left_out_and_said_once(records, caplog):
    worker = tracekv.trace(TensorWorker)(None)
    now = perf_counter_ns()
    with caplog.at_level(logging.WARNING, "tracekv"):
        for pages in (None, [object()], 3):
            tracekv.transfer(Direction.LOAD, 7, 0, pages, 10, Tier.HOST, now, now)
    tracekv.transfer(Direction.LOAD, 7, 0, (1, 2), 10, Tier.HOST, now, now)
    assert [record.pages for record in records(Transfer)] == [[1, 2]]
    assert [line.getMessage() for line in caplog.records] == [
        "tracekv: a Transfer report could not be written (TypeError: 'NoneType' object is not iterable)"
    ]
    del worker


def test_where_nothing_is_traced_no_report_is_made_up():
    tracekv.transfer(Direction.LOAD, 7, 0, None, 10, Tier.HOST, 0, 0)
    tracekv.drop(DropReason.NO_SPACE, blocks=None)


def test_a_transfer_by_another_clock_is_put_on_ours_and_said(records, caplog):
    worker = tracekv.trace(TensorWorker)(None)
    ended = time.time_ns()
    with caplog.at_level(logging.WARNING, "tracekv"):
        for _ in range(2):
            tracekv.transfer(Direction.LOAD, 7, 0, [1], 10, Tier.HOST, ended - 500, ended)
    for record in records(Transfer):
        assert record.ended_ns - record.started_ns == 500
        assert record.ended_ns <= perf_counter_ns()
    (line,) = [line.getMessage() for line in caplog.records]
    assert "perf_counter_ns" in line
    del worker
