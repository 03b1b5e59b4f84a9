"""Records of runs that happen now, and processes that write them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import msgspec

from tests.views.sample_run import bring_up, the_run
from tracekv.journal.records import Enqueued, LayerHooks, Record, RunJoined
from tracekv.views.model import Span
from tracekv.views.otlp import read_trace_file

ROOT = Path(__file__).parents[2]
TIMES = ("started_ns", "ended_ns", "at_ns", "first_started_ns", "last_ended_ns")


def shifted(record: Record, by_ns: int, request_id: int | None = None, step: int | None = None) -> Record:
    """``record`` at another time, of another request, in another step."""
    known = {field.name for field in msgspec.structs.fields(record)}
    changes: dict[str, Any] = {name: getattr(record, name) + by_ns for name in TIMES if name in known}
    if isinstance(record, LayerHooks):
        for name in ("waits", "saves"):
            times = memoryview(bytearray(getattr(record, name))).cast("q")
            for position, moment in enumerate(times):
                times[position] = moment + by_ns if moment else 0
            changes[name] = times.tobytes()
    if request_id is not None and getattr(record, "request_id", None) is not None:
        changes["request_id"] = request_id
    if request_id is not None and "request_ids" in known:
        changes["request_ids"] = [request_id]
    if step is not None and getattr(record, "step", 0):
        changes["step"] = step
    return msgspec.structs.replace(record, **changes)


def beginning() -> list[Record]:
    """Bring-up; the journal has its own first record."""
    return [shifted(record, perf_counter_ns()) for record in bring_up()[1:]]


def request(number: int) -> list[Record]:
    """One request's whole life in one step, now."""
    now = perf_counter_ns()
    return [shifted(record, now - 3000, number, number) for record in the_run()[len(bring_up()) : -1]]


_ENGINE = """
import sys
from tests.agent import live
live.be_engine(*sys.argv[1:])
"""


def be_engine(requests: str, rank: str = "0", world: str = "1", run: str = "", traceparent: str = "") -> None:
    """The main of a process that writes as an engine's rank does; it tells its pid, and goes on at each line of its input."""
    from tracekv import settings as settings_module
    from tracekv.agent import start_agent
    from tracekv.journal.directory import start_journal

    settings = settings_module.load()
    assert settings.journal_dir is not None
    journal = start_journal(Path(settings.journal_dir), file_bytes=1 << 20)
    assert journal is not None
    handle = start_agent(journal, settings)
    print(json.dumps({"pid": os.getpid(), "journal": str(journal.path), "has_agent": handle is not None}), flush=True)
    sys.stdin.readline()
    is_leader = rank == "0"
    for record in beginning():
        if isinstance(record, RunJoined):
            record = RunJoined(bytes.fromhex(run) or record.run_id, int(rank), int(world))
        if is_leader or getattr(record, "side", "worker") == "worker":
            journal.write(record)
    for number in range(1, int(requests) + 1):
        if is_leader and traceparent:
            journal.write(Enqueued(perf_counter_ns(), number, None, 1024, traceparent))
        for record in request(number):
            if is_leader or not hasattr(record, "request_id") or type(record).__name__ == "Transfer":
                journal.write(record)
    is_flushed = handle.flush(20) if handle is not None else None
    print(json.dumps({"is_flushed": is_flushed}), flush=True)
    sys.stdin.readline()
    # Within two seconds: whether an agent that got no processor answered by then is none of a test's business.
    is_closed = handle.close(2) if handle is not None else None
    journal.close()
    print(json.dumps({"is_closed": is_closed}), flush=True)


class Engine:
    """A process that writes a journal; each :meth:`go` lets it go on to its next word."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.told = self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the engine ended with {self.process.wait()}"
        told: dict[str, Any] = json.loads(line)
        return told

    def go(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._read()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@contextmanager
def engine(
    directory: Path, requests: int = 1, *arguments: str, pass_fds: tuple[int, ...] = (), **environ: str
) -> Iterator[Engine]:
    """An engine's process with a journal in ``directory``; killed at the end, if it is still there."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TRACEKV_", "OTEL_"))}
    process = subprocess.Popen(
        [sys.executable, "-c", _ENGINE, str(requests), *arguments],
        cwd=ROOT,
        env={**clean, "TRACEKV_JOURNAL_DIR": str(directory), **environ},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=pass_fds,
    )
    try:
        yield Engine(process)
    finally:
        process.kill()
        process.communicate()


@contextmanager
def agent(directory: Path, **environ: str) -> Iterator[subprocess.Popen[bytes]]:
    """An agent's process that nobody detached; killed at the end, if it is still there."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TRACEKV_", "OTEL_"))}
    directory.mkdir(exist_ok=True)
    with (directory / "agent.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tracekv.agent", str(directory)], env={**clean, **environ}, stdout=log, stderr=log
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def until(condition: Callable[[], Any], what: str, timeout_s: float = 30.0) -> Any:
    """What ``condition`` says, once that is true."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"in {timeout_s} s not: {what}"
        time.sleep(0.03)
    return found


def log_lines(directory: Path, event: str = "") -> list[dict[str, Any]]:
    """The agent's log; lines of one event."""
    path = directory / "agent.log"
    # Libraries below the agent may write to its standard error, too.
    said = path.read_text().splitlines() if path.exists() else []
    lines = [json.loads(line) for line in said if line.startswith("{")]
    return [line for line in lines if event in ("", line["event"])]


def ended(directory: Path) -> dict[str, Any]:
    """The last word of the directory's agent, which ends by itself."""
    lines: list[dict[str, Any]] = until(lambda: log_lines(directory, "agent ended"), "the agent ends")
    return lines[-1]


def spans_in(path: Path) -> list[Span]:
    """A trace file's spans, none while there is no file."""
    return list(read_trace_file(path)) if path.exists() else []


def roots(spans: Iterable[Span]) -> list[Span]:
    return [span for span in spans if span.name == "request"]
