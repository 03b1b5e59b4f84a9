"""The watch (``TRACEKV_WATCH``): true bytes of a connector that knows nothing of tracekv, by layer group, direction and page.

The inner connector is handed views of the caches (:mod:`tracekv.capture.watch_views`). What is read from pages, and taken away,
counts as saved; what is written to pages counts as loaded; each callback's sums become ``Transfer`` records with source
``observed``, one per layer group, direction and owner of the pages, when the callback is left (for the per-layer hooks: with the next
one). The tier is ``host``: the watch sees the memory beside the pages, not where it comes from or goes to. On a GPU the times
are those of issuing.

Whose pages they are is known from the alloc callback and the reports, so on the leader only; elsewhere, and for pages of nobody,
the request id is :data:`UNKNOWN_REQUEST`.

Bytes can move unseen once a raw address, a storage or an array is taken, and a thread of the connector's own can do so outside
any callback: then ``WatchReport.is_complete`` is False from there on. Two ways can't be noticed: a compiled extension that takes a
tensor object and reads its address itself, and the deprecated ``torch.utils.dlpack.to_dlpack``.

Source: DESIGN.md, capture ("bytes per layer group", source ``observed``).
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from threading import get_ident
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import torch

from tracekv.capture import watch_views
from tracekv.capture.observers import Observer
from tracekv.capture.watch_extents import Extents, Pages, add_pages, extents_of
from tracekv.capture.watch_ops import Moved
from tracekv.contract import reading
from tracekv.journal.current import current
from tracekv.journal.records import Transfer, WatchGapSeen, WatchReport
from tracekv.journal.vocabulary import Direction, Source, Tier, WatchGap

if TYPE_CHECKING:
    from tracekv.capture.session import Session

#: Owner of pages whose request isn't known in this process.
UNKNOWN_REQUEST = -1
_NOT_THE_CONNECTOR = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")
_STANDARD_LIBRARY = str(Path(threading.__file__).parent)


class PageOwners(Observer):
    """Whose pages are whose, from the scheduler's callbacks. A shared page is the request's that had it reported last."""

    #: Cancelled requests are never announced (contract.md section 1.8): the one seen least recently goes first.
    MAX_REQUESTS = 4096

    def __init__(self) -> None:
        self._lock = threading.Lock()  # the connector's own threads ask too
        self._requests: dict[int, dict[tuple[int, int], None]] = {}
        self._owners: dict[tuple[int, int], dict[int, None]] = {}

    def owner(self, page: tuple[int, int]) -> int:
        """Of a (layer group, page slot)."""
        with self._lock:
            owners = self._owners.get(page)
            return next(reversed(owners)) if owners else UNKNOWN_REQUEST

    def allocated(self, request: Any, pages: list[list[int]]) -> None:
        """``update_state_after_alloc``: all of its pages. What it had before (a replay) is nobody's now."""
        self._own(request.request_id, pages, is_anew=True)

    def built(self, scheduler_output: Any) -> None:
        """``build_connector_meta``: all pages of a new request, further ones of the others."""
        for data in scheduler_output.new_requests:
            self._own(data.request_id, reading.new_block_ids(data), is_anew=True)
        for data in scheduler_output.cached_requests:
            pages = reading.new_block_ids(data)
            if any(pages):
                self._own(data.request_id, pages)

    def finished(self, request: Any, pages: list[list[int]], answer: Any) -> None:
        """``request_finished``: pages that are kept for a save stay the request's until another has them."""
        if not answer:
            with self._lock:
                self._disown(request.request_id)

    def _own(self, request_id: int, pages: list[list[int]], *, is_anew: bool = False) -> None:
        with self._lock:
            if is_anew:
                self._disown(request_id)
            self._take(request_id, pages)

    def _take(self, request_id: int, pages: list[list[int]]) -> None:
        held = self._requests.pop(request_id, {})
        self._requests[request_id] = held
        for group, slots in enumerate(pages):
            for slot in slots:
                if slot >= 0:
                    page = group, slot
                    held[page] = None
                    owners = self._owners.setdefault(page, {})
                    owners.pop(request_id, None)
                    owners[request_id] = None
        while len(self._requests) > self.MAX_REQUESTS:
            self._disown(next(iter(self._requests)))

    def _disown(self, request_id: int) -> None:
        for page in self._requests.pop(request_id, ()):
            owners = self._owners.get(page, {})
            owners.pop(request_id, None)
            if not owners:
                self._owners.pop(page, None)


class _Sum:
    """What moved one way between pages of one request and layer group since the last record."""

    __slots__ = ("ended_ns", "nbytes", "pages", "started_ns")

    def __init__(self, started_ns: int) -> None:
        self.pages: dict[int, None] = {}
        self.nbytes = 0
        self.started_ns = started_ns
        self.ended_ns = 0


class Watch(Observer):
    """One per process: takes what the views tell, writes it when a callback of the worker is left.

    Attributes:
        owners: To be told of the scheduler's callbacks.
        extents: The registered caches; empty before.
    """

    def __init__(self, session: Session) -> None:
        self.owners = PageOwners()
        self.extents = Extents(())
        self._session = session
        self._lock = threading.Lock()
        self._sums: dict[tuple[Direction, int, int], _Sum] = {}
        self._gaps: dict[WatchGap, tuple[int, str]] = {}
        self._negative: Pages = {}
        self._has_news = False
        self._reported_step = -1
        self._engine_thread = 0

    # -- the worker's callbacks ----------------------------------------------------------------------------------------

    def hand_out(self, caches: Any) -> Any:
        """Views of what the runtime registers: a tensor or a layout."""
        is_tensor = isinstance(caches, torch.Tensor)
        layout = reading.layout_of_tensor(caches) if is_tensor else reading.layout_of(caches)
        known = self.extents.pools
        extents = extents_of(layout)
        # An earlier engine of this process may live on.
        self.extents = Extents(
            [*extents.pools, *(old for old in known if not any(extents.pools_between(old.start, old.end)))]
        )
        views = watch_views.watched(caches) if is_tensor else watch_views.watched_layout(caches)
        watch_views.warm_up(self)
        watch_views.begin(self)
        self._has_news = True
        return views

    def entered(self) -> None:
        """A callback begins: see all that its thread does."""
        self._engine_thread = get_ident()
        watch_views.enter()

    def left(self) -> None:
        """It is over: write what moved."""
        watch_views.leave()
        self.flush()

    def flush(self) -> None:
        """Write what moved since the last time."""
        if not self._sums and not self._has_news:
            return
        journal, step = self._session.journal, current.step
        with self._lock:
            sums, self._sums = self._sums, {}
            report = self._report(step) if self._has_news or step != self._reported_step else None
            self._has_news = False
        for (direction, group, owner), moved in sums.items():
            journal.write(
                Transfer(
                    direction, Source.OBSERVED, Tier.HOST, owner, step, group, list(moved.pages), moved.nbytes, 0,
                    moved.started_ns, moved.ended_ns, 0, 0, 0, 0, 0, None,
                )
            )  # fmt: skip
        if report is not None and self.extents.pools:
            self._reported_step = step
            journal.write(report)

    def _report(self, step: int) -> WatchReport:
        gaps = [WatchGapSeen(reason, count, where) for reason, (count, where) in self._gaps.items()]
        negative = [(group, slot, times) for (group, slot), times in self._negative.items()]
        return WatchReport(perf_counter_ns(), step, not gaps, gaps, negative)

    def close(self) -> None:
        """Write what is left and see nothing any more; views that are out there go on as plain tensors do."""
        watch_views.begin(None)
        self.flush()

    # -- what the views tell, on any thread ----------------------------------------------------------------------------

    def moved(self, moved: Moved, started_ns: int) -> None:
        """An operation read or wrote pages."""
        ended = perf_counter_ns()
        if not moved.is_exact:
            self.gap(WatchGap.UNKNOWN_EXTENT)
        ident = get_ident()
        if ident != self._engine_thread and ident not in self._session.inside:
            self.gap(WatchGap.OTHER_THREAD)
        with self._lock:
            self._add(Direction.SAVE, moved.read, started_ns, ended)
            self._add(Direction.LOAD, moved.written, started_ns, ended)
            if moved.negative:
                add_pages(self._negative, moved.negative)
                self._has_news = True

    def _add(self, direction: Direction, pages: Pages, started_ns: int, ended_ns: int) -> None:
        for page, nbytes in pages.items():
            group, slot = page
            key = direction, group, self.owners.owner(page)
            total = self._sums.get(key)
            if total is None:
                total = self._sums[key] = _Sum(started_ns)
            total.pages[slot] = None
            total.nbytes += nbytes
            total.ended_ns = ended_ns

    def gap(self, reason: WatchGap) -> None:
        """From here on bytes may move unseen."""
        with self._lock:
            count, where = self._gaps.get(reason, (0, ""))
            self._gaps[reason] = count + 1, where or _line_of_the_connector()
            self._has_news = self._has_news or not count

    def storage_read(self, tensor: torch.Tensor) -> None:
        """All the memory behind a tensor was read, whatever part of it the tensor shows (``torch.save``)."""
        started = perf_counter_ns()
        storage = tensor.untyped_storage()
        start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        read: Pages = {}
        for pool in self.extents.pools_between(start, end):
            for group, slot, nbytes in pool.bytes_in(start - pool.start, end - start):
                add_pages(read, {(group, slot): nbytes})
        self.moved(Moved(read=read), started)

    def failed(self, error: Exception) -> None:
        """The watch itself failed: it ends, and says so."""
        watch_views.begin(None)
        self.gap(WatchGap.FAULT)
        self._session.fault("watch", error)


def _line_of_the_connector() -> str:
    frame: Any = sys._getframe(1)
    while frame is not None and _is_on_the_way(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else ""


def _is_on_the_way(filename: str) -> bool:
    return filename.startswith(_NOT_THE_CONNECTOR) or (
        filename.startswith(_STANDARD_LIBRARY) and "-packages" not in filename
    )
