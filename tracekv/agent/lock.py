"""One agent per directory: whoever holds the lock on its file."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import xxhash

from tracekv.settings import Settings

NAME = "agent.lock"
#: A process that only asks whether there is an agent holds the lock for some microseconds.
_TRIES, _PAUSE_S = 20, 0.01


class Holder(msgspec.Struct, frozen=True):
    """Who holds the lock; ``exports`` is a digest of where it exports to."""

    pid: int
    exports: str


class AgentLock:
    """The lock of a directory. It goes with its process, or with the child that this process forks and leaves it to."""

    def __init__(self, directory: Path) -> None:
        """Open the file; :meth:`acquire` takes the lock.

        Raises:
            OSError: No such directory, or it isn't ours to write.
        """
        self._descriptor = os.open(directory / NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def acquire(self) -> bool:
        """Take the lock; False where another agent has it."""
        for _ in range(_TRIES):
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_PAUSE_S)
                continue
            os.ftruncate(self._descriptor, 0)
            return True
        return False

    def tell(self, exports: str) -> None:
        """Say who holds it, and a digest of where it exports to."""
        os.pwrite(self._descriptor, msgspec.json.encode(Holder(os.getpid(), exports)), 0)

    def release(self) -> None:
        """Give the lock back; it may be taken again."""
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Give the lock and the file back."""
        os.close(self._descriptor)


def holder(directory: Path) -> Holder | None:
    """Who is this directory's agent; None where there is none."""
    try:
        descriptor = os.open(directory / NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        try:
            return msgspec.json.decode(os.pread(descriptor, 4096, 0), type=Holder)
        except msgspec.DecodeError:  # not told yet
            return Holder(0, "")
    else:
        return None
    finally:
        os.close(descriptor)


def exports_digest(settings: Settings, environ: Mapping[str, str]) -> str:
    """A digest of all that says where an agent exports to, equal in engine and agent."""
    otel = sorted((name, value) for name, value in environ.items() if name.startswith("OTEL_"))
    return xxhash.xxh3_64_hexdigest(
        msgspec.json.encode([otel, settings.trace_file, settings.metrics_port, settings.hash_request_ids])
    )
