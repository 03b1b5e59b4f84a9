"""Where journals lie: the directory, a new file in it, and what becomes of the files of processes that are gone."""

from __future__ import annotations

import errno
import logging
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tracekv.journal.layout import JournalFormatError, is_supported
from tracekv.journal.process import describe_self, is_locked
from tracekv.journal.reader import RingReader
from tracekv.journal.ring import RingJournal

DEFAULT_BYTES = 16 << 20
SMALLEST_BYTES = 1 << 20
KEEP_DEAD = 16
SUFFIX = ".tkvring"
#: A file without a whole header is one in the making for this long, then one whose writer died while making it.
_MAKING_S = 60
_TMPFS = Path("/dev/shm")  # noqa: S108  # the system's tmpfs; what is made in it is the user's own, and checked

_log = logging.getLogger("tracekv")
_said: set[str] = set()


class UnsafeDirectory(OSError):
    """A directory under the default name that others can write to, or that isn't ours."""


def start_journal(
    directory: Path | None = None, *, file_bytes: int = DEFAULT_BYTES, keep_dead: int = KEEP_DEAD
) -> RingJournal | None:
    """Make this process's journal, or say once why there is none and return None: an engine must start without it.

    At most half of the room that is left is taken, since an engine needs shared memory itself; where that is too little the
    ring shrinks, to 1 MiB at the least. Of the journals of dead processes the newest ``keep_dead`` stay.

    Args:
        directory: Where; made where it is missing. None for :func:`default_directory`.
        file_bytes: Size of the file, a power of two.
        keep_dead: How many journals of dead processes stay.
    """
    where = "the default directory" if directory is None else str(directory)
    try:
        if not is_supported():
            raise OSError(errno.ENOTSUP, "journals are little-endian, this machine isn't")
        if directory is None:
            directory = default_directory()
        else:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        where = str(directory)
        remove_dead(directory, keep_dead)
        return _create(directory, file_bytes)
    except OSError as error:
        if where not in _said:
            _said.add(where)
            _log.warning(
                "tracekv: no journal is written (%s: %s); the engine goes on untraced. "
                "Make room there, or name another directory with TRACEKV_JOURNAL_DIR",
                where,
                error.strerror or error,
            )
        return None


def _create(directory: Path, file_bytes: int) -> RingJournal:
    facts = describe_self()
    path = directory / f"{facts.pid}-{facts.process_id.hex()}{SUFFIX}"
    wanted = file_bytes
    while True:
        try:
            room = os.statvfs(directory)
            if wanted * 2 > room.f_bavail * room.f_frsize:
                raise OSError(errno.ENOSPC, f"{room.f_bavail * room.f_frsize >> 10} KiB are left")
            journal = RingJournal.create(path, wanted, facts)
        except OSError as error:
            if (
                error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG)
                or wanted // 2 < SMALLEST_BYTES
            ):
                raise
            wanted //= 2
        else:
            if wanted < file_bytes:
                _log.info("tracekv: little room in %s: the journal has %d KiB", directory, wanted >> 10)
            return journal


def default_directory() -> Path:
    """``tracekv-<uid>`` in the system's tmpfs, else in the temporary directory; made with mode 0700.

    Raises:
        OSError: Neither can be had (:class:`UnsafeDirectory`: what is there is not ours alone).
    """
    name = f"tracekv-{os.getuid()}"
    try:
        return _own_directory(_TMPFS / name)
    except OSError:
        return _own_directory(Path(tempfile.gettempdir()) / name)


def _own_directory(path: Path) -> Path:
    # Anyone can make a directory of this name before us, or a link to one of ours.
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise UnsafeDirectory(
                errno.EPERM, f"{path} has to be a directory of this user's with mode 0700", str(path)
            ) from None
    return path


def journal_files(directory: Path) -> list[Path]:
    """The ring files in a directory, whatever state they are in, by name."""
    return sorted(directory.glob(f"*{SUFFIX}"))


def remove_dead(directory: Path, keep: int) -> list[Path]:
    """Remove journals of dead processes but for the ``keep`` that started last; a live one's never. Returns the removed."""
    dead = sorted(((born, path) for path in journal_files(directory) for born in _born_if_dead(path)), reverse=True)
    removed: list[Path] = []
    for _, path in dead[keep:]:
        try:
            path.unlink()
        except FileNotFoundError:  # by another engine that starts now
            continue
        removed.append(path)
    return removed


def _born_if_dead(path: Path) -> Iterator[int]:
    """The wall time (ns) at which a journal was begun, where its process is surely gone; else nothing."""
    try:
        with RingReader(path) as reader:
            if not reader.is_alive():
                yield reader.facts.wall_ns
    except JournalFormatError:
        # Of another version, damaged, or in the making: all that is known is the lock and the age.
        yield from _born_if_unlocked(path)
    except OSError:  # removed meanwhile, or not ours to read: then it isn't ours to remove
        return


def _born_if_unlocked(path: Path) -> Iterator[int]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return
    try:
        changed = os.fstat(descriptor).st_mtime_ns
        if not is_locked(descriptor) and time.time_ns() - changed > _MAKING_S * 1_000_000_000:
            yield changed
    finally:
        os.close(descriptor)
