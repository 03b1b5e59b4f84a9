"""A broken rule shows on the span, in the log, in the metrics and in the request's story, while the engine runs."""

from __future__ import annotations

from pathlib import Path

import tracekv
from tests.support.connectors import FlatScheduler, TensorWorker, request
from tests.views.sample_run import bring_up, queried
from tracekv import capture
from tracekv.agent.listeners import ViewOf
from tracekv.agent.logs import LogListener
from tracekv.agent.metrics import MetricsService
from tracekv.agent.rules import Rules
from tracekv.agent.thread import FeedThread
from tracekv.journal.current import current
from tracekv.journal.reader import RingReader
from tracekv.journal.records import RunJoined
from tracekv.settings import Settings
from tracekv.views.otlp import read_trace_file


class Greedy(FlatScheduler):
    """Offers the whole prompt: rule S2."""

    def get_num_new_matched_tokens(self, request: object, num_computed_tokens: int) -> tuple[int, bool]:
        return 64, False


class Lines:
    """A logger that keeps its lines."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, object]]] = []

    def warning(self, event: str, **fields: object) -> None:
        self.lines.append((event, fields))

    info = warning


def test_a_broken_rule_is_an_event_a_line_a_count_and_part_of_the_story(monkeypatch, tmp_path: Path) -> None:
    from tracekv.agent.exporters import TraceFileExporter

    monkeypatch.setenv("TRACEKV_AGENT", "off")
    monkeypatch.setenv("TRACEKV_JOURNAL_DIR", str(tmp_path / "journals"))
    capture.shutdown()
    scheduler, worker = tracekv.trace(Greedy)(None), tracekv.trace(TensorWorker)(None)
    asked = request(7, prompt_len=64)
    scheduler.get_num_new_matched_tokens(asked, 0)
    scheduler.request_finished(asked, [])
    del worker
    path = current.journal.path
    reader = RingReader(path)
    log, metrics = Lines(), MetricsService(Settings(), {})
    listeners = [LogListener(log), metrics]
    thread = FeedThread(
        reader,
        Settings(agent="thread", detail="full"),
        [TraceFileExporter(str(tmp_path / "trace.jsonl"))],
        views=[ViewOf(listener, reader.facts) for listener in listeners],
    )
    thread.close(20)
    capture.shutdown()

    (root,) = [span for span in read_trace_file(tmp_path / "trace.jsonl") if span.name == "request"]
    broken = [event for event in root.events if event.name == "finding"]
    assert broken[0].attributes["tracekv.rule"] == "S2"
    assert broken[0].attributes["tracekv.severity"] == "violation"
    assert root.attributes["tracekv.rules"][0] == "S2"
    assert ("rule S2", "violation") in [(event, fields.get("severity")) for event, fields in log.lines]
    (findings,) = [metric for metric in metrics.metrics() if metric.name == "tracekv.findings"]
    assert {point.attributes["tracekv.rule"]: point.value for point in findings.points}["S2"] == 1


def test_what_is_found_about_a_process_that_is_gone_is_kept_for_nobody() -> None:
    rules = Rules()
    rules.begins("left")
    rules.begins("there")
    for name in ("left", "there"):
        for record in [*bring_up(), queried(1000, 1100)]:
            rules.feed(name, RunJoined(name.encode(), 0, 1) if isinstance(record, RunJoined) else record)
    rules.ended("left")
    rules.tick(1 << 60)

    assert [found.rule for found in rules.feed("there", queried(8000, 8100, 9))] == ["S14"]
    rules.begins("left")
    assert rules.feed("left", queried(8000, 8100, 9)) == []


def test_a_rule_that_is_broken_on_and_on_is_told_again_so_that_its_alert_goes_on() -> None:
    """S2: each request is offered its whole prompt, one a second for twenty minutes."""
    rules = Rules()
    rules.begins("one")
    for record in bring_up():
        rules.feed("one", record)
    told = []
    for second in range(1200):
        at = 10_000 + second * 1_000_000_000
        query = queried(at, at + 100, second, prompt_tokens=64, computed_tokens=0, offered_tokens=64)
        told += [second for found in rules.feed("one", query) if found.rule == "S2"]

    assert len(told) == 400
    assert all(any(begin <= second < begin + 600 for second in told) for begin in range(0, 700, 60))
    assert {second // 300 for second in told} == {0, 1, 2, 3}
