"""The flight recorder: what an engine was in the middle of, live, killed, or archived."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.agent import hanging, live
from tests.views.sample_run import bring_up
from tracekv.journal.opening import open_journals
from tracekv.journal.reader import RingReader
from tracekv.journal.records import CallbackSource, ConnectorWrapped
from tracekv.journal.ring import RingJournal
from tracekv.journal.vocabulary import Callback, Side


def tracekv_command(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TRACEKV_", "OTEL_"))}
    return subprocess.run(
        [sys.executable, "-m", "tracekv.cli", *arguments],
        env={**clean, "COLUMNS": "160", **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )


def dumped(*paths: Path) -> list[dict[str, Any]]:
    done = tracekv_command("dump", "--json", *map(str, paths))
    assert done.returncode == 0, done.stderr
    processes: list[dict[str, Any]] = json.loads(done.stdout)["processes"]
    return processes


@contextmanager
def hung(directory: Path, where: str) -> Iterator[subprocess.Popen[str]]:
    """A process that hangs in ``where``."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.agent.hanging", where],
        cwd=live.ROOT,
        env={**os.environ, "TRACEKV_JOURNAL_DIR": str(directory), "TRACEKV_AGENT": "off"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == where
        yield process
    finally:
        process.kill()
        process.communicate()


def killed(directory: Path, where: str) -> dict[str, Any]:
    with hung(directory, where) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
    (told,) = dumped(directory)
    assert told["is_alive"] is False
    assert told["pid"] == process.pid
    return told


def source_line(method: str) -> int:
    code = getattr(hanging.Worker, method).__code__
    line: int = code.co_firstlineno
    return line


def test_a_kill_inside_a_layer_hook_shows_layer_function_and_line(tmp_path: Path) -> None:
    told = killed(tmp_path, "layer 2")
    (inside,) = told["callbacks"]

    assert inside.pop("age_s") > 0
    assert inside == {
        "callback": "worker.wait_for_layer_load",
        "layer": 2,
        "layer_group": 1,
        "function": "__main__.Worker.wait_for_layer_load",
        "file": hanging.__file__,
        "line": source_line("wait_for_layer_load"),
    }


def test_a_kill_inside_a_load_shows_what_was_still_to_be_moved(tmp_path: Path) -> None:
    told = killed(tmp_path, "start_load_kv")
    (inside,) = told["callbacks"]
    loads = [move for move in told["moves"] if move["direction"] == "load"]

    assert (inside["callback"], inside["layer"]) == ("worker.start_load_kv", None)
    assert inside["line"] == source_line("start_load_kv")
    # Two pages were honoured, and one was reported as loaded before the hang.
    (load,) = loads
    assert load.pop("age_s") > 0
    assert load == {
        "request": "7", "direction": "load", "layer_group": 0, "pages": 1, "bytes": 1024, "step": 1, "source": "eligible",
    }  # fmt: skip


def test_a_path_with_brackets_is_shown_as_it_is(tmp_path: Path) -> None:
    ring = RingJournal.create(tmp_path / "live.tkvring", 1 << 20)
    source = CallbackSource("wait_for_save", "/srv/[v2]/[/bold]conn.py", 12)
    ring.write(ConnectorWrapped(Side.WORKER, "pkg.Worker", [source], []))
    ring.in_progress[0] = int(Callback.WAIT_FOR_SAVE)
    ring.in_progress[1] = time.perf_counter_ns()
    done = tracekv_command("dump", str(tmp_path))
    ring.close()
    assert done.returncode == 0, done.stderr
    assert "pkg.Worker.wait_for_save  /srv/[v2]/[/bold]conn.py:12" in done.stdout


def test_open_requests_say_what_they_wait_for(tmp_path: Path) -> None:
    told = killed(tmp_path, "layer 2")
    waits = {request["request"]: request["waits_for"] for request in told["requests"]}
    running = told["requests"][0]

    assert waits == {"7": "pass in progress", "8": "pages"}
    assert (running["prompt_tokens"], running["offered_tokens"], running["honoured_tokens"]) == (128, 64, 64)
    assert (running["pages"], running["step"]) == ([4], 1)


def test_between_two_passes_nothing_is_in_flight(tmp_path: Path) -> None:
    told = killed(tmp_path, "between")

    assert told["callbacks"] == told["moves"] == []
    assert [request["waits_for"] for request in told["requests"]] == ["next pass", "pages"]


def test_a_live_process_is_shown_the_same_way_as_a_table(tmp_path: Path) -> None:
    with hung(tmp_path, "layer 2"):
        done = tracekv_command("dump", TRACEKV_JOURNAL_DIR=str(tmp_path))
        (told,) = dumped(tmp_path)

    assert told["is_alive"] is True
    assert done.returncode == 0, done.stderr
    for text in ("runs", "worker.wait_for_layer_load layer 2 (group 1)", "hanging.py:", "pass in progress", "load"):
        assert text in done.stdout


def test_an_archive_keeps_what_was_in_flight(tmp_path: Path) -> None:
    archive = tmp_path / "a.tkvarch"
    with hung(tmp_path, "layer 2"):
        assert tracekv_command("record", str(tmp_path), "-o", str(archive)).returncode == 0
    (told,) = dumped(archive)

    assert told["callbacks"][0]["layer"] == 2
    assert [request["request"] for request in told["requests"]] == ["7", "8"]


def test_an_archive_in_a_directory_is_read_and_recorded_with_the_ring_that_goes_on(tmp_path: Path) -> None:
    directory = tmp_path / "journals"
    directory.mkdir()
    journal = RingJournal.create(directory / "x.tkvring", 1 << 20)
    for record in [*bring_up()[1:], *live.request(1)]:
        journal.write(record)
    assert tracekv_command("record", str(directory), "-o", str(directory / "a.tkvarch")).returncode == 0
    for record in live.request(2):
        journal.write(record)
    journal.close()
    (told,) = dumped(directory)
    done = tracekv_command("record", str(directory), "-o", str(tmp_path / "all.tkvarch"))
    journal.path.unlink()
    (archived,) = dumped(directory)
    (all_of_it,) = dumped(tmp_path / "all.tkvarch")

    assert "of 1 process" in done.stderr
    assert told["records"] == all_of_it["records"] > archived["records"] > 0
    assert archived["records_lost"] == all_of_it["records_lost"] == 0


def test_an_archive_that_is_cut_off_is_read_as_far_as_it_goes_and_says_so(tmp_path: Path) -> None:
    journal = RingJournal.create(tmp_path / "x.tkvring", 1 << 20)
    for record in [*bring_up()[1:], *live.request(1)]:
        journal.write(record)
    archive = tmp_path / "a.tkvarch"
    assert tracekv_command("record", str(journal.path), "-o", str(archive)).returncode == 0
    archive.write_bytes(archive.read_bytes()[:-40])
    done = tracekv_command("dump", str(archive))

    assert done.returncode == 0
    assert "cut short" in done.stderr


def test_request_ids_are_hashed_where_the_settings_say_so(tmp_path: Path) -> None:
    with hung(tmp_path, "layer 2"):
        done = tracekv_command("dump", "--json", str(tmp_path), TRACEKV_HASH_REQUEST_IDS="1")
    (told,) = json.loads(done.stdout)["processes"]

    assert all(len(request["request"]) == 16 for request in told["requests"])


def test_another_rank_is_shown_with_what_its_leader_planned(tmp_path: Path) -> None:
    from tests.views.sample_run import RUN, allocated, bound, built, joined, queried, registered, transferred, wrapped
    from tracekv.journal.vocabulary import Direction, Side

    leader, worker = (RingJournal.create(tmp_path / f"{name}.tkvring", 1 << 20) for name in "ab")
    for record in (wrapped(Side.SCHEDULER), registered(), joined(0, 2, RUN), queried(computed_tokens=0, offered_tokens=96),
                   allocated(honoured=96), built()):  # fmt: skip
        leader.write(record)
    for record in (wrapped(Side.WORKER), registered(), joined(1, 2, RUN), bound(),
                   transferred(Direction.LOAD, 0, [3, 4], 200, 1500, 1540)):  # fmt: skip
        worker.write(record)
    told = {process["rank"]: process for process in dumped(tmp_path)}
    loads = {
        rank: {m["layer_group"]: (m["pages"], m["bytes"]) for m in process["moves"] if m["direction"] == "load"}
        for rank, process in told.items()
    }

    assert loads == {0: {0: (3, 300), 1: (2, 80)}, 1: {0: (1, 100), 1: (2, 80)}}
    assert told[1]["requests"] == []


@pytest.mark.parametrize("command", ["dump", "record"])
def test_an_empty_directory_is_said_with_what_to_do(command: str, tmp_path: Path) -> None:
    arguments = ["-o", str(tmp_path / "out")] if command == "record" else []
    done = tracekv_command(command, str(tmp_path), *arguments)

    assert done.returncode == 1
    assert "no journal" in done.stderr
    assert "TRACEKV_JOURNAL_DIR" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_foreign_file_and_a_newer_journal_are_refused_with_the_reason(tmp_path: Path) -> None:
    foreign, newer = tmp_path / "foreign", tmp_path / "newer.tkvring"
    foreign.write_bytes(b"hello" * 20000)
    journal = RingJournal.create(newer, 1 << 20)
    journal.close()
    with newer.open("r+b") as file:
        file.seek(8)
        file.write((9).to_bytes(4, "little"))

    for path, reason in ((foreign, "is no journal"), (newer, "format 9")):
        done = tracekv_command("dump", str(path))
        assert done.returncode == 1
        assert reason in done.stderr
        assert "Traceback" not in done.stderr


def test_a_bad_file_in_a_directory_does_not_hide_the_others(tmp_path: Path) -> None:
    (tmp_path / "0-bad.tkvring").write_bytes(b"x" * (1 << 17))
    RingJournal.create(tmp_path / "1-good.tkvring", 1 << 20).close()
    done = tracekv_command("dump", str(tmp_path))

    assert done.returncode == 0
    assert "0-bad.tkvring" in done.stderr
    assert "is gone" in done.stdout


def test_recording_follows_until_the_engines_have_ended(tmp_path: Path) -> None:
    archive = tmp_path / "a.tkvarch"
    first = RingJournal.create(tmp_path / "1-aa.tkvring", 1 << 16)
    recording = subprocess.Popen(
        [sys.executable, "-m", "tracekv.cli", "record", str(tmp_path), "-o", str(archive), "--follow"],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        live.until(archive.exists, "the archive is made")
        second = RingJournal.create(tmp_path / "2-bb.tkvring", 1 << 16)
        for number in range(200):
            size = archive.stat().st_size  # before it is written: the other process may be quick
            for journal in (first, second):
                for record in live.request(number):
                    journal.write(record)
            if number % 20 == 19:  # more than the rings hold altogether, never more than they hold at once
                live.until(lambda size=size: archive.stat().st_size > size, "the archive grows")
        first.close()
        second.close()
        _, said = recording.communicate(timeout=30)
    finally:
        recording.kill()
    readers = open_journals(archive)

    assert recording.returncode == 0, said
    assert len(readers) == 2
    with RingReader(first.path) as ring:
        held = len(ring.read(0, 1 << 20)[0])
    assert all(len(reader.read(0, 1 << 20)[0]) > held for reader in readers)


def test_an_archive_is_never_overwritten(tmp_path: Path) -> None:
    RingJournal.create(tmp_path / "1-aa.tkvring", 1 << 16).close()
    (tmp_path / "out").write_text("mine")
    done = tracekv_command("record", str(tmp_path), "-o", str(tmp_path / "out"))

    assert done.returncode == 1
    assert (tmp_path / "out").read_text() == "mine"


@pytest.mark.parametrize(
    ("assignment", "status", "said"),
    [("detail=loud", 2, "detail=economy"), ("colour=red", 2, "detail=economy"), ("detail=full", 1, "running engine")],
)
def test_what_can_not_be_set_is_said(assignment: str, status: int, said: str, tmp_path: Path) -> None:
    RingJournal.create(tmp_path / "1-aa.tkvring", 1 << 16).close()
    done = tracekv_command("set", assignment, str(tmp_path))

    assert done.returncode == status
    assert said in done.stderr
