"""The thread that reads the journal: it exports what was written, and nothing that fails in it reaches the writer."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.collector import Sink
from tests.views.sample_run import bring_up, built, named, queried, the_run
from tracekv.agent import start_agent
from tracekv.agent.exporters import OtlpExporter
from tracekv.agent.metrics import ENDPOINT_FILE
from tracekv.agent.thread import FeedThread
from tracekv.journal.directory import start_journal
from tracekv.journal.memory import MemoryJournal
from tracekv.journal.reader import RingReader
from tracekv.journal.records import Drop, Record
from tracekv.journal.vocabulary import Direction, DropReason
from tracekv.settings import Settings
from tracekv.views.model import AttributeValue, Span
from tracekv.views.otlp import read_trace_file
from tracekv.views.summary import SummaryView

FULL = Settings(detail="full")


class Collector:
    """Keeps what is exported; ``error`` is raised instead while it is set, ``gate`` holds it back."""

    def __init__(self) -> None:
        self.exported = 0
        self.failed = 0
        self.spans: list[Span] = []
        self.resource: dict[str, AttributeValue] = {}
        self.error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def export(self, spans: Sequence[Span], resource: Mapping[str, AttributeValue]) -> None:
        self.entered.set()
        self.gate.wait(60)
        if self.error is not None:
            raise self.error
        self.spans += spans
        self.resource = dict(resource)

    def flush(self, timeout_s: float) -> bool:
        return True

    def close(self, timeout_s: float) -> bool:
        return True


def journal_of(records: Sequence[Record], capacity: int = 1024) -> MemoryJournal:
    journal = MemoryJournal(capacity)
    for record in records:
        journal.write(record)
    return journal


def test_everything_written_before_a_flush_is_exported_by_it(closing: Callable[[Any], Any]) -> None:
    journal, collector = journal_of(the_run()[:-1]), Collector()
    feeder = closing(FeedThread(journal, FULL, [collector]))

    assert feeder.flush(10)
    assert len(named(collector.spans, "request")) == 1
    journal.write(queried(8000, 8100, 9))
    assert feeder.flush(10)
    assert len(named(collector.spans, "get_num_new_matched_tokens")) == 2


def test_closing_ends_open_requests_and_steps() -> None:
    collector = Collector()
    feeder = FeedThread(journal_of([*bring_up(), queried(), built()]), FULL, [collector])

    assert feeder.close(10)
    (root,) = named(collector.spans, "request")
    assert root.attributes["tracekv.request.outcome"] == "abandoned"
    assert len(named(collector.spans, "step")) == 1
    assert feeder.close(10)


@pytest.mark.parametrize("ending", ["flush", "close"])
def test_what_lies_behind_a_record_in_the_making_is_exported_too(ending: str, tmp_path: Path) -> None:
    journal, collector = start_journal(tmp_path, file_bytes=1 << 20), Collector()
    assert journal is not None
    feeder = FeedThread(RingReader(journal.path), FULL, [collector])
    # A thread that took its number, and is kept from storing its record.
    journal._append_shared.__self__._next_sequence()  # type: ignore[attr-defined]
    for record in the_run()[1:]:
        journal.write(record)

    assert getattr(feeder, ending)(20)
    assert len(named(collector.spans, "request")) == 1
    feeder.close(20)
    journal.close()


def test_a_flush_exports_all_that_a_ring_holds(tmp_path: Path, closing: Callable[[Any], Any]) -> None:
    journal, summary, count = start_journal(tmp_path), SummaryView(), 70_000
    assert journal is not None
    journal.claim_engine_thread()
    for number in range(count):
        journal.write(Drop(number, Direction.SAVE, DropReason.NO_SPACE, None, None, 1, 0))
    feeder = closing(FeedThread(RingReader(journal.path), FULL, [], views=[summary]))

    assert feeder.flush(60)
    assert summary.summary.records > count
    journal.close()


def test_detail_follows_the_settings() -> None:
    counts = {}
    for detail in ("full", "economy"):
        collector = Collector()
        FeedThread(journal_of(the_run()), Settings(detail=detail), [collector]).close(10)
        counts[detail] = len(named(collector.spans, "wait_for_layer_load"))

    assert counts == {"full": 4, "economy": 2}


def test_request_ids_are_hashed_where_the_settings_say_so() -> None:
    collector = Collector()
    FeedThread(journal_of(the_run()), Settings(hash_request_ids=True), [collector]).close(10)
    (root,) = named(collector.spans, "request")

    assert root.attributes["tracekv.request.id"] != "7"


def test_the_resource_names_the_process() -> None:
    collector = Collector()
    FeedThread(journal_of(the_run()), FULL, [collector], resource={"service.name": "engine"}).close(10)

    assert collector.resource == {
        "service.name": "engine",
        "service.instance.id": b"process-process-".hex(),
        "process.pid": 4711,
        "host.name": "node-1",
    }


def test_lost_records_are_counted_and_the_rest_is_exported() -> None:
    collector, summary = Collector(), SummaryView()
    records = [*the_run(), *[queried(n, n + 1, n) for n in range(100)]]
    feeder = FeedThread(journal_of(records, capacity=16), FULL, [collector], views=[summary])
    feeder.close(10)

    assert feeder.records_lost == summary.summary.lost_records == len(records) - 16
    assert len(named(collector.spans, "get_num_new_matched_tokens")) == 16


def test_other_views_see_every_record() -> None:
    summary = SummaryView()
    FeedThread(journal_of(the_run()), FULL, [], views=[summary]).close(10)

    assert summary.summary.records >= len(the_run())  # what the rules find is shown to it too
    assert summary.summary.callbacks["worker.start_load_kv"].durations.calls == 1


def test_an_exporter_that_raises_is_said_once_counted_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    broken, collector = Collector(), Collector()
    broken.error = RuntimeError("planted")
    journal = journal_of(the_run()[:-1])
    feeder = FeedThread(journal, FULL, [broken, collector])
    assert feeder.flush(10)
    journal.write(queried(8000, 8100, 9))
    feeder.close(10)

    assert feeder.faults == 2
    assert len([record for record in caplog.records if record.name == "tracekv"]) == 1
    assert len(named(collector.spans, "get_num_new_matched_tokens")) == 2


def test_a_view_that_raises_costs_one_record_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def feed(self, record: Record) -> None:
            raise RuntimeError("planted")

        def lost(self, count: int) -> None:
            pass

    collector = Collector()
    feeder = FeedThread(journal_of(the_run()), FULL, [collector], views=[Broken()])
    feeder.close(10)

    assert feeder.faults >= len(the_run())  # what the rules find is shown to it too
    assert len(caplog.records) == 1
    assert len(named(collector.spans, "request")) == 1


def test_a_journal_that_can_not_be_read_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def read(self, cursor: int) -> tuple[list[Record], int, int]:
            raise OSError("planted")

    feeder = FeedThread(Broken(), FULL, [Collector()])

    assert feeder.flush(10)
    assert feeder.close(10)
    assert feeder.faults >= 2
    assert len(caplog.records) == 1


def test_an_exporter_that_hangs_leaves_the_writer_alone_and_the_close_gives_up(closing: Callable[[Any], Any]) -> None:
    collector = Collector()
    collector.gate.clear()
    journal = journal_of(the_run(), capacity=64)
    feeder = closing(FeedThread(journal, FULL, [collector]))
    assert collector.entered.wait(10)
    for n in range(1000):
        journal.write(queried(n, n + 1, n))

    assert feeder.flush(0.05) is False
    assert feeder.close(0.05) is False
    collector.gate.set()
    assert feeder.close(10)
    assert feeder.records_lost == 1000 - 64


def test_large_amounts_are_exported_in_batches() -> None:
    sizes = []

    class Sizes(Collector):
        def export(self, spans: Sequence[Span], resource: Mapping[str, AttributeValue]) -> None:
            sizes.append(len(spans))

    records = [*bring_up(), *[queried(n, n + 1, n) for n in range(3000)]]
    FeedThread(journal_of(records, capacity=8192), FULL, [Sizes()]).close(10)

    assert sum(sizes) > 6000
    assert max(sizes) <= 512


def test_two_processes_spans_of_one_run_meet_in_one_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    for _ in range(2):
        agent = start_agent(journal_of(the_run()), Settings(agent="thread", trace_file=str(path)))
        assert agent is not None
        agent.close(10)
    roots = named(read_trace_file(path), "request")

    assert len(roots) == 2
    assert roots[0].trace_id == roots[1].trace_id


def test_the_states_of_journals_that_are_gone_are_removed_by_a_thread_too(tmp_path: Path) -> None:
    (tmp_path / "1-ff.tkvstate").write_bytes(b"")
    journal = start_journal(tmp_path, file_bytes=1 << 20)
    assert journal is not None
    agent = start_agent(journal, Settings(agent="thread", trace_file=str(tmp_path / "t")))
    assert agent is not None
    agent.close(10)
    journal.close()

    assert [path.stem for path in tmp_path.glob("*.tkvstate")] == [journal.path.stem]


def test_file_and_endpoint_are_both_served(sink: Sink, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    agent = start_agent(journal_of(the_run()), Settings(agent="thread", trace_file=str(path), detail="full"))
    assert agent is not None
    assert agent.close(10)

    assert sorted(sink.span_names) == sorted(span.name for span in read_trace_file(path))
    resource = {item.key: item.value.string_value for item in sink.requests[0].resource_spans[0].resource.attributes}
    assert resource["service.name"] == "tracekv"
    assert resource["host.name"] == "node-1"


def test_a_hanging_endpoint_does_not_keep_the_file_waiting(
    sink: Sink, tmp_path: Path, closing: Callable[[Any], Any]
) -> None:
    sink.may_answer.clear()
    journal, path = journal_of(the_run()[:-1]), tmp_path / "trace.jsonl"
    agent = closing(start_agent(journal, Settings(agent="thread", trace_file=str(path))))
    assert sink.arrived.wait(10)
    journal.write(queried(8000, 8100, 9))

    assert agent.flush(0.5) is False
    assert len(named(read_trace_file(path), "get_num_new_matched_tokens")) == 2


def test_nothing_is_started_where_there_is_nowhere_to_export_to() -> None:
    assert start_agent(MemoryJournal(16), Settings(agent="thread")) is None


def test_nothing_is_started_where_nobody_is_to_read(tmp_path: Path) -> None:
    assert start_agent(MemoryJournal(16), Settings(agent="off", trace_file=str(tmp_path / "t"))) is None


def test_a_disabled_sdk_turns_off_the_endpoint_and_not_the_file(
    sink: Sink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    path = tmp_path / "trace.jsonl"

    assert start_agent(MemoryJournal(16), Settings(agent="thread")) is None
    agent = start_agent(journal_of(the_run()), Settings(agent="thread", trace_file=str(path)))
    assert agent is not None
    agent.close(10)
    assert sink.requests == []
    assert len(named(read_trace_file(path), "request")) == 1


_WITHOUT_EXTRA = """
import sys
for name in ("opentelemetry", "google.protobuf", "requests"):
    sys.modules[name] = None
from tracekv.agent import start_agent
from tracekv.journal.memory import MemoryJournal
from tracekv.settings import Settings
settings = Settings(agent="thread", trace_file=sys.argv[1])
print([start_agent(MemoryJournal(16), settings) for _ in range(2)])
"""


def test_a_missing_extra_is_said_once_and_nothing_is_exported(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _WITHOUT_EXTRA, str(tmp_path / "t")], capture_output=True, text=True, check=True
    )

    assert ended.stdout == "[None, None]\n"
    assert ended.stderr.count("tracekv[agent]") == 1


_EXIT = """
import sys
from tests.views.sample_run import the_run
from tracekv.agent import start_agent
from tracekv.journal.memory import MemoryJournal
from tracekv.settings import Settings
journal = MemoryJournal(64)
agent = start_agent(journal, Settings(agent="thread"))
for record in the_run():
    journal.write(record)
agent.close(2.0)
"""


def test_an_endpoint_that_never_answers_does_not_keep_the_process_from_ending(sink: Sink) -> None:
    sink.may_answer.clear()
    root = Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-c", _EXIT], cwd=root, capture_output=True, text=True, timeout=60, check=True
    )

    # It has ended while the endpoint still holds the request that it got.
    assert ended.returncode == 0
    assert sink.arrived.is_set()
    assert not sink.may_answer.is_set()


def test_a_forked_child_has_no_agent_and_the_parent_s_goes_on(closing: Callable[[Any], Any]) -> None:
    journal, collector = journal_of(the_run()[:-1]), Collector()
    feeder = closing(FeedThread(journal, FULL, [collector]))
    child = os.fork()
    if child == 0:
        os._exit(0 if feeder.flush(10) and feeder.close(10) else 1)
    _, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    assert feeder.flush(10)
    assert len(named(collector.spans, "request")) == 1


def test_memory_stays_bounded_while_an_endpoint_hangs(sink: Sink, closing: Callable[[Any], Any]) -> None:
    sink.may_answer.clear()
    exporter = OtlpExporter(max_batches=8)
    journal = MemoryJournal(256)
    feeder = closing(FeedThread(journal, FULL, [exporter]))
    for record in bring_up():
        journal.write(record)
    for n in range(50):
        for k in range(100):
            journal.write(queried(n * 100 + k, n * 100 + k + 1, n * 100 + k))
        feeder.flush(0.01)

    assert len(exporter._queue) <= 8


def test_metrics_of_a_thread_know_how_much_was_written(tmp_path: Path, closing: Callable[[Any], Any]) -> None:
    journal = start_journal(tmp_path, file_bytes=1 << 20)
    assert journal is not None
    agent = closing(start_agent(journal, Settings(agent="thread", metrics_port=0, journal_dir=str(tmp_path))))
    for record in the_run():
        journal.write(record)
    assert agent.flush(20)
    with urllib.request.urlopen((tmp_path / ENDPOINT_FILE).read_text().strip(), timeout=10) as answer:
        text = answer.read().decode()
    (written,) = re.findall(r"^tracekv_tracer_written_bytes_total\S* (\S+)$", text, re.MULTILINE)

    assert float(written) == RingReader(journal.path).written_bytes() > 0
