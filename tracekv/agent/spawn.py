"""From the engine's side: start the agent without the engine noticing, and ask it how far it is."""

from __future__ import annotations

import importlib.util
import logging
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tracekv.agent.lock import exports_digest, holder
from tracekv.agent.state import StateFile
from tracekv.settings import PREFIX, Settings

_log = logging.getLogger("tracekv")

#: A launcher's own: a process that has them may be taken for a rank, and be waited for.
_LAUNCHERS = ("OMPI_", "OPAL_", "PRTE_", "PMIX_", "PMI_", "SLURM_")
_LOG_NAME = "agent.log"
_LOG_BYTES = 1 << 20
_POLL_S = 0.005
#: How long the engine's end waits for an agent.
_CLOSE_S = 2.0


class AgentHandle:
    """What the engine's process keeps of an agent that runs elsewhere.

    Args:
        journal: The ring file of this process.
        starts: Whether to start an agent where there is none.
    """

    def __init__(self, journal: Path, settings: Settings, *, starts: bool) -> None:
        self._directory = journal.parent
        self._state = StateFile(journal)
        self._pid = os.getpid()
        self._has_ended = False
        self._starter: threading.Thread | None = None
        if starts:
            # Not even a fork and exec is on the engine's path.
            self._starter = threading.Thread(
                target=_start, args=(self._directory, settings), name="tracekv-start", daemon=True
            )
            self._starter.start()

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait until everything written before the call is exported, or given up; False where that took longer."""
        if os.getpid() != self._pid or self._has_ended:
            return True
        deadline = time.monotonic() + timeout_s
        if self._starter is not None:
            self._starter.join(timeout_s)
        number = self._state.ask()
        while self._state.answered < number:
            # An agent that was just started has the lock before its starter has ended.
            if time.monotonic() >= deadline or holder(self._directory) is None:
                return self._state.answered >= number
            time.sleep(_POLL_S)
        return True

    def close(self, timeout_s: float = _CLOSE_S) -> bool:
        """As :meth:`flush`, for at most two seconds. The agent goes on by itself."""
        is_flushed = self.flush(min(timeout_s, _CLOSE_S))
        if not self._has_ended:
            self._has_ended = True
            self._state.close()
        return is_flushed


def can_export() -> str | None:
    """None where the ``agent`` extra is installed, else what is missing. Imports nothing."""
    for name in ("opentelemetry", "opentelemetry.sdk", "opentelemetry.proto", "structlog"):
        if importlib.util.find_spec(name) is None:
            return name
    return None


def _start(directory: Path, settings: Settings) -> None:
    try:
        there = holder(directory)
        if there is None:
            _spawn(directory, settings)
        elif there.exports and there.exports != exports_digest(settings, os.environ):
            _log.warning(
                "tracekv: the agent of %s (pid %d) was started with other OTEL_* or TRACEKV_* settings, and exports by them. "
                "Give this engine a TRACEKV_JOURNAL_DIR of its own, or end that agent",
                directory,
                there.pid,
            )
    except Exception as error:  # an engine must start without its tracing
        _log.warning("tracekv: no agent could be started (%s: %s); the journal is written", type(error).__name__, error)


def _spawn(directory: Path, settings: Settings) -> None:
    if not sys.executable:
        raise RuntimeError("this interpreter doesn't know its own executable; start 'tracekv agent' beside it")
    path = directory / _LOG_NAME
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        keep_small(descriptor)
        # It detaches itself by a fork of its own and ends: the engine has no child that it would have to wait for.
        ended = subprocess.run(
            [sys.executable, "-P", "-m", "tracekv.agent", "--detach", str(directory)],
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            cwd="/",
            env=agent_environment(settings, os.environ),
            close_fds=True,
            start_new_session=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(descriptor)
    if ended.returncode:
        raise RuntimeError(f"it ended with {ended.returncode}; see {path}")


def keep_small(log: int) -> None:
    """Empty an agent's own log, by its descriptor, where it has grown too large: it may lie in memory."""
    found = os.fstat(log)
    if stat.S_ISREG(found.st_mode) and found.st_size > _LOG_BYTES:
        os.ftruncate(log, 0)


def agent_environment(settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of an agent: the engine's without its launcher's variables, with the settings as resolved here.

    A backend's settings, which may hold credentials, stay behind.
    """
    clean = {
        name: value
        for name, value in environ.items()
        if not name.startswith((*_LAUNCHERS, PREFIX)) and name != "PYTHONPATH"
    }
    paths = [str(Path(path).absolute()) for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    package = Path(__file__).parents[2]
    if package.name not in ("site-packages", "dist-packages"):
        paths.append(str(package))
    if paths:
        clean["PYTHONPATH"] = os.pathsep.join(paths)
    for field in msgspec.structs.fields(settings):
        value: Any = getattr(settings, field.name)
        if value is None or value == field.default:
            continue
        if field.name == "trace_file":
            value = Path(value).expanduser().absolute()
        clean[PREFIX + field.name.upper()] = (
            {True: "1", False: "0"}.get(value, str(value)) if type(value) is bool else str(value)
        )
    return clean
