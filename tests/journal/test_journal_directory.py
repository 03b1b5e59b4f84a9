"""Where journals lie, what happens when there is no room, and what becomes of dead ones."""

from __future__ import annotations

import errno
import logging
import os
import stat
import subprocess
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from ring_support import SMALL, drop

from tracekv.journal import directory as directory_module
from tracekv.journal import process
from tracekv.journal.directory import default_directory, journal_files, remove_dead, start_journal
from tracekv.journal.opening import open_journals
from tracekv.journal.process import describe_self
from tracekv.journal.reader import RingReader
from tracekv.journal.ring import RingJournal


@pytest.fixture(autouse=True)
def nothing_said_yet(monkeypatch):
    monkeypatch.setattr(directory_module, "_said", set())


@pytest.fixture
def roots(tmp_path, monkeypatch):
    """A tmpfs and a temporary directory of this test's own."""
    shared, temporary = tmp_path / "shm", tmp_path / "tmp"
    shared.mkdir()
    temporary.mkdir()
    monkeypatch.setattr(directory_module, "_TMPFS", shared)
    monkeypatch.setattr(directory_module.tempfile, "gettempdir", lambda: str(temporary))
    return shared, temporary


def full_above(monkeypatch, most: int) -> None:
    """posix_fallocate as on a filesystem with room for ``most`` bytes."""
    real = os.posix_fallocate

    def fallocate(descriptor, offset, length):
        if length > most:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)


def test_a_journal_has_16_mib_and_a_name_with_pid_and_process_id(tmp_path):
    journal = start_journal(tmp_path)
    assert journal.path.stat().st_size == 16 << 20
    assert journal.path.name == f"{os.getpid()}-{journal.facts.process_id.hex()}.tkvring"


def test_the_default_directory_is_in_the_tmpfs_and_ours_alone(roots):
    shared, _ = roots
    path = default_directory()
    assert path == shared / f"tracekv-{os.getuid()}"
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert default_directory() == path


def test_without_a_tmpfs_the_temporary_directory_is_used(roots):
    shared, temporary = roots
    shared.rmdir()
    assert default_directory() == temporary / f"tracekv-{os.getuid()}"


def make_link(path: Path) -> None:
    (path.parent / "elsewhere").mkdir()
    path.symlink_to(path.parent / "elsewhere")


@pytest.mark.parametrize(
    "make", [make_link, Path.touch, lambda path: (path.mkdir(), path.chmod(0o777))], ids=["link", "file", "open to all"]
)
def test_a_directory_that_is_not_ours_alone_is_not_used(roots, make):
    shared, temporary = roots
    make(shared / f"tracekv-{os.getuid()}")
    assert default_directory() == temporary / f"tracekv-{os.getuid()}"


def test_a_directory_of_another_user_is_not_used(roots, monkeypatch):
    shared, temporary = roots
    default_directory()
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    (shared / f"tracekv-{uid + 1}").mkdir(mode=0o700)
    assert default_directory() == temporary / f"tracekv-{uid + 1}"


def test_where_there_is_little_room_the_ring_shrinks(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "tracekv")
    full_above(monkeypatch, 5 << 20)
    journal = start_journal(tmp_path)
    assert journal.path.stat().st_size == 4 << 20
    assert "the journal has 4096 KiB" in caplog.text
    journal.write(drop(1))
    assert RingReader(journal.path).read(0)[0][1:] == [drop(1)]


def test_where_there_is_no_room_that_is_said_once_and_no_file_is_left(tmp_path, monkeypatch, caplog):
    full_above(monkeypatch, (1 << 20) - 1)
    assert start_journal(tmp_path) is None
    assert start_journal(tmp_path) is None
    assert list(tmp_path.iterdir()) == []
    [said] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "no journal is written" in said
    assert "TRACEKV_JOURNAL_DIR" in said


def free_room(monkeypatch, free: int) -> None:
    """statvfs as on a filesystem with so many bytes left."""
    real = os.statvfs

    def little(path):
        found = real(path)
        return os.statvfs_result((4096, 4096, free // 4096, free // 4096, free // 4096, *found[5:]))

    monkeypatch.setattr(os, "statvfs", little)


def test_half_of_the_room_is_left_to_the_engine(tmp_path, monkeypatch):
    free_room(monkeypatch, 5 << 20)
    assert start_journal(tmp_path).path.stat().st_size == 2 << 20


@contextmanager
def small_filesystem(path: Path, megabytes: int):
    """A tmpfs of that size where this user may mount one, else the same by word of the calls that ask for room."""
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", path], capture_output=True
    ).returncode:
        with pytest.MonkeyPatch.context() as patch:
            full_above(patch, megabytes << 20)
            free_room(patch, megabytes << 20)
            yield
        return
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


@pytest.mark.parametrize(("megabytes", "wanted"), [(6, 2 << 20), (1, None)])
def test_a_tmpfs_that_is_too_small_is_respected(tmp_path, megabytes, wanted):
    with small_filesystem(tmp_path, megabytes):
        journal = start_journal(tmp_path)
        assert (journal and journal.path.stat().st_size) == wanted
        if journal is not None:
            journal.claim_engine_thread()
            for number in range(50_000):  # goes over every page of the engine's ring
                journal.write(drop(number))


def test_a_directory_that_cannot_be_made_is_said_once(tmp_path, caplog):
    (tmp_path / "file").touch()
    assert start_journal(tmp_path / "file" / "journals") is None
    assert "no journal is written" in caplog.text


def test_where_there_is_no_default_directory_that_is_said(roots, caplog):
    for root in roots:
        (root / f"tracekv-{os.getuid()}").touch()
    assert start_journal() is None
    (said,) = [line.getMessage() for line in caplog.records]
    assert "None" not in said
    assert "the default directory: " in said
    assert "has to be a directory of this user's with mode 0700" in said


def dead_journal(where: Path, born: int, **facts: object) -> Path:
    """The file of a process that is gone: its pid is another's by now."""
    described = msgspec.structs.replace(describe_self(), start_ticks=1, wall_ns=born, **facts)
    path = where / f"{born}.tkvring"
    RingJournal.create(path, SMALL, described)
    return path


def test_dead_journals_beyond_a_number_are_removed_oldest_first(tmp_path):
    files = [dead_journal(tmp_path, born) for born in (30, 10, 20, 40)]
    journal = start_journal(tmp_path, file_bytes=1 << 20, keep_dead=2)
    assert journal_files(tmp_path) == sorted([files[0], files[3], journal.path])


def test_live_journals_are_never_removed(tmp_path, journal):
    files = journal_files(tmp_path)
    assert files == [journal.path]
    assert remove_dead(tmp_path, 0) == []
    assert journal_files(tmp_path) == files


def test_a_closed_journal_counts_as_dead(tmp_path, journal):
    journal.close()
    assert remove_dead(tmp_path, 0) == [journal.path]


@pytest.mark.parametrize("field", ["boot_id", "pid_namespace"])
def test_where_pids_do_not_compare_the_lock_tells_of_life(tmp_path, monkeypatch, field):
    elsewhere = {"boot_id": "00000000-0000-4000-8000-000000000001", "pid_namespace": 1}
    facts = msgspec.structs.replace(describe_self(), **{field: elsewhere[field]})
    journal = RingJournal.create(tmp_path / "test.tkvring", SMALL, facts)
    reader = RingReader(journal.path)
    assert process.is_running(facts) is None
    assert reader.is_alive()
    copy = tmp_path / "copy.tkvring"
    copy.write_bytes(journal.path.read_bytes())
    assert not RingReader(copy).is_alive()


def test_a_pid_that_is_another_processs_by_now_is_not_alive(tmp_path):
    assert not RingReader(dead_journal(tmp_path, 10)).is_alive()


def test_a_file_in_the_making_is_left_alone_and_an_old_one_is_not(tmp_path):
    making, left = tmp_path / "making.tkvring", tmp_path / "left.tkvring"
    making.touch()
    left.touch()
    os.utime(left, (1, 1))
    assert remove_dead(tmp_path, 0) == [left]
    assert making.exists()


def test_other_files_are_left_alone(tmp_path):
    (tmp_path / "notes.txt").touch()
    os.utime(tmp_path / "notes.txt", (1, 1))
    assert remove_dead(tmp_path, 0) == []


def test_a_directory_opens_as_all_its_journals(tmp_path, journal):
    dead_journal(tmp_path, 10)
    (tmp_path / "making.tkvring").touch()
    readers = open_journals(tmp_path)
    assert sorted(reader.is_alive() for reader in readers) == [False, True]
