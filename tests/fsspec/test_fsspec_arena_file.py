"""The arena's file: whose it is, what becomes of it, and where it finds room."""

from __future__ import annotations

import errno
import logging
import os
import signal
import stat
import subprocess
import sys
import threading

import pytest

from tracekv_fsspec import arena_file
from tracekv_fsspec.arena_file import ArenaTooSmall, ArenaUnreachable, attach, create, default_directory, remove_dead

ROOM = 1 << 20
TABLES = 8192

LEADER = """
import sys
from pathlib import Path
from tracekv_fsspec.arena_file import create
file = create(Path(sys.argv[1]), 1 << 20, 8192, 4096)
print(file.whereabouts.path, flush=True)
sys.stdin.read()
"""

FORKS = """
import os
runs, says = os.pipe()
if os.fork():
    os.read(runs, 1)
    os._exit(0)
os.write(says, b"x")
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _unsaid(monkeypatch):
    monkeypatch.setattr(arena_file, "_said", set())


@pytest.fixture
def leader(tmp_path):
    """A process with an arena below the test's folder; ``leader()`` starts one, and gives it and the file's path."""
    started = []

    def start():
        process = subprocess.Popen(
            [sys.executable, "-c", LEADER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        return process, process.stdout.readline().strip()

    yield start
    for process in started:
        process.kill()
        process.communicate()


def make(directory, capacity=ROOM, least=4096):
    return create(directory, capacity, TABLES, least)


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_the_file_is_the_users_alone_reserved_and_removed_at_close(tmp_path):
    file = make(tmp_path)
    (path,) = tmp_path.glob("tracekv-arena-*")
    found = path.stat()
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert found.st_blocks * 512 >= found.st_size == ROOM + TABLES
    file.close()
    file.close()
    assert names(tmp_path) == []
    file.buffer[-1] = 1  # who still holds it may still use it


def test_an_arena_that_nobody_closes_goes_with_its_owner(tmp_path):
    file = make(tmp_path)
    assert len(names(tmp_path)) == 1
    del file
    assert names(tmp_path) == []


def test_a_process_that_just_ends_leaves_nothing(tmp_path, leader):
    process, path = leader()
    assert os.path.exists(path)  # noqa: PTH110
    process.communicate()
    assert names(tmp_path) == []


def test_what_a_killed_leader_left_is_removed_by_the_next(tmp_path, leader):
    process, _ = leader()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(names(tmp_path)) == 1
    file = make(tmp_path)
    assert names(tmp_path) == [os.path.basename(file.whereabouts.path)]  # noqa: PTH119


def test_a_live_leaders_arena_is_left_alone(tmp_path, leader):
    _, path = leader()
    mine = make(tmp_path)
    assert remove_dead(tmp_path) == []
    assert {path, mine.whereabouts.path} == {str(each) for each in tmp_path.iterdir()}


def test_engines_that_start_together_each_get_their_own(tmp_path):
    made, start = [], threading.Barrier(8)

    def begin():
        start.wait()
        made.extend(make(tmp_path, 65_536) for _ in range(20))

    threads = [threading.Thread(target=begin) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 160
    assert sorted(os.path.basename(file.whereabouts.path) for file in made) == names(tmp_path)  # noqa: PTH119


def test_a_file_that_another_engine_takes_for_a_dead_ones_is_made_anew(tmp_path, monkeypatch):
    lock, taken = arena_file.fcntl.flock, []

    def take_first(descriptor, operation):
        if not taken:
            taken.extend(tmp_path.iterdir())
            taken[0].unlink()
        lock(descriptor, operation)

    monkeypatch.setattr(arena_file.fcntl, "flock", take_first)
    file = make(tmp_path)
    assert names(tmp_path) == [os.path.basename(file.whereabouts.path)] != [taken[0].name]  # noqa: PTH119


def test_the_memory_of_a_killed_leader_stays_with_those_who_map_it(tmp_path, leader):
    process, path = leader()
    descriptor = os.open(path, os.O_RDONLY)
    nonce = os.pread(descriptor, 24, 0)[8:]
    os.close(descriptor)
    mapped = attach(arena_file.Whereabouts(path, nonce, ROOM, ROOM + TABLES))
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(remove_dead(tmp_path)) == 1
    mapped.buffer[-4:] = b"here"
    assert bytes(mapped.buffer[-4:]) == b"here"


def test_a_forked_child_neither_removes_nor_reaches_it(tmp_path):
    file = make(tmp_path)
    file.buffer[-4:] = b"mine"
    kept = file.buffer[-4:]
    child = os.fork()
    if not child:
        status = 1
        try:
            was_empty = bytes(kept) == bytes(4)
            kept[:] = b"lost"
            file.close()
            del file
            status = 0 if was_empty else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert bytes(kept) == b"mine"
    assert len(names(tmp_path)) == 1


def test_a_child_that_outlives_its_leader_doesnt_keep_the_arena(tmp_path):
    """The lock would stay with a descriptor that the child inherits."""
    script = LEADER.replace("sys.stdin.read()", FORKS)
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    process.stdout.readline()
    process.wait()
    assert len(remove_dead(tmp_path)) == 1
    process.stdin.close()  # ends the child
    process.stdout.close()


def test_a_link_of_the_files_name_is_not_followed(tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    victim.write_bytes(b"untouched")
    folder = tmp_path / "arenas"
    folder.mkdir()
    monkeypatch.setattr(arena_file.secrets, "token_bytes", lambda size: bytes(size))
    (folder / f"tracekv-arena-{os.getpid()}-{bytes(6).hex()}").symlink_to(victim)
    with pytest.raises(FileExistsError):
        make(folder)
    assert victim.read_bytes() == b"untouched"


def test_a_file_of_the_same_name_that_is_another_is_refused(tmp_path):
    there = make(tmp_path).whereabouts
    with pytest.raises(ArenaUnreachable, match="TRACEKV_FSSPEC__ARENA_DIR"):
        attach(there._replace(nonce=bytes(16)))
    with pytest.raises(ArenaUnreachable, match="No such file"):
        attach(there._replace(path=str(tmp_path / "elsewhere")))


@pytest.fixture
def only(monkeypatch):
    """``only(size)``: reserving more than so many bytes fails, as on a full file system."""

    def limit(room, code=errno.ENOSPC):
        def fallocate(descriptor, offset, size):
            if size > room:
                raise OSError(code, os.strerror(code))
            os.ftruncate(descriptor, size)

        monkeypatch.setattr(arena_file.os, "posix_fallocate", fallocate)

    return limit


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_where_there_is_little_room_half_is_taken_and_said_once(tmp_path, only, caplog, code):
    only(ROOM // 3, code)
    with caplog.at_level(logging.WARNING, "tracekv.fsspec"):
        first, second = make(tmp_path), make(tmp_path)
    assert first.whereabouts.capacity == second.whereabouts.capacity == ROOM // 4
    assert len(names(tmp_path)) == 2
    (said,) = caplog.messages
    assert f"TRACEKV_FSSPEC__ARENA_BYTES={ROOM}" in said


def test_where_there_is_no_room_the_settings_and_the_directory_are_named(tmp_path, only):
    only(4096)
    with pytest.raises(ArenaTooSmall, match="ARENA_BYTES") as caught:
        make(tmp_path, least=65_536)
    assert str(tmp_path) in str(caught.value)
    assert "TRACEKV_FSSPEC__ARENA_DIR" in str(caught.value)
    assert names(tmp_path) == []


def test_a_share_of_the_room_is_left_to_the_engine(tmp_path, monkeypatch):
    class Nearly:
        f_bavail, f_frsize = ROOM, 1

    monkeypatch.setattr(arena_file.os, "statvfs", lambda path: Nearly)
    assert make(tmp_path).whereabouts.capacity == ROOM // 2


def test_a_directory_that_cant_be_written_to_is_no_lack_of_room(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match="file") as caught:
        make(tmp_path / "file")
    assert not isinstance(caught.value, ArenaTooSmall)


@pytest.mark.parametrize(("kind", "expected"), [("tmpfs", "/dev/shm"), ("overlay", "/var/tmp")])
def test_the_default_is_shared_memory_where_that_is_memory(monkeypatch, kind, expected):
    monkeypatch.setattr(arena_file.Path, "read_text", lambda path: f"none / ext4 rw 0 0\nshm /dev/shm {kind} rw 0 0\n")
    monkeypatch.setattr(arena_file.os, "access", lambda path, mode: True)
    monkeypatch.setattr(arena_file.tempfile, "gettempdir", lambda: "/var/tmp")
    assert str(default_directory()) == expected
