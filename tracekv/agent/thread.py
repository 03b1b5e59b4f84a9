"""A daemon thread that reads this process's journal, runs the views and exports."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from time import monotonic, perf_counter_ns, sleep
from typing import Protocol

from tracekv.agent.exporters import Exporter
from tracekv.agent.feed import Feed, Guard, View
from tracekv.agent.listeners import Listener
from tracekv.agent.rules import Rules
from tracekv.journal.layout import detail_of
from tracekv.journal.reader import RingReader
from tracekv.journal.records import Record
from tracekv.settings import Settings
from tracekv.views.model import AttributeValue, Span
from tracekv.views.sampling import Sampler

_INTERVAL_S = 0.1
#: Spans of one export.
_BATCH = 512
#: Reads of one turn at most: a writer that is faster than the views must not keep a turn from ending.
_READS = 16
#: Those of a turn that somebody waits for: more than a ring has room for.
_READS_OF_ALL = 256
#: A record in the making is there after some microseconds, or never.
_PAUSE_S = 0.005


class ReadableJournal(Protocol):
    """A journal as a reader sees it."""

    def read(self, cursor: int) -> tuple[list[Record], int, int]:
        """Records from ``cursor`` on, the cursor to go on from, and how many were overwritten unread."""


class FeedThread:
    """Follows a journal until it is closed. Whoever starts it closes it; with it a ring's reader is closed.

    Nothing that goes wrong here reaches the process that it runs in: a view or an exporter that raises is reported once, counted,
    and the next record or batch goes on. In a forked child there is no thread, and every method returns at once.

    Args:
        views: Further views that see each record.
        sampler: Which requests are exported; all by default.
        listeners: Ticked between reads, and closed at the end.
    """

    def __init__(
        self,
        journal: ReadableJournal,
        settings: Settings,
        exporters: Sequence[Exporter],
        *,
        resource: Mapping[str, AttributeValue] | None = None,
        views: Sequence[View] = (),
        sampler: Sampler | None = None,
        listeners: Sequence[Listener] = (),
    ) -> None:
        self._journal = journal
        self._listeners = listeners
        self._exporters = exporters
        self._detail = settings.detail
        self._guard = Guard()
        self._rules = Rules()
        self._feed = Feed(
            settings,
            resource or {"service.name": "tracekv"},
            sampler=sampler,
            views=views,
            rules=self._rules,
            guard=self._guard,
        )
        self._cursor = 0
        self._batch: list[Span] = []
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._wanted = 0
        self._done = 0
        self._is_closing = False
        self._close_by = 0.0
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="tracekv-agent", daemon=True)
        self._thread.start()

    @property
    def records_lost(self) -> int:
        """Records overwritten before they were read."""
        return self._feed.view.records_lost

    @property
    def faults(self) -> int:
        """Errors of views and exporters that were swallowed."""
        return self._guard.faults

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Read, view and export everything written before the call; False where that took longer than ``timeout_s``."""
        if os.getpid() != self._pid:
            return True
        deadline = monotonic() + timeout_s
        with self._changed:
            self._wanted += 1
            wanted = self._wanted
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._done >= wanted or self._has_ended, timeout_s)
            if self._done < wanted:
                return False
        is_flushed = True
        for exporter in self._exporters:
            is_flushed &= exporter.flush(max(0.0, deadline - monotonic()))
        return is_flushed

    def close(self, timeout_s: float = 2.0) -> bool:
        """Read what is left, end open stories as abandoned, export, and end; in at most ``timeout_s``."""
        if os.getpid() != self._pid:
            return True
        with self._changed:
            self._is_closing = True
            self._close_by = monotonic() + timeout_s
            self._changed.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        is_closing = False
        while not is_closing:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closing or self._wanted > self._done, _INTERVAL_S)
                is_closing, wanted = self._is_closing, self._wanted
            self._guard(self._read, is_awaited=is_closing or wanted > self._done)
            self._guard(self._tell_journal)
            self._guard(self._rules.tick, perf_counter_ns())
            self._batch += self._feed.expire(perf_counter_ns())
            for listener in self._listeners:
                self._guard(listener.tick)
            if is_closing:
                self._batch += self._feed.end()
            self._export()
            if is_closing:
                self._close_exporters()
                if isinstance(self._journal, RingReader):
                    self._journal.close()
            with self._changed:
                self._done = wanted
                self._has_ended = is_closing
                self._changed.notify_all()

    def _read(self, *, is_awaited: bool) -> None:
        ring = self._journal if isinstance(self._journal, RingReader) else None
        if ring is not None:
            self._feed.view.detail = detail_of(ring.control()) or self._detail
        for _ in range(_READS_OF_ALL if is_awaited else _READS):
            records, self._cursor, lost = self._journal.read(self._cursor)
            if lost:
                self._feed.lost(lost)
            for record in records:
                self._batch += self._feed.take(record)
                self._feed.findings.clear()  # its views have seen them
                if len(self._batch) >= _BATCH:
                    self._export()
            if self._is_closing and monotonic() > self._close_by:
                return
            if not records:
                if not is_awaited or ring is None or not ring.is_waiting:
                    return
                sleep(_PAUSE_S)

    def _tell_journal(self) -> None:
        if isinstance(self._journal, RingReader):
            written, undecodable = self._journal.written_bytes(), self._journal.undecodable
            for listener in self._listeners:
                listener.journal(self._journal.facts, bytes_written=written, undecodable=undecodable)

    def _export(self) -> None:
        batch, self._batch = self._batch, []
        for start in range(0, len(batch), _BATCH):
            for exporter in self._exporters:
                self._guard(exporter.export, batch[start : start + _BATCH], self._feed.resource)

    def _close_exporters(self) -> None:
        for exporter in self._exporters:
            self._guard(exporter.close, max(0.0, self._close_by - monotonic()))
        for listener in self._listeners:
            self._guard(listener.close, max(0.0, self._close_by - monotonic()))
