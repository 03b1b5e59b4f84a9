"""Who this process is, and whether the one that wrote a journal still runs."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path
from time import perf_counter_ns, time_ns

from tracekv._version import __version__
from tracekv.journal.layout import JournalFacts

_PROC = Path("/proc")
_ANCHOR_TRIES = 3


def read_clocks() -> tuple[int, int]:
    """``(monotonic_ns, wall_ns)`` of one moment: of a few tries, the one that was interrupted least."""
    best = (1 << 63, 0, 0)
    for _ in range(_ANCHOR_TRIES):
        before = perf_counter_ns()
        wall = time_ns()
        after = perf_counter_ns()
        best = min(best, (after - before, (before + after) // 2, wall))
    return best[1], best[2]


def describe_self() -> JournalFacts:
    """The facts of this process, with a new process id: one per journal."""
    monotonic_ns, wall_ns = read_clocks()
    return JournalFacts(
        pid=os.getpid(),
        start_ticks=start_ticks(os.getpid()) or 0,
        pid_namespace=pid_namespace(),
        process_id=os.urandom(16),
        boot_id=boot_id(),
        monotonic_ns=monotonic_ns,
        wall_ns=wall_ns,
        version=__version__,
        host=socket.gethostname(),
    )


def boot_id() -> str:
    """This boot's id, or empty where the system doesn't tell."""
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def pid_namespace() -> int:
    """The inode of this process's PID namespace, 0 where the system doesn't tell: only within one do pids compare."""
    try:
        return (_PROC / "self/ns/pid").stat().st_ino
    except OSError:
        return 0


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since the boot; None where there is none, or only a zombie.

    Source: proc(5), /proc/PID/stat, fields 3 and 22. The name (field 2) may hold blanks and brackets.
    """
    try:
        stat = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    state, *fields = stat[stat.rindex(b")") + 2 :].split()
    return None if state in (b"Z", b"X") else int(fields[18])


def is_running(facts: JournalFacts) -> bool | None:
    """Whether the process of ``facts`` runs; None where its pid says nothing here (another boot, another PID namespace)."""
    if facts.boot_id != boot_id() or facts.pid_namespace != pid_namespace():
        return None
    ticks = start_ticks(facts.pid)
    return ticks is not None and ticks == facts.start_ticks


def is_locked(descriptor: int) -> bool:
    """Whether a process holds the writer's lock on a journal: the only sign of life that crosses PID namespaces."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False
