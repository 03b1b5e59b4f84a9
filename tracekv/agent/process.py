"""The agent's loop: finds the journals of a directory, follows all of them, and ends when their engines are gone."""

from __future__ import annotations

import signal
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic, perf_counter_ns
from types import FrameType
from typing import Any

from tracekv.agent.exporters import Exporter
from tracekv.agent.feed import Guard
from tracekv.agent.listeners import Listener
from tracekv.agent.lock import AgentLock
from tracekv.agent.rules import Rules
from tracekv.agent.source import Source
from tracekv.agent.state import StateFile, remove_orphans
from tracekv.journal.directory import journal_files
from tracekv.journal.layout import JournalFormatError, JournalNotReady
from tracekv.journal.reader import RingReader
from tracekv.settings import Settings
from tracekv.views.model import AttributeValue
from tracekv.views.sampling import Callers, Sampler

#: How often journals are read and new ones looked for.
_INTERVAL_S = 0.05
_SCAN_S = 0.25
#: How long an agent's end waits for an endpoint.
_CLOSE_S = 2.0
#: How long what dead processes left may take to be exported; the next agent goes on where this one ended.
_DRAIN_S = 15.0


class Agent:
    """Follows every journal of a directory.

    Args:
        directory: Where the journals are.
        exporters: Where spans go.
        listeners: What else sees every record: metrics, logs. Closed at the end.
        log: A structlog logger.
        stays: Don't end when there is nothing to follow.
        grace_s: How long to stay without a journal that is written to: an engine that is started again finds its agent.
    """

    def __init__(
        self,
        directory: Path,
        settings: Settings,
        exporters: Sequence[Exporter],
        *,
        resource: Mapping[str, AttributeValue],
        lock: AgentLock,
        log: Any,
        sampler: Sampler | None = None,
        listeners: Sequence[Listener] = (),
        stays: bool = False,
        grace_s: float = 2.0,
    ) -> None:
        self._directory = directory
        self._settings = settings
        self._exporters = exporters
        self._resource = resource
        self._lock = lock
        self._log = log
        self._sampler = sampler or Sampler()
        self._listeners = listeners
        self._stays = stays
        self._grace_s = grace_s
        self._callers = Callers()
        self._rules = Rules()
        self._guard = Guard()
        self._sources: dict[str, Source] = {}
        #: Files that need no further look: read to their end, or not ours to read.
        self._passed: set[str] = set()
        self._stop = threading.Event()
        self._scanned_at = float("-inf")

    def stop(self) -> None:
        """End soon, without waiting for the engines; what is open is told by the next agent. From any thread."""
        self._stop.set()

    def stop_on_signals(self) -> None:
        """End in order on SIGTERM and SIGINT. On the main thread only."""

        def end(_number: int, _frame: FrameType | None) -> None:
            self.stop()

        signal.signal(signal.SIGTERM, end)
        signal.signal(signal.SIGINT, end)

    def run(self) -> None:
        """Until the engines are gone and their records exported, or :meth:`stop`."""
        self._log.info("agent started", directory=str(self._directory))
        try:
            while not self._stop.is_set():
                self._follow()
                if self._stop.is_set() or not self._hand_over():
                    break
        finally:
            self._close()

    def _follow(self) -> None:
        """Follow journals until none has been written to for the grace."""
        live_at = busy_at = monotonic()
        while not self._stop.is_set():
            count = self.turn()
            now = monotonic()
            if self._sources:
                busy_at = now
            if any(not source.is_read for source in self._sources.values()):
                live_at = now
            if not self._stays and (now - busy_at >= self._grace_s or now - live_at >= _DRAIN_S + self._grace_s):
                return
            if not count:
                self._stop.wait(_INTERVAL_S)

    def _hand_over(self) -> bool:
        """Give the lock back; True where an engine began meanwhile that saw it held, and it is ours again."""
        self._lock.release()
        # Looked at after the release: an engine first makes its journal and then looks at the lock.
        self._scan()
        return any(not source.is_read for source in self._sources.values()) and self._lock.acquire()

    def turn(self) -> int:
        """Read, view and export once; returns how many records came."""
        if monotonic() - self._scanned_at >= _SCAN_S:
            self._guard(self._scan)
        horizon_ns = perf_counter_ns()
        sources = list(self._sources.values())
        # All are read before any is viewed: what one rank's journal tells of a request's caller is then known to all.
        counts = [(self._guard(source.collect) or 0) for source in sources]
        several = len(sources) > 1
        for source, count in zip(sources, counts, strict=True):
            if source.is_claimed:
                self._forget(source)
                continue
            self._guard(source.view, horizon_ns if several else perf_counter_ns())
            if not count:
                self._guard(source.rest, horizon_ns)
            self._guard(source.answer)
            if source.is_done:
                self._forget(source)
        self._guard(self._rules.tick, horizon_ns)
        for listener in self._listeners:
            self._guard(listener.tick)
        return sum(counts)

    def _scan(self) -> None:
        self._scanned_at = monotonic()
        if not self._lock.keep():
            return  # what is new there is another agent's; what is followed already is read to its end
        files = {path.name: path for path in journal_files(self._directory)}
        self._passed &= files.keys()
        for name, path in files.items():
            if name in self._sources or name in self._passed:
                continue
            source = self._open(path)
            if source is not None:
                self._sources[name] = source
                self._log.info("journal found", journal=name, pid=source.facts.pid, host=source.facts.host)

    def _open(self, path: Path) -> Source | None:
        try:
            reader = RingReader(path)
        except (JournalNotReady, FileNotFoundError):
            return None
        except (JournalFormatError, OSError) as error:
            self._passed.add(path.name)
            self._log.warning("journal can't be read", journal=path.name, error=str(error))
            return None
        try:
            state = StateFile(path)
        except OSError as error:
            reader.close()
            self._passed.add(path.name)
            self._log.warning("journal is left alone: its state can't be kept", journal=path.name, error=str(error))
            return None
        if state.has_ended():
            reader.close()
            state.close()
            self._passed.add(path.name)
            return None
        return Source(
            reader,
            state,
            self._settings,
            self._exporters,
            resource=self._resource,
            sampler=self._sampler,
            callers=self._callers,
            listeners=self._listeners,
            rules=self._rules,
            guard=self._guard,
        )

    def _forget(self, source: Source) -> None:
        del self._sources[source.path.name]
        self._passed.add(source.path.name)
        self._log.info("journal read to its end", journal=source.path.name, records_lost=source.records_lost)
        source.close()

    def _close(self) -> None:
        deadline = monotonic() + _CLOSE_S
        for exporter in self._exporters:
            self._guard(exporter.close, max(0.0, deadline - monotonic()))
        for listener in self._listeners:
            self._guard(listener.close, max(0.0, deadline - monotonic()))
        for source in self._sources.values():
            self._guard(source.answer)
            source.close()
        self._guard(remove_orphans, self._directory)
        failed = sum(exporter.failed for exporter in self._exporters)
        exported = sum(exporter.exported for exporter in self._exporters)
        self._log.info("agent ended", spans_exported=exported, spans_failed=failed, faults=self._guard.faults)
