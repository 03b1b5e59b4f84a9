"""A daemon thread that reads this process's journal, runs the views and exports."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from time import monotonic, perf_counter_ns
from typing import ParamSpec, Protocol

from tracekv.agent.exporters import Exporter
from tracekv.journal.records import ProcessStarted, Record
from tracekv.settings import Settings
from tracekv.views.model import Attributes, AttributeValue, Span
from tracekv.views.spans import SpanView

P = ParamSpec("P")
_log = logging.getLogger("tracekv")

_INTERVAL_S = 0.1
_EXPIRE_EVERY_S = 1.0
#: Spans of one export.
_BATCH = 512


class ReadableJournal(Protocol):
    """A journal as a reader sees it."""

    def read(self, cursor: int) -> tuple[list[Record], int, int]:
        """Records from ``cursor`` on, the cursor to go on from, and how many were overwritten unread."""


class View(Protocol):
    """Something else that wants to see each record, on the feeding thread."""

    def feed(self, record: Record) -> object:
        """Take one record."""

    def lost(self, count: int) -> None:
        """``count`` records were overwritten unread."""


class FeedThread:
    """Follows a journal until it is closed. Whoever starts it closes it.

    Nothing that goes wrong here reaches the process that it runs in: a view or an exporter that raises is reported once, counted,
    and the next record or batch goes on. In a forked child there is no thread, and every method returns at once.

    Args:
        views: Further views that see each record.

    Attributes:
        faults: Errors of views and exporters that were swallowed.
    """

    def __init__(
        self,
        journal: ReadableJournal,
        settings: Settings,
        exporters: Sequence[Exporter],
        *,
        resource: Mapping[str, AttributeValue] | None = None,
        views: Sequence[View] = (),
    ) -> None:
        self._journal = journal
        self._exporters = exporters
        self._resource: Attributes = dict(resource or {"service.name": "tracekv"})
        self._spans = SpanView(detail=settings.detail, hash_request_ids=settings.hash_request_ids)
        self._views = views
        self.faults = 0
        self._has_reported = False
        self._cursor = 0
        self._batch: list[Span] = []
        self._expired_at = monotonic()
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
        return self._spans.records_lost

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
            self._guarded(self._read)
            if monotonic() - self._expired_at >= _EXPIRE_EVERY_S:
                self._expired_at = monotonic()
                self._guarded(self._expire)
            if is_closing:
                self._guarded(self._close_views)
            self._guarded(self._export)
            if is_closing:
                self._close_exporters()
            with self._changed:
                self._done = wanted
                self._has_ended = is_closing
                self._changed.notify_all()

    def _read(self) -> None:
        records, self._cursor, lost = self._journal.read(self._cursor)
        if lost:
            for view in (self._spans, *self._views):
                view.lost(lost)
        for record in records:
            self._guarded(self._feed, record)
            if len(self._batch) >= _BATCH:
                self._guarded(self._export)

    def _feed(self, record: Record) -> None:
        if isinstance(record, ProcessStarted):
            self._resource |= {
                "service.instance.id": record.process_id.hex(),
                "process.pid": record.pid,
                "host.name": record.host,
            }
        for view in self._views:
            self._guarded(view.feed, record)
        self._batch += self._spans.feed(record)

    def _expire(self) -> None:
        self._batch += self._spans.expire(perf_counter_ns())

    def _close_views(self) -> None:
        self._batch += self._spans.close()

    def _export(self) -> None:
        batch, self._batch = self._batch, []
        for start in range(0, len(batch), _BATCH):
            for exporter in self._exporters:
                self._guarded(exporter.export, batch[start : start + _BATCH], self._resource)

    def _close_exporters(self) -> None:
        for exporter in self._exporters:
            self._guarded(exporter.close, max(0.0, self._close_by - monotonic()))

    def _guarded(self, work: Callable[P, object], *arguments: P.args, **named: P.kwargs) -> None:
        try:
            work(*arguments, **named)
        except Exception as error:  # a reader's fault must not end the reading
            self.faults += 1
            if not self._has_reported:
                self._has_reported = True
                _log.warning(
                    "tracekv: the agent failed in %s (%s) and goes on; further failures are counted",
                    getattr(work, "__qualname__", work),
                    type(error).__name__,
                    exc_info=error,
                )
