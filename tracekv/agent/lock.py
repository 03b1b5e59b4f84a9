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
#: A process that only asks whether there is an agent holds the lock, shared, for some microseconds, or while it is stopped there.
_ASKING_S, _PAUSE_S = 10.0, 0.01


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
        self._directory = directory
        self._exports = ""
        self._is_held = False
        self._descriptor = os.open(directory / NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def acquire(self) -> bool:
        """Take the lock; False where another agent has it."""
        deadline = time.monotonic() + _ASKING_S
        while not self._try(fcntl.LOCK_EX):
            # Who asks shares the lock, an agent doesn't.
            if not self._try(fcntl.LOCK_SH) or time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE_S)
        os.ftruncate(self._descriptor, 0)
        self._is_held = True
        return True

    def _try(self, kind: int) -> bool:
        try:
            fcntl.flock(self._descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def keep(self) -> bool:
        """Whether this is still the directory's lock: where its file was removed, it is taken anew, unless another agent has it."""
        if self._is_in_place():
            return True
        if not self._is_held:
            return False
        try:
            fresh = AgentLock(self._directory)
        except OSError:
            return False
        if not fresh.acquire():
            fresh.close()
            return False
        self.close()
        self._descriptor = fresh._descriptor
        self.tell(self._exports)
        return True

    def _is_in_place(self) -> bool:
        try:
            found = (self._directory / NAME).stat()
        except OSError:
            return False
        return os.path.samestat(found, os.fstat(self._descriptor))

    def tell(self, exports: str) -> None:
        """Say who holds it, and a digest of where it exports to."""
        self._exports = exports
        os.pwrite(self._descriptor, msgspec.json.encode(Holder(os.getpid(), exports)), 0)

    def release(self) -> None:
        """Give the lock back; it may be taken again."""
        self._is_held = False
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
