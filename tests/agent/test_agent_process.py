"""The agent as a process of its own: who starts it, what it inherits, when it ends, and that the engine never minds."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.agent import live
from tests.support.collector import Collector, Sink, attributes_of, free_port
from tracekv.agent.lock import AgentLock, Holder, holder
from tracekv.agent.source import BATCH
from tracekv.agent.spawn import agent_environment
from tracekv.agent.state import StateFile
from tracekv.journal.directory import start_journal
from tracekv.settings import Settings

CALLER = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "journals"
    path.mkdir()
    return path


def has_ended(directory: Path) -> bool:
    return holder(directory) is None


def test_an_engine_starts_an_agent_that_exports_and_ends_by_itself(directory: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    with live.engine(
        directory, 3, TRACEKV_AGENT="auto", TRACEKV_TRACE_FILE=str(trace), TRACEKV_STEP_SAMPLE="1"
    ) as engine:
        assert engine.told["has_agent"]
        assert engine.go() == {"is_flushed": True}
        told = live.spans_in(trace)
        assert len(live.roots(told)) == 3
        assert "is_closed" in engine.go()
    live.ended(directory)

    assert len(live.log_lines(directory, "agent started")) == len(live.log_lines(directory, "agent ended")) == 1
    assert not [line for line in live.log_lines(directory) if line["level"] == "error"]
    assert {span.span_id for span in live.spans_in(trace)} >= {span.span_id for span in told}


def test_engines_that_start_at_once_have_one_agent(directory: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    with ExitStack() as stack:
        engines = [
            stack.enter_context(
                live.engine(directory, 2, str(n), "3", TRACEKV_AGENT="auto", TRACEKV_TRACE_FILE=str(trace))
            )
            for n in (0, 0, 0)
        ]
        for engine in engines:
            assert engine.go() == {"is_flushed": True}
        for engine in engines:
            engine.go()
    live.ended(directory)

    assert len(live.log_lines(directory, "agent started")) == 1
    assert len(live.log_lines(directory, "journal read to its end")) == 3
    assert len(live.roots(live.spans_in(trace))) == 6


def test_what_a_launcher_and_an_engine_have_is_not_inherited(directory: Path, tmp_path: Path) -> None:
    read, write = os.pipe()
    environ = {
        "OMPI_COMM_WORLD_RANK": "3", "PMIX_RANK": "3", "PMI_RANK": "3", "SLURM_JOB_ID": "17", "MARK": "kept",
        "TRACEKV_FSSPEC__URL": "file:///nowhere", "TRACEKV_AGENT": "auto", "TRACEKV_TRACE_FILE": str(tmp_path / "t"),
    }  # fmt: skip
    before = os.sched_getaffinity(0)
    as_nice = min(19, os.nice(0) + 10)  # the tests may be run as nice ones
    os.sched_setaffinity(0, {min(before)})
    try:
        with live.engine(directory, 1, pass_fds=(read, write), **environ) as engine:
            os.close(write)
            engine.go()
            there = holder(directory)
            assert there is not None
            process = psutil.Process(there.pid)
            inherited = process.environ()

            assert inherited["MARK"] == "kept"
            assert not [
                name for name in inherited if name.startswith(("OMPI_", "PMIX_", "PMI_", "SLURM_", "TRACEKV_FSSPEC"))
            ]
            assert inherited["TRACEKV_TRACE_FILE"] == str(tmp_path / "t")
            assert os.sched_getaffinity(there.pid) >= before
            assert process.nice() == as_nice
            assert os.getsid(there.pid) != os.getsid(engine.process.pid)
            assert there.pid not in [child.pid for child in psutil.Process(engine.process.pid).children(recursive=True)]
            fds = [str(link.readlink()) for link in Path(f"/proc/{there.pid}/fd").iterdir()]
            assert not [target for target in fds if target.startswith("pipe:")]
            assert f"{directory}/agent.log" in fds
    finally:
        os.sched_setaffinity(0, before)
        os.close(read)
    live.ended(directory)


def test_with_nowhere_to_export_to_nothing_is_started(directory: Path) -> None:
    with live.engine(directory, 1, TRACEKV_AGENT="auto") as engine:
        assert not engine.told["has_agent"]
        engine.go()

    assert not (directory / "agent.log").exists()


def test_external_starts_nothing_and_a_sidecar_that_comes_later_reads_it_all(directory: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    with live.engine(directory, 2, TRACEKV_AGENT="external") as engine:
        assert engine.go() == {"is_flushed": False}
        assert engine.go() == {"is_closed": False}
    assert not (directory / "agent.log").exists()
    with live.agent(directory, TRACEKV_TRACE_FILE=str(trace)) as sidecar:
        assert sidecar.wait(30) == 0

    assert len(live.roots(live.spans_in(trace))) == 2


def test_a_second_agent_of_a_directory_leaves_at_once(directory: Path, tmp_path: Path) -> None:
    lock = AgentLock(directory)
    assert lock.acquire()
    try:
        with live.agent(directory, TRACEKV_TRACE_FILE=str(tmp_path / "t")) as second:
            assert second.wait(30) == 0
        done = subprocess.run(
            [sys.executable, "-m", "tracekv.cli", "agent", str(directory)],
            env={**os.environ, "TRACEKV_TRACE_FILE": str(tmp_path / "t")}, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
    finally:
        lock.close()

    assert done.returncode == 3
    assert "has its agent already" in done.stderr
    assert live.log_lines(directory) == []


def test_who_only_asks_for_an_agent_keeps_none_from_beginning(directory: Path) -> None:
    lock = AgentLock(directory)
    asking = os.open(directory / "agent.lock", os.O_RDONLY)
    fcntl.flock(asking, fcntl.LOCK_SH)  # as a process that is stopped there
    taken: list[bool] = []
    taking = threading.Thread(target=lambda: taken.append(lock.acquire()))
    taking.start()
    taking.join(0.5)
    assert taken == []
    os.close(asking)
    taking.join(30)
    assert taken == [True]
    lock.close()


def test_an_agent_whose_lock_was_removed_takes_it_anew(directory: Path) -> None:
    lock = AgentLock(directory)
    assert lock.acquire()
    lock.tell("exports")
    (directory / "agent.lock").unlink()
    assert holder(directory) is None
    assert lock.keep()
    assert holder(directory) == Holder(os.getpid(), "exports")
    lock.close()
    assert holder(directory) is None


def test_where_another_agent_has_the_directory_by_now_journals_are_left_to_it(directory: Path, tmp_path: Path) -> None:
    environ = {"TRACEKV_TRACE_FILE": str(tmp_path / "first")}
    with live.engine(directory, 1, TRACEKV_AGENT="external") as engine, live.agent(directory, **environ) as first:
        live.until(lambda: holder(directory), "the agent")
        assert engine.go() == {"is_flushed": True}
        second = AgentLock(tmp_path)
        assert second.acquire()
        (tmp_path / "agent.lock").rename(directory / "agent.lock")
        with live.engine(directory, 1, TRACEKV_AGENT="external") as other:
            other.go()
            other.go()
        engine.go()
        assert first.wait(30) == 0
        second.close()

    assert len(live.log_lines(directory, "journal found")) == 1
    assert len(live.roots(live.spans_in(tmp_path / "first"))) == 1


def test_an_agent_killed_in_the_middle_of_a_run_costs_nothing_but_a_repeated_batch(
    directory: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    environ = {"TRACEKV_TRACE_FILE": str(trace), "TRACEKV_DETAIL": "full", "TRACEKV_STEP_SAMPLE": "1"}
    journal = start_journal(directory, file_bytes=1 << 22)
    assert journal is not None
    for record in live.beginning():
        journal.write(record)
    number, rounds = 0, 3
    for turn in range(rounds):
        with live.agent(directory, **environ) as killed:
            seen = len(live.spans_in(trace))
            for _ in range(20):
                number += 1
                for record in live.request(number):
                    journal.write(record)
            live.until(lambda seen=seen: len(live.spans_in(trace)) > seen, f"spans come in round {turn}")
            killed.send_signal(signal.SIGKILL)
    journal.close()
    with live.agent(directory, **environ) as last:
        assert last.wait(60) == 0
    spans = live.spans_in(trace)
    times = Counter(span.span_id for span in spans)

    assert len({span.trace_id for span in live.roots(spans)}) == number
    assert len([1 for span in {span.span_id: span for span in spans}.values() if span.name == "step"]) == number
    assert sum(times.values()) - len(times) <= rounds * (BATCH + 32)
    assert max(times.values()) <= rounds + 1


def test_a_later_engine_takes_over_from_an_agent_that_was_killed(directory: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    environ = {"TRACEKV_AGENT": "auto", "TRACEKV_TRACE_FILE": str(trace)}
    with live.engine(directory, 1, **environ) as first:
        live.until(lambda: holder(directory) and holder(directory).pid, "the first agent")  # type: ignore[union-attr]
        os.kill(holder(directory).pid, signal.SIGKILL)  # type: ignore[union-attr]
        live.until(lambda: has_ended(directory), "the first agent is gone")
        # Its engine is told so, and goes on.
        assert first.go() == {"is_flushed": False}
        with live.engine(directory, 1, **environ) as second:
            assert second.go() == {"is_flushed": True}
            assert "is_closed" in first.go()
            second.go()
    live.ended(directory)

    assert len(live.roots(live.spans_in(trace))) == 2


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_two_ranks_in_two_processes_give_one_trace_through_a_real_collector(
    protocol: str, directory: Path, behind_collector: tuple[Collector, Sink]
) -> None:
    collector, sink = behind_collector
    run = os.urandom(16).hex()
    environ = {
        "TRACEKV_AGENT": "auto",
        "TRACEKV_STEP_SAMPLE": "1",
        "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.grpc if protocol == "grpc" else collector.http,
        "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
        "OTEL_METRICS_EXPORTER": "none",
        "OTEL_SERVICE_NAME": "engine-under-test",
        "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=lab",
    }
    with (
        live.engine(directory, 1, "0", "2", run, CALLER, **environ) as leader,
        live.engine(directory, 1, "1", "2", run, **environ) as worker,
    ):
        for engine in (leader, worker):
            assert engine.go() == {"is_flushed": True}
        for engine in (leader, worker):
            assert "is_closed" in engine.go()
    ended = live.ended(directory)
    spans = sink.wait_for_spans(ended["spans_exported"])
    assert ended["spans_failed"] == 0

    caller_trace, caller_span = bytes.fromhex(CALLER.split("-")[1]), bytes.fromhex(CALLER.split("-")[2])
    (root,) = [span for span in spans if span.name == "request"]
    assert (root.trace_id, root.parent_span_id) == (caller_trace, caller_span)
    loads = [span for span in spans if span.name == "load"]
    assert {attributes_of(span)["tracekv.rank"] for span in loads} == {0, 1}
    assert {(span.trace_id, span.parent_span_id) for span in loads} == {(root.trace_id, root.span_id)}
    (step,) = [span for span in spans if span.name == "step"]
    assert {(link.trace_id, link.span_id) for span in loads for link in span.links} == {(step.trace_id, step.span_id)}
    (link,) = step.links
    assert (link.trace_id, link.span_id) == (root.trace_id, root.span_id)
    assert attributes_of(link) == {"tracekv.request.id": "1", "tracekv.scheduled_tokens": 480}
    groups = [group for request in sink.requests for group in request.resource_spans]
    assert {scope.scope.name for group in groups for scope in group.scope_spans} == {"tracekv"}
    resources = [attributes_of(group.resource) for group in groups]
    assert {resource["service.name"] for resource in resources} == {"engine-under-test"}
    assert {resource["deployment.environment.name"] for resource in resources} == {"lab"}
    assert {resource["process.pid"] for resource in resources} == {leader.told["pid"], worker.told["pid"]}


def test_an_endpoint_that_hangs_keeps_no_engine_from_ending(directory: Path) -> None:
    sink = Sink()
    sink.may_answer.clear()
    try:
        environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": sink.url, "OTEL_METRICS_EXPORTER": "none", "TRACEKV_AGENT": "auto"}
        with live.engine(directory, 1, **environ) as engine:
            assert engine.process.stdin is not None
            live.until(lambda: holder(directory), "the agent")
            # Not flush, which waits for as long as it is told to: the end of an engine that never asked.
            engine.process.stdin.write("\n\n")
            engine.process.stdin.flush()
            assert sink.arrived.wait(30)
            assert not sink.may_answer.is_set()
            os.kill(holder(directory).pid, signal.SIGKILL)  # type: ignore[union-attr]
            assert engine.process.wait(60) == 0
    finally:
        sink.close()


@pytest.mark.parametrize("trouble", ["refuses", "500", "hangs"])
def test_an_agent_in_front_of_a_bad_endpoint_stays_small_and_ends_the_wait_of_its_engine(
    trouble: str, directory: Path, tmp_path: Path
) -> None:
    sink = Sink()
    sink.status = 500 if trouble == "500" else 200
    if trouble == "hangs":
        sink.may_answer.clear()
    url = f"http://127.0.0.1:{free_port()}" if trouble == "refuses" else sink.url
    environ = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_METRICS_EXPORTER": "none", "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
        "TRACEKV_TRACE_FILE": str(tmp_path / "t"), "TRACEKV_DETAIL": "full", "TRACEKV_STEP_SAMPLE": "1",
    }  # fmt: skip
    journal = start_journal(directory)
    assert journal is not None
    try:
        with live.agent(directory, **environ) as process:
            journal.claim_engine_thread()
            records = [*live.beginning(), *(record for number in range(1, 401) for record in live.request(number))]
            for record in records:
                journal.write(record)
            state = StateFile(journal.path)
            journal.close()
            # The trace file goes on beside the endpoint.
            live.until(lambda: state.mark("file").sequence == len(records) + 1, "all is in the file", 60)

            assert psutil.Process(process.pid).memory_info().rss < 150e6
            process.terminate()
            assert process.wait(30) == 0
    finally:
        sink.close()
    said = [line for line in live.log_lines(directory) if "can't be sent" in line["event"]]
    assert len(said) <= 1
    (ended,) = live.log_lines(directory, "agent ended")
    assert ended["spans_failed"] > 0


def test_a_forked_child_neither_waits_nor_asks(directory: Path, tmp_path: Path) -> None:
    code = """
import os, sys
from pathlib import Path
from tracekv.agent import start_agent
from tracekv.journal.directory import start_journal
from tracekv.settings import Settings
journal = start_journal(Path(sys.argv[1]))
handle = start_agent(journal, Settings(agent="auto", trace_file=sys.argv[2]))
child = os.fork()
if child == 0:
    os._exit(0 if handle.flush(60) and handle.close(60) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print(handle.flush(20), handle.close(2), [name for name in sys.modules if name.startswith(("opentelemetry.", "structlog"))])
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(directory), str(tmp_path / "t")], capture_output=True, text=True, timeout=60
    )

    assert done.stdout == "True True []\n", done.stderr
    live.ended(directory)


def test_an_engine_with_other_settings_is_told_whose_count(directory: Path, tmp_path: Path) -> None:
    with live.agent(directory, TRACEKV_TRACE_FILE=str(tmp_path / "one")):
        live.until(lambda: holder(directory) and holder(directory).exports, "the agent")  # type: ignore[union-attr]
        code = """
import sys
from pathlib import Path
from tracekv.agent import start_agent
from tracekv.journal.directory import start_journal
from tracekv.settings import Settings
handle = start_agent(start_journal(Path(sys.argv[1])), Settings(agent="auto", trace_file=sys.argv[2]))
print(handle.flush(20))
"""
        done = [
            subprocess.run(
                [sys.executable, "-c", code, str(directory), str(tmp_path / name)],
                capture_output=True,
                text=True,
                timeout=60,
            )
            for name in ("one", "two")
        ]

    assert [run.stdout for run in done] == ["True\n", "True\n"]
    assert ["TRACEKV_JOURNAL_DIR" in run.stderr for run in done] == [False, True]


def test_the_agent_s_settings_are_those_of_the_engine_as_resolved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = Settings(agent="external", trace_file="t.jsonl", hash_request_ids=True, step_sample=7)
    environ = agent_environment(
        settings, {"TRACEKV_CONFIG": "x.yaml", "TRACEKV_FSSPEC__URL": "u", "OTEL_X": "y", "PATH": "p"}
    )

    assert {name: value for name, value in environ.items() if name != "PYTHONPATH"} == {
        "OTEL_X": "y",
        "PATH": "p",
        "TRACEKV_AGENT": "external",
        "TRACEKV_TRACE_FILE": str(tmp_path / "t.jsonl"),
        "TRACEKV_HASH_REQUEST_IDS": "1",
        "TRACEKV_STEP_SAMPLE": "7",
    }


def test_detail_that_is_set_in_a_journal_s_header_is_what_the_agent_tells(directory: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    counts: dict[str, int] = {}
    journal = start_journal(directory, file_bytes=1 << 20)
    assert journal is not None
    for record in live.beginning():
        journal.write(record)
    with live.agent(directory, TRACEKV_TRACE_FILE=str(trace), TRACEKV_STEP_SAMPLE="1"):
        for number, detail in enumerate(("economy", "full"), 1):
            done = subprocess.run(
                [sys.executable, "-m", "tracekv.cli", "set", f"detail={detail}", str(directory)],
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, done.stderr
            for record in live.request(number):
                journal.write(record)
            hooks: Any = live.until(
                lambda number=number: [
                    span for span in live.spans_in(trace)
                    if span.name == "wait_for_layer_load" and span.attributes["tracekv.step"] == number
                ],
                f"hooks of step {number}",
            )  # fmt: skip
            counts[detail] = len(hooks)
    journal.close()

    assert counts == {"economy": 2, "full": 4}


def test_a_file_that_is_no_journal_is_said_once_and_the_others_are_read(directory: Path, tmp_path: Path) -> None:
    (directory / "1-ff.tkvring").write_bytes(b"x" * (1 << 17))
    environ = {"TRACEKV_TRACE_FILE": str(tmp_path / "t")}
    # The engine first, since an agent with nothing to read ends; and the agent has to be there when the engine asks.
    with live.engine(directory, 1, TRACEKV_AGENT="external") as engine, live.agent(directory, **environ) as process:
        live.until(lambda: holder(directory), "the agent")
        assert engine.go() == {"is_flushed": True}
        engine.go()
        engine.process.wait(30)
        assert process.wait(30) == 0

    (said,) = live.log_lines(directory, "journal can't be read")
    assert said["journal"] == "1-ff.tkvring"
    assert len(live.roots(live.spans_in(tmp_path / "t"))) == 1


def test_the_states_of_journals_that_are_gone_are_removed(directory: Path, tmp_path: Path) -> None:
    (directory / "1-ff.tkvstate").write_bytes(b"")
    with live.agent(directory, TRACEKV_TRACE_FILE=str(tmp_path / "t")) as process:
        assert process.wait(30) == 0

    assert not list(directory.glob("*.tkvstate"))


def test_log_lines_are_json_with_the_trace_they_belong_to(directory: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    with live.engine(directory, 1, TRACEKV_AGENT="auto", TRACEKV_TRACE_FILE=str(trace)) as engine:
        engine.go()
        engine.go()
    live.ended(directory)
    (line,) = live.log_lines(directory, "blocks dropped")
    (root,) = live.roots(live.spans_in(trace))

    assert line["trace_id"] == root.trace_id.hex()
    assert line["span_id"] == root.span_id.hex()
    assert (line["level"], line["reason"], line["rank"]) == ("warning", "queue_full", 0)
    assert json.dumps(line)
