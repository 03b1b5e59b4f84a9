"""The file in shared memory that every rank of a node maps: made, reserved and held by the leader, removed with it.

Whoever holds the lock (flock) on such a file is the leader that made it, so a file that can be locked is a dead leader's. The lock
is on a descriptor of its own, which a forked child closes: a child that outlives the leader would hold it otherwise.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import secrets
import struct
import tempfile
import weakref
from pathlib import Path
from typing import NamedTuple

from tracekv.journal import forked

PREFIX = "tracekv-arena-"
#: Of the room that is left in the directory this share stays free: the engine needs shared memory itself.
_LEFT_FREE = 8
_TMPFS = "/dev/shm"  # noqa: S108  # the system's tmpfs; a file in it is made with O_EXCL and mode 0600
_HEADER = struct.Struct("<8s16s")
_MAGIC = b"TKVARENA"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG)

_log = logging.getLogger("tracekv.fsspec")
_said: set[str] = set()


class ArenaTooSmall(ValueError):
    """Not even one block fits, or the directory has no room for one."""


class ArenaUnreachable(RuntimeError):
    """The leader's arena can't be mapped by this rank."""


class _Removed(Exception):
    """Another engine took a file that was just being made for a dead leader's."""


class Whereabouts(NamedTuple):
    """What a rank needs to map the leader's file; plain, so that it can be gathered.

    Attributes:
        nonce: Random, at the file's beginning: a file of the same name in another mount namespace has another one.
        capacity: Bytes for slots; the file is larger by its tables.
    """

    path: str
    nonce: bytes
    capacity: int
    file_bytes: int


class ArenaFile:
    """A mapped arena file, the leader's own or another rank's view of it.

    In a forked child the map is replaced by private, empty memory: what the child reads or writes there reaches nobody.

    Attributes:
        buffer: The whole file. Valid for as long as anybody holds it, whatever becomes of the file's name.
    """

    def __init__(self, whereabouts: Whereabouts, descriptor: int, lock: int | None) -> None:
        self.whereabouts = whereabouts
        self._map = mmap.mmap(descriptor, whereabouts.file_bytes)
        self.buffer = memoryview(self._map)
        self._lock = lock
        forked.watch(self)
        # Also runs at exit, so an engine that nobody shuts down leaves nothing behind.
        self._remove = (
            weakref.finalize(self, _remove, whereabouts.path, lock, os.getpid()) if lock is not None else None
        )

    def close(self) -> None:
        """Remove the file's name, where this is the leader. The memory goes with the last rank that has it mapped."""
        if self._remove is not None:
            self._remove()

    def abandon_in_child(self) -> None:
        """See :mod:`tracekv.journal.forked`."""
        forked.detach(self._map)
        if self._lock is not None and self._remove is not None and self._remove.detach():
            os.close(self._lock)


def create(directory: Path | None, capacity: int, tables_bytes: int, least: int) -> ArenaFile:
    """Make the node's arena, after removing those of dead leaders. Where there is no room, half of it is tried, and so on.

    Args:
        directory: None for :func:`default_directory`.
        capacity: Bytes wanted for slots.
        tables_bytes: Bytes of the file that are not for slots.
        least: Bytes for slots below which it is of no use.

    Raises:
        ArenaTooSmall: There is not even room for ``least``.
        OSError: The directory can't be written to.
    """
    if directory is None:
        directory = default_directory()
    else:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    remove_dead(directory)
    wanted = capacity
    while True:
        try:
            made = _create(directory, wanted, tables_bytes + wanted)
        except _Removed:
            continue
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            if wanted // 2 < least:
                raise ArenaTooSmall(
                    f"tracekv: {directory} has no room for an arena: not even {wanted} of the "
                    f"TRACEKV_FSSPEC__ARENA_BYTES={capacity} could be reserved ({error.strerror}), and a block needs {least}. "
                    "Make room there, or name another directory with TRACEKV_FSSPEC__ARENA_DIR."
                ) from error
            wanted //= 2
            continue
        if wanted < capacity and str(directory) not in _said:
            _said.add(str(directory))
            _log.warning(
                "tracekv: little room in %s: the arena has %d MiB in place of TRACEKV_FSSPEC__ARENA_BYTES=%d",
                directory,
                wanted >> 20,
                capacity,
            )
        return made


def _create(directory: Path, capacity: int, file_bytes: int) -> ArenaFile:
    room = os.statvfs(directory)
    free = room.f_bavail * room.f_frsize
    if file_bytes > free - free // _LEFT_FREE:
        raise OSError(errno.ENOSPC, f"{free >> 10} KiB are left")
    nonce = secrets.token_bytes(16)
    path = directory / f"{PREFIX}{os.getpid()}-{nonce[:6].hex()}"
    lock = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    descriptor = None
    try:
        # Who starts at the same time may hold it for a moment, to see whether we are dead, and find that we are.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.fstat(lock).st_nlink:
            raise _Removed
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        # A hole in a sparse file on a full tmpfs would be a SIGBUS in the engine.
        os.posix_fallocate(descriptor, 0, file_bytes)
        os.pwrite(descriptor, _HEADER.pack(_MAGIC, nonce), 0)
        return ArenaFile(Whereabouts(str(path), nonce, capacity, file_bytes), descriptor, lock)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        os.close(lock)
        raise
    finally:
        if descriptor is not None:
            os.close(descriptor)


def attach(whereabouts: Whereabouts) -> ArenaFile:
    """Map the leader's file.

    Raises:
        ArenaUnreachable: It isn't there, or it is another.
    """
    try:
        descriptor = os.open(whereabouts.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise ArenaUnreachable(_unreachable(whereabouts, error.strerror or type(error).__name__)) from error
    try:
        found = os.pread(descriptor, _HEADER.size, 0)
        if found != _HEADER.pack(_MAGIC, whereabouts.nonce):
            raise ArenaUnreachable(_unreachable(whereabouts, "it is another file of the same name"))
        return ArenaFile(whereabouts, descriptor, None)
    finally:
        os.close(descriptor)


def _unreachable(whereabouts: Whereabouts, why: str) -> str:
    return (
        f"tracekv: this rank can't map the leader's arena {whereabouts.path} ({why}). All ranks of a node need the same directory: "
        "share /dev/shm between their containers, or name a directory that they share with TRACEKV_FSSPEC__ARENA_DIR."
    )


def default_directory() -> Path:
    """``/dev/shm`` where that is a tmpfs, else the temporary directory."""
    try:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        mounts = []
    is_tmpfs = any(line.split()[1:3] == [_TMPFS, "tmpfs"] for line in mounts)
    return Path(_TMPFS if is_tmpfs and os.access(_TMPFS, os.W_OK) else tempfile.gettempdir())


def remove_dead(directory: Path) -> list[Path]:
    """Remove this user's arenas whose leaders are gone; a live one's never. Returns the removed."""
    removed: list[Path] = []
    for path in sorted(directory.glob(f"{PREFIX}*")):
        try:
            if path.lstat().st_uid != os.getuid():
                continue
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # removed meanwhile, or not ours
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            removed.append(path)
        except OSError:  # its leader lives, or another engine was faster
            continue
        finally:
            os.close(descriptor)
    if removed:
        _log.info("tracekv: removed %d arenas that dead engines had left in %s", len(removed), directory)
    return removed


def _remove(path: str, lock: int, pid: int) -> None:
    if os.getpid() != pid:  # a child that was forked past the interpreter
        return
    with contextlib.suppress(OSError):
        Path(path).unlink()
    os.close(lock)
