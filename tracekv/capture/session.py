"""The capture of one process: its journal, its settings, the agent that reads, and what the traced instances share."""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import threading
import weakref
from pathlib import Path
from time import perf_counter_ns
from typing import Any, Protocol

import msgspec
import xxhash

from tracekv import settings as settings_module
from tracekv.capture.budget import Budget
from tracekv.capture.hooks import hooks
from tracekv.contract import UnknownRuntime, current_runtime
from tracekv.contract.enqueue import Enqueue, subscribe, unsubscribe
from tracekv.contract.lint import Severity, lint_arguments, lint_connector
from tracekv.journal.current import Journal, current
from tracekv.journal.directory import start_journal
from tracekv.journal.records import Enqueued, Finding, RunJoined, SettingsSeen, TracerFault, TracingReduced
from tracekv.journal.vocabulary import Side
from tracekv.settings import Settings

log = logging.getLogger("tracekv")


class Agent(Protocol):
    """What reads the journal in this process."""

    def flush(self, timeout_s: float) -> bool:
        """Export what is written so far."""

    def close(self, timeout_s: float) -> bool:
        """Export what is left and end."""


class Pending(Protocol):
    """What keeps records back."""

    def write_rest(self) -> None:
        """Write them."""


class Observation(Protocol):
    """What observes the traced instances, where the settings ask for it."""

    def of(self, side: Side, llm_args: Any) -> list[Any]:
        """The observers of one instance."""

    def close(self) -> None:
        """Write what is left."""


class Session:
    """Shared by the traced instances of a process.

    Attributes:
        inside: Idents of the threads that are inside a callback: a call made there is the connector's own.
        page_bytes: Bytes of a page by layer group, once this process's caches are registered.
        recorders: Of the traced instances that live.
        workers: Live traced workers; without one in this process the leader sends no envelope, since a bare
            worker couldn't open it.
    """

    def __init__(self, settings: Settings, journal: Journal) -> None:
        self.settings = settings
        self.journal = journal
        self.budget = Budget(settings.budget_pct)
        self.inside: set[int] = set()
        self.workers = 0
        self.page_bytes: dict[int, int] = {}
        self.agent: Agent | None = None
        self.observation: Observation | None = None
        self.recorders: weakref.WeakSet[Pending] = weakref.WeakSet()
        self._run_id = b""
        self._faults: set[str] = set()
        self._is_off = False
        digest = xxhash.xxh3_128_digest(msgspec.json.encode(settings, order="deterministic"))
        journal.write(SettingsSeen(digest))

    def add_worker(self, worker: object) -> None:
        """Count a traced worker for as long as it lives."""
        self.workers += 1
        weakref.finalize(worker, self._worker_gone)

    def _worker_gone(self) -> None:
        self.workers -= 1

    def join_run(self, run_id: bytes) -> None:
        """Say once which run and rank this process belongs to."""
        if run_id == self._run_id:
            return
        self._run_id = run_id
        try:
            runtime = current_runtime()
            rank, world = runtime.rank, runtime.world
        except UnknownRuntime:
            rank, world = -1, -1
        self.journal.write(RunJoined(run_id, rank, world))

    def enqueued(self, request: Enqueue) -> None:
        """A request entered the engine (``TRACEKV_ENQUEUE_HOOK``)."""
        self.journal.write(Enqueued(*request))

    def fault(self, instrument: str, error: BaseException) -> None:
        """Report, once per instrument, that it failed and was removed."""
        if instrument in self._faults:
            return
        self._faults.add(instrument)
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        where = f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}" if trace else "?"
        name = type(error).__name__
        log.warning(
            "tracekv: the instrument %s failed (%s at %s) and is removed; the engine goes on", instrument, name, where
        )
        try:
            self.journal.write(TracerFault(perf_counter_ns(), instrument, name, where))
        except Exception as second:  # the journal itself is what failed
            log.warning("tracekv: the journal can't be written (%s)", type(second).__name__)

    def lint(self, connector: type, llm_args: object) -> None:
        """Record what the engine's arguments and the connector's code will make of the run."""
        try:
            findings = [*lint_connector(connector), *(lint_arguments(llm_args) if llm_args is not None else ())]
            for found in findings:
                self.journal.write(
                    Finding(perf_counter_ns(), found.rule, found.severity.value, found.subject, found.what)
                )
                if found.severity is Severity.PROBLEM:
                    log.warning("tracekv: %s %s: %s %s", found.rule, found.subject, found.what, found.remedy)
        except Exception as error:
            self.fault("lint", error)

    def tell_budget(self, change: TracingReduced) -> None:
        """Say that tracing takes more than its share and is reduced to counters, or is full again."""
        self.journal.write(change)
        if change.is_reduced:
            log.warning(
                "tracekv: tracing took %.1f %% of the engine thread, more than TRACEKV_BUDGET_PCT=%.1f; calls are only counted",
                change.cost_ppm / 1e4,
                change.limit_ppm / 1e4,
            )
        else:
            log.info("tracekv: calls are recorded in full again")

    def switches(self, is_off: bool) -> bool:
        """Whether the detail was switched off, or on again, since this was last asked: once for all traced instances."""
        was_off, self._is_off = self._is_off, is_off
        return was_off is not is_off

    def write_rest(self) -> None:
        """Write what waits for a record to follow, where none will."""
        for recorder in tuple(self.recorders):
            try:
                recorder.write_rest()
            except Exception as error:
                self.fault("rest", error)

    def start_agent(self) -> None:
        """Start what reads the journal, if the settings ask for it."""
        if self.settings.agent == "off":
            return
        try:
            module: Any = importlib.import_module("tracekv.agent")
            self.agent = module.start_agent(self.journal, self.settings)
        except Exception as error:  # an engine must start without its tracing
            self.fault("agent", error)


_lock = threading.Lock()
_session: Session | None = None


def session() -> Session | None:
    """The process's session, made at the first call; None while ``TRACEKV_DETAIL=off`` or where no journal could be made.

    Raises:
        SettingsError: A ``TRACEKV_*`` setting is unknown or invalid. Raised at bring-up, before any request.
    """
    global _session
    with _lock:
        if _session is None:
            settings = settings_module.load()
            if settings.detail == "off":
                return None
            journal = start_journal(Path(settings.journal_dir) if settings.journal_dir else None)
            if journal is None:
                return None
            _session = Session(settings, journal)
            current.journal = journal
            hooks.bind(journal)
            if settings.enqueue_hook:
                subscribe(_session.enqueued)
            _session.start_agent()
        return _session


def flush(timeout_s: float = 5.0) -> bool:
    """Wait until everything recorded so far is exported; False where that took longer than ``timeout_s``.

    For scripts and tests: an engine never needs it.
    """
    if _session is None or _session.agent is None:
        return True
    return _session.agent.flush(timeout_s)


def shutdown(timeout_s: float = 2.0) -> bool:
    """Export what is left and forget the session; the next traced instance makes a new one from the settings then in force."""
    global _session
    with _lock:
        ended, _session = _session, None
        if ended is not None:
            ended.write_rest()
        current.journal = None
        current.step = 0
        hooks.unbind()
    if ended is None:
        return True
    unsubscribe(ended.enqueued)
    if ended.observation is not None:
        ended.observation.close()
    is_exported = ended.agent is None or ended.agent.close(timeout_s)
    ended.journal.close()
    return is_exported


def _forget_after_fork() -> None:
    # The child has no agent thread, and its records are not the parent's.
    global _session, _lock
    _lock = threading.Lock()
    if _session is not None:
        unsubscribe(_session.enqueued)
    _session = None
    current.journal = None
    hooks.unbind()


atexit.register(shutdown)
os.register_at_fork(after_in_child=_forget_after_fork)
