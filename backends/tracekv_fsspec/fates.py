"""What becomes of blocks that were read into the arena: each is *useful*, *late* or *wasted* once, and told so.

- useful: it was staged when an offer took it up; its lead time is how long it had been there.
- late: a query was answered while it was on its way.
- wasted: it made room for another block, or the engine ended, before an offer took it up.

What the engine's thread and the readers do is noted by them and counted here, on a thread of its own.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import TYPE_CHECKING

import tracekv
from tracekv.journal.vocabulary import PrefetchFate

if TYPE_CHECKING:
    from tracekv_fsspec.index import Shard
    from tracekv_fsspec.read_queue import Piece
    from tracekv_fsspec.tickets import Ticket

_log = logging.getLogger("tracekv.fsspec")


class Fates:
    """The books of blocks that were read and not yet taken up. Its methods take note and return; any thread may call.

    Args:
        page_bytes: Bytes of a shard's page.
    """

    def __init__(self, page_bytes: Callable[[Shard], int]) -> None:
        self._page_bytes = page_bytes
        self._fresh: dict[Shard, dict[bytes, int]] = {}
        self._notes: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="tracekv-fates", daemon=True)
        self._thread.start()

    def arrived(self, piece: Piece, keys: Sequence[bytes]) -> None:
        """Blocks of a piece are staged."""
        now, is_late, request_id = perf_counter_ns(), piece.is_late, piece.late_for
        self._notes.put(lambda: self._arrived(piece.shard, keys, now, is_late, request_id))

    def used(self, ticket: Ticket) -> None:
        """What was taken of a ticket is part of an offer."""
        if ticket.taken:
            now, keys = perf_counter_ns(), ticket.keys[: ticket.taken]
            self._notes.put(lambda: self._used(ticket, keys, now))

    def evicted(self, shard: Shard, keys: Sequence[bytes]) -> None:
        """Staged blocks made room for others."""
        self._notes.put(lambda: self._wasted(shard, keys))

    def close(self, seconds: float) -> None:
        """Count what is left as wasted, and stop."""
        self._notes.put(self._waste_all)
        self._notes.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        while (note := self._notes.get()) is not None:
            try:
                note()
            except Exception:
                _log.exception("tracekv: what became of some prefetched blocks isn't counted")

    def _arrived(self, shard: Shard, keys: Sequence[bytes], now: int, is_late: bool, request_id: int | None) -> None:
        if is_late:
            self._tell(PrefetchFate.LATE, shard, len(keys), 0, request_id)
        else:
            self._fresh.setdefault(shard, {}).update(dict.fromkeys(keys, now))

    def _used(self, ticket: Ticket, keys: Sequence[bytes], now: int) -> None:
        for shard, fresh in self._fresh.items():
            arrivals: Counter[int] = Counter()
            for key in keys[ticket.skipped.get(shard, 0) :] if fresh else ():
                arrived = fresh.pop(key, None)
                if arrived is not None:
                    arrivals[arrived] += 1
            for arrived, blocks in arrivals.items():
                self._tell(PrefetchFate.USEFUL, shard, blocks, max(0, now - arrived), ticket.request_id)

    def _wasted(self, shard: Shard, keys: Sequence[bytes]) -> None:
        fresh = self._fresh.get(shard)
        if fresh:
            blocks = sum(fresh.pop(key, None) is not None for key in keys)
            self._tell(PrefetchFate.WASTED, shard, blocks, 0, None)

    def _waste_all(self) -> None:
        for shard in self._fresh:
            self._wasted(shard, list(self._fresh[shard]))

    def _tell(self, fate: PrefetchFate, shard: Shard, blocks: int, lead_ns: int, request_id: int | None) -> None:
        if blocks:
            nbytes = blocks * self._page_bytes(shard)
            tracekv.prefetch(fate, blocks=blocks, nbytes=nbytes, lead_ns=lead_ns, request_id=request_id)
