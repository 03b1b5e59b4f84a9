"""A journal across processes: killed writers, forked children, readers elsewhere."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

from ring_support import SMALL, drop

from tracekv.journal.directory import journal_files, start_journal
from tracekv.journal.opening import open_journals
from tracekv.journal.process import start_ticks
from tracekv.journal.reader import OpenHook, RingReader
from tracekv.journal.records import AllocCall, Drop, ProcessStarted
from tracekv.journal.ring import RingJournal
from tracekv.journal.vocabulary import Callback

ROUNDS = 80


@contextmanager
def forked(run: Callable[[], None]):
    """A child that runs ``run`` and ends; killed when the block is left."""
    pid = os.fork()
    if pid == 0:
        try:
            run()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def told(descriptor: int) -> bytes:
    """Waits for a child's word on a pipe."""
    return os.read(descriptor, 64)


def numbered(number: int) -> AllocCall | Drop:
    """A record that is known by its number alone."""
    if number % 3:
        return drop(number, blocks=number * 7)
    pages = [number * 31 + page for page in range(number * 13 % 701)]
    return AllocCall(3, number, number + 1, number, None, number, None, [pages])


def number_of(record: AllocCall | Drop) -> int:
    return record.at_ns if isinstance(record, Drop) else record.started_ns


def write_for_ever(path: Path, ready: int) -> None:
    journal = RingJournal.create(path, 1 << 17)
    os.write(ready, b"1")

    def others() -> None:
        number = 1_000_000_000
        while True:
            journal.write(numbered(number))
            number += 1

    threading.Thread(target=others, daemon=True).start()
    journal.claim_engine_thread()
    number = 0
    while True:
        journal.write(numbered(number))
        number += 1


def check(records: list, latest: dict[bool, int]) -> None:
    """Each record is just as it was written, and of each thread none comes twice or out of turn."""
    for record in records:
        if isinstance(record, ProcessStarted):
            continue
        number = number_of(record)
        assert record == numbered(number)
        assert number > latest[number >= 1_000_000_000]
        latest[number >= 1_000_000_000] = number


def test_a_writer_killed_anywhere_leaves_whole_records_or_counted_gaps(tmp_path):
    chance = random.Random(5)
    total = 0
    for turn in range(ROUNDS):
        path = tmp_path / f"{turn}.tkvring"
        ready, child_end = os.pipe()
        with forked(lambda path=path, end=child_end: write_for_ever(path, end)) as pid:
            told(ready)
            reader = RingReader(path)
            deadline = time.monotonic() + chance.random() * 0.06
            cursor, got, lost, latest = 0, 0, 0, {False: -1, True: -1}
            while time.monotonic() < deadline:
                records, cursor, gone = reader.read(cursor, limit=chance.randrange(1, 400))
                check(records, latest)
                got += len(records)
                lost += gone
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            assert not reader.is_alive()
            while True:
                records, cursor, gone = reader.read(cursor)
                check(records, latest)
                got += len(records)
                lost += gone
                if not records:
                    break
            assert got + lost == cursor
            total += got
            # A reader that comes afterwards finds what the ring holds, the same way.
            with RingReader(path) as late:
                records, end, gone = late.read(0, limit=1 << 20)
                check(records, {False: -1, True: -1})
                assert (end, len(records) + gone) == (cursor, cursor)
            reader.close()
        os.close(ready)
        os.close(child_end)
        path.unlink()
    assert total > ROUNDS


def test_a_reader_keeps_up_with_a_live_writer_without_loss(tmp_path):
    path = tmp_path / "test.tkvring"
    up, up_end = os.pipe()
    go, go_end = os.pipe()

    def write() -> None:
        journal = RingJournal.create(path, 1 << 20)
        journal.claim_engine_thread()
        os.write(up_end, b"1")
        for number in range(20):
            told(go)
            for inner in range(100):
                journal.write(numbered(100 * number + inner))
            os.write(up_end, b"1")

    with forked(write):
        told(up)
        reader = RingReader(path)
        _, cursor, _ = reader.read(0)
        for number in range(20):
            os.write(go_end, b"1")
            told(up)
            records, cursor, lost = reader.read(cursor)
            assert lost == 0
            assert records == [numbered(100 * number + inner) for inner in range(100)]


def test_a_reader_that_is_never_overrun_loses_nothing_while_threads_compete(tmp_path):
    # Each number is taken in one step and stored in another: a thread that loses the GIL between is waited for.
    def write(path: Path) -> None:
        journal = RingJournal.create(path, 4 << 20)
        journal.claim_engine_thread()
        other = threading.Thread(target=lambda: [journal.write(drop(1_000_000_000 + number)) for number in range(2000)])
        other.start()
        for number in range(2000):
            journal.write(drop(number))
        other.join()
        journal.close()

    for turn in range(10):
        path = tmp_path / f"{turn}.tkvring"
        with forked(lambda path=path: write(path)):
            reader = None
            while reader is None:
                reader = next(iter(open_journals(tmp_path, patience_ns=1 << 60)), None)
            cursor, got = 0, []
            while cursor < 4001:
                records, cursor, lost = reader.read(cursor)
                assert lost == 0
                got += records
            assert sorted(record.at_ns for record in got[1:]) == [*range(2000), *range(1_000_000_000, 1_000_002_000)]
            reader.close()
        path.unlink()


def test_a_kill_inside_a_layer_hook_still_shows_the_layer(tmp_path):
    path = tmp_path / "test.tkvring"
    ready, child_end = os.pipe()

    def hang() -> None:
        journal = RingJournal.create(path, SMALL)
        for layer in range(37):
            journal.waits[2 * layer], journal.waits[2 * layer + 1] = 1e-9 * (1000 + layer), 1e-9 * (1001 + layer)
        journal.waits[2 * 37] = 5000e-9
        os.write(child_end, b"1")
        threading.Event().wait()

    with forked(hang) as pid:
        told(ready)
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        reader = RingReader(path)
        assert not reader.is_alive()
        waits = reader.state().waits
        assert [hook.layer for hook in waits if not hook.ended_ns] == [37]
        assert waits[-1] == OpenHook(37, 5000, 0)
        assert waits[36] == OpenHook(36, 1036, 1037)


def test_a_kill_inside_a_callback_still_shows_the_callback(tmp_path):
    path = tmp_path / "test.tkvring"
    ready, child_end = os.pipe()

    def hang() -> None:
        journal = RingJournal.create(path, SMALL)
        journal.in_progress[1], journal.in_progress[0] = 123, Callback.START_LOAD_KV
        os.write(child_end, b"1")
        threading.Event().wait()

    with forked(hang) as pid:
        told(ready)
        assert RingReader(path).is_alive()
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        state = RingReader(path).state()
        assert (state.callback, state.since_ns) == (Callback.START_LOAD_KV, 123)


def test_a_forked_child_writes_nothing_into_its_parents_file(journal):
    journal.claim_engine_thread()
    journal.write(drop(1))
    journal.waits[0] = 11
    waits, in_progress = journal.waits, journal.in_progress  # as capture holds them
    before = journal.path.read_bytes()
    done, child_end = os.pipe()

    def use() -> None:
        waits[0] = 99
        in_progress[0] = 99
        journal.write(drop(2))
        journal.at_step(1 << 62)
        os.write(child_end, b"1" if waits[0] == 99 and not journal.claim_engine_thread() else b"0")
        journal.close()

    with forked(use):
        assert told(done) == b"1"
    assert journal.path.read_bytes() == before
    assert RingReader(journal.path).is_alive()


def test_a_parent_goes_on_writing_after_a_fork(journal):
    with forked(lambda: None) as pid:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        journal.write(drop(1))
        journal.waits[0] = 7e-9
    reader = RingReader(journal.path)
    assert reader.read(0)[0][1:] == [drop(1)]
    assert reader.state().waits == [OpenHook(0, 7, 0)]


def test_a_forked_child_may_have_a_journal_of_its_own(journal, tmp_path):
    own = tmp_path / "own"
    done, child_end = os.pipe()

    def use() -> None:
        mine = start_journal(own, file_bytes=1 << 20)
        mine.write(drop(5))
        os.write(child_end, b"1")
        threading.Event().wait()

    with forked(use) as pid:
        told(done)
        [path] = journal_files(own)
        reader = RingReader(path)
        assert reader.facts.pid == pid
        assert reader.facts.process_id != journal.facts.process_id
        assert reader.read(0)[0][1:] == [drop(5)]
    assert len(RingReader(journal.path).read(0)[0]) == 1


def test_a_fork_while_another_thread_holds_the_lock_leaves_the_child_free(journal):
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with journal._lock:
            held.set()
            release.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        done, child_end = os.pipe()

        def use() -> None:
            journal.write(drop(1))
            journal.close()
            os.write(child_end, b"1")

        with forked(use):
            assert told(done) == b"1"
    finally:
        release.set()
        thread.join()


def test_a_spawned_process_follows_a_live_journal(journal):
    journal.write(drop(41))
    code = (
        "import sys; from pathlib import Path; from tracekv.journal.opening import open_journal\n"
        "reader = open_journal(Path(sys.argv[1]))\n"
        "print(reader.is_alive(), reader.read(0)[0][1].at_ns)"
    )
    answer = subprocess.run([sys.executable, "-c", code, journal.path], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["True", "41"]


def test_writer_and_reader_import_nothing_heavy():
    code = (
        "import sys, tracekv.journal.directory\n"
        "print([name for name in ('torch', 'opentelemetry', 'pydantic', 'typer', 'rich', 'structlog') if name in sys.modules])"
    )
    environment = {**os.environ, "TRACEKV_DETAIL": "off"}
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert answer.stdout.strip() == "[]"


def test_a_zombie_is_no_running_process():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    try:
        assert start_ticks(pid) is None
    finally:
        os.waitpid(pid, 0)
    assert start_ticks(os.getpid()) > 0
