"""The stager of a node: index, arena and every operation on the store, on threads of its own; nothing here needs torch.

It lives in the leader's process. The scheduler asks it what is stored and staged, the worker copies between pages and its slots.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic

from tracekv.journal.directory import default_directory
from tracekv.journal.vocabulary import Direction, DropReason
from tracekv.reporting import drop
from tracekv_fsspec.arena import Arena, Slot
from tracekv_fsspec.backlog import Backlog
from tracekv_fsspec.catalog import Catalog
from tracekv_fsspec.copies import Copies
from tracekv_fsspec.fates import Fates
from tracekv_fsspec.format import SegmentHeader
from tracekv_fsspec.hint_socket import HintSocket
from tracekv_fsspec.index import Index, Shard
from tracekv_fsspec.keys import Deployment
from tracekv_fsspec.node import Node
from tracekv_fsspec.parking import Parking
from tracekv_fsspec.paths import new_writer
from tracekv_fsspec.prefetch import Prefetcher
from tracekv_fsspec.reader import Reader
from tracekv_fsspec.settings import Settings
from tracekv_fsspec.store import Store
from tracekv_fsspec.writer import SaveBlock, Writer

_log = logging.getLogger("tracekv.fsspec")

#: How long an engine's end may be held up by what is still to be stored.
EXIT_FLUSH_S = 10.0
_THREADS_S = 2.0
#: For so many read deadlines staging for a parked request is tried again.
PARKED_TRIES = 4


class Stager:
    """Everything between the store and host memory, for every rank of an engine.

    Args:
        store: Owned from here on: closed by :meth:`close`.
        page_bytes: Bytes of a page, for every layer group on every rank.
        node: The ranks that met, and their arena, owned from here on; None for a stager by itself, with an arena of its own.

    Attributes:
        index: What the store holds.
        arena: Host memory for blocks.
        reader: Store -> arena.
        parking: Stages what parked requests were promised.
        prefetcher: Stages what is going to be asked for.
        fates: What became of what was read.
        writer: Arena -> store.
        copies: Slots under a copy between page and arena.
        parked: The states of parked requests' tickets, as every rank reads them.
        catalog: Other writers' commits.

    Raises:
        ArenaTooSmall: ``arena_bytes`` holds no block.
        StoreError: The store can't be listed.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        deployment: Deployment,
        page_bytes: Mapping[Shard, int],
        *,
        node: Node | None = None,
    ) -> None:
        digest = deployment.digest()
        header = SegmentHeader(
            deployment=digest,
            namespace=bytes(32),
            layout=deployment.layout,
            dtype=deployment.dtype,
            writer=new_writer(),
            sequence=0,
            rank=0,
            world=deployment.world,
            tokens_per_block=deployment.tokens_per_block,
        )
        self.store = store
        self.deployment = digest
        if node is None:
            directory = Path(settings.arena_dir) if settings.arena_dir else None
            self.arena = Arena.alone(page_bytes, settings.arena_bytes, directory)
        else:
            self.arena = Arena(node.file, node.geometry)
        self.parked = self.arena.geometry.parked(self.arena.buffer)
        self.index = Index(page_bytes)
        own = [header.writer]
        self.catalog = Catalog(store, self.index, deployment=digest, own=own, refresh_s=settings.refresh_ms / 1000)
        self.catalog.start()
        self.fates = Fates(self.arena.page_bytes)
        self.arena.on_evict = self.fates.evicted
        self.reader = Reader(store, self.index, self.arena, self.fates, deployment=digest, layout=deployment.layout)
        backlog = Backlog(settings.write_queue_bytes, settings.write_queue_ms / 1000)
        self.writer = Writer(store, self.index, self.arena, header, backlog, own)
        self.copies = Copies(
            self.arena.geometry.ranks(self.arena.buffer),
            own=node.rank if node else 0,
            is_gone=node.is_gone if node else None,
            loaded=self.arena.unpin_each,
            saved=self.writer.submit,
            lost=self._lost,
        )
        self.prefetcher = Prefetcher(
            self.reader,
            tuple(page_bytes),
            self.prefix,
            tokens_per_block=deployment.tokens_per_block,
            most_blocks=self.arena.slots_per_shard // 2,
            refresh_soon=self.catalog.refresh_soon,
            longest_pause_s=settings.refresh_ms / 1000,
        )
        self.catalog.on_refreshed = self.prefetcher.refreshed
        self.parking = Parking(
            self.reader,
            self.arena,
            self.parked,
            PARKED_TRIES * settings.read_deadline_ms / 1000,
            self.catalog.refresh_soon,
        )
        self._hints: HintSocket | None = None
        self._closing = threading.Lock()
        self._is_closed = False
        _close_at_exit(self)

    def listen(self, folder: Path | None) -> None:
        """Take hints from other processes of this user, over a socket in ``folder`` (None: where journals lie), if that can be."""
        try:
            self._hints = HintSocket(self, folder or default_directory())
        except OSError as error:
            _log.warning(
                "tracekv: no hints are taken from outside (%s: %s); name another folder with TRACEKV_JOURNAL_DIR",
                folder or "the default folder of journals",
                error.strerror or error,
            )

    def is_available(self, shard: Shard, key: bytes) -> bool:
        """Whether a block can be had: it is in the arena, or the store is known to have it."""
        return self.arena.holds(shard, key) or self.index.holds(shard, key)

    def prefix(self, shard: Shard, keys: Sequence[bytes], start: int) -> int:
        """The ordinal of the first key from ``start`` on that can't be had, or ``len(keys)``."""
        end = start
        while True:
            staged = self.arena.staged_run(shard, keys, end)
            end = self.index.prefix(shard, keys, staged)
            if end in (staged, len(keys)):
                return end

    def release(self, slots: Sequence[Slot]) -> None:
        """Give pins back, the last one given being the last to be evicted."""
        self.arena.unpin_each(slots)

    def flush(self, seconds: float) -> bool:
        """Wait until every save that a worker has issued is stored or dropped; False if that took too long."""
        deadline = monotonic() + seconds
        return self.copies.wait(seconds) and self.writer.flush(max(0.0, deadline - monotonic()))

    def close(self, seconds: float = EXIT_FLUSH_S) -> None:
        """Store what was issued, for at most so long, then end every thread and close the store.

        May be called again, from another thread, too: it then returns when all of that is over.
        """
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
            deadline = monotonic() + seconds
            self.copies.close(seconds)
            self.writer.close(max(0.0, deadline - monotonic()))
            if self._hints is not None:
                self._hints.close(_THREADS_S)
            self.prefetcher.close(_THREADS_S)
            self.parking.close(_THREADS_S)
            self.catalog.close(_THREADS_S)
            self.reader.close(_THREADS_S)
            self.fates.close(_THREADS_S)
            self.store.close()
            self.arena.close()

    def _lost(self, blocks: Sequence[SaveBlock]) -> None:
        self.writer.cancel(blocks)
        for block in blocks:
            drop(
                DropReason.ERROR,
                direction=Direction.SAVE,
                blocks=1,
                nbytes=self.arena.page_bytes(block.shard),
                request_id=block.request_id,
                layer_group=block.shard.layer_group,
            )


_open_stagers: weakref.WeakSet[Stager] = weakref.WeakSet()
_is_registered = False


def _close_at_exit(stager: Stager) -> None:
    global _is_registered
    _open_stagers.add(stager)
    if not _is_registered:
        _is_registered = True
        # An S3 client resolves names in a pool of concurrent.futures, which is shut before atexit's callbacks run;
        # what is registered with threading runs earlier. It is private, so atexit is the way that always works.
        getattr(threading, "_register_atexit", atexit.register)(_close_all)


def _close_all() -> None:
    for stager in list(_open_stagers):
        with contextlib.suppress(Exception):  # the process ends; each of the others still gets its turn
            stager.close()
