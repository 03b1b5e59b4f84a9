"""Commits: sealed blocks -> a segment for every rank, then the manifest. Several at a time, and seen by others in their order."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic, perf_counter_ns

from tracekv.journal.vocabulary import DropReason, Operation, Outcome, Tier
from tracekv_fsspec.format import Block, Payload, SegmentHeader, pack_segment
from tracekv_fsspec.index import Index
from tracekv_fsspec.manifest import BlockEntry, Manifest, SegmentEntry, pack
from tracekv_fsspec.paths import manifest_path, new_writer, segment_path
from tracekv_fsspec.report import reported
from tracekv_fsspec.store import Data, Store
from tracekv_fsspec.store_errors import DROP_OF, AlreadyExists, StoreError
from tracekv_fsspec.tally import tally

_log = logging.getLogger("tracekv.fsspec")

#: Commits in progress at a time: one writes while the next one's request begins. What a disk takes in one stream fills; of an object
#: store, a stream is a fraction.
_AT_ONCE_ON_DISK, _AT_ONCE = 2, 4
#: A writer that committed nothing for so long goes on under a new id, which others find behind all they know: so they need not
#: look again and again at those who fell silent (``catalog.LIVE_S``).
ROTATE_S = 600.0
#: What a store answers only where that try wrote nothing; an earlier one may have.
_SURELY_NOT = (Outcome.NO_SPACE, Outcome.DENIED, Outcome.MISSING)


@dataclass
class Sealed:
    """Blocks of one namespace that are stored together.

    Attributes:
        since_ns: When the first one came (``perf_counter_ns``).
        nbytes: Theirs, padding included.
        by_rank: Theirs too; each lies still until the commit has ended.
    """

    namespace: bytes
    since_ns: int = field(default_factory=perf_counter_ns)
    nbytes: int = 0
    by_rank: dict[int, list[Payload]] = field(default_factory=dict)


class Committer:
    """Threads that store what is sealed.

    Commits get their sequence numbers in the order in which they are begun, and each manifest waits for those before it: whoever
    follows a writer by its last number misses none.

    Args:
        header: What every segment's header of this engine has in common.
        own: The ids that this engine wrote under; the header's is the first, others are appended.
        begins: Called when a commit begins.
        ends: Called when it has ended, in the order of their beginnings, with why its blocks aren't stored, or None.
    """

    def __init__(
        self,
        store: Store,
        index: Index,
        header: SegmentHeader,
        own: list[bytes],
        begins: Callable[[], None],
        ends: Callable[[Sealed, DropReason | None], None],
    ) -> None:
        self._store = store
        self._index = index
        self._header = header
        self._own = own
        self._begins = begins
        self._ends = ends
        self._committed_at = monotonic()
        self._sequence = 0
        self._queue: deque[Sealed] = deque()
        self._begun = 0
        self._ended = 0
        self._is_closed = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._run, name=f"tracekv-commit-{number}", daemon=True)
            for number in range(_AT_ONCE_ON_DISK if store.tier is Tier.DISK else _AT_ONCE)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, sealed: Sealed) -> None:
        """Store these when it is their turn. Returns at once."""
        with self._changed:
            self._queue.append(sealed)
            self._changed.notify_all()  # some may wait for their turn, and can't take it

    def close(self) -> None:
        """Store what was put, and stop."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._is_closed:
                    self._changed.wait()
                if not self._queue:
                    return
                sealed = self._queue.popleft()
                turn, self._begun = self._begun, self._begun + 1
                header = self._next_header(sealed.namespace)
            try:
                self._begins()
                self._ends(sealed, self._store_all(sealed, header, turn))
            finally:  # or those behind it would wait for ever
                with self._changed:
                    self._ended += 1
                    self._changed.notify_all()

    def _next_header(self, namespace: bytes) -> SegmentHeader:
        if monotonic() - self._committed_at > ROTATE_S:
            self._header, self._sequence = self._header._replace(writer=new_writer()), 0
            self._own.append(self._header.writer)
        sequence, self._sequence = self._sequence, self._sequence + 1
        return self._header._replace(namespace=namespace, sequence=sequence)

    def _store_all(self, sealed: Sealed, header: SegmentHeader, turn: int) -> DropReason | None:
        try:
            self._commit(sealed, header, turn)
        except StoreError as failure:
            reason, error = DROP_OF.get(failure.outcome, DropReason.ERROR), str(failure)
        except Exception as failure:
            _log.exception("tracekv: saving to %s failed in an unforeseen way", self._store.url)
            reason, error = DropReason.ERROR, type(failure).__name__
        else:
            return None
        blocks = sum(map(len, sealed.by_rank.values()))
        _log.warning("tracekv: %d blocks are not saved (%s): %s", blocks, reason.value, error)
        return reason

    def _commit(self, sealed: Sealed, header: SegmentHeader, turn: int) -> None:
        """Segments of every rank first, then the manifest: it is the commit."""
        entries: list[BlockEntry] = []
        segments: list[SegmentEntry] = []
        is_committing = False
        try:
            try:
                for rank, payloads in sorted(sealed.by_rank.items()):
                    # Layer group by layer group, so that a prompt's blocks of a group are neighbours.
                    payloads.sort(key=_layer_group)
                    parts, packed = pack_segment(header._replace(rank=rank), payloads)
                    path = segment_path(header.deployment, header.writer, header.sequence, rank)
                    size = self._put(path, parts, len(packed), sealed, rank)
                    number = len(segments)
                    entries += [_entry(block, number) for block in packed]
                    segments.append(SegmentEntry(path, size, rank))
            finally:
                self._wait_for(turn)
            manifest = Manifest(header.namespace, header.writer, header.sequence, header.world, segments, entries)
            path = manifest_path(header.deployment, header.writer, header.sequence)
            is_committing = True
            self._put(path, [pack(header.deployment, manifest)], len(entries), sealed, 0)
        except StoreError as error:
            # A manifest that nothing was heard of may be there all the same: then what it names has to be, too.
            if not is_committing or (error.outcome in _SURELY_NOT and tally.attempts <= 1):
                for segment in segments:  # nobody will ever find them
                    with contextlib.suppress(StoreError):
                        self._store.delete(segment.path)
            raise
        self._committed_at = monotonic()
        self._index.add(manifest)

    def _wait_for(self, turn: int) -> None:
        """Return when all commits that were begun earlier have ended."""
        with self._changed:
            while self._ended < turn:
                self._changed.wait()

    def _put(self, path: str, parts: Sequence[Data], blocks: int, sealed: Sealed, rank: int) -> int:
        size = sum(map(len, parts))
        queued_ns = perf_counter_ns() - sealed.since_ns
        with reported(
            self._store, Operation.PUT, path, nbytes=size, blocks=blocks, rank=rank, queued_ns=queued_ns
        ) as report:
            try:
                self._store.put(path, *parts, create_only=True)
            except AlreadyExists as error:
                # Nobody else writes this path: an earlier try got through, and its answer was lost.
                report.failed(error)
        return size


def _layer_group(payload: Payload) -> int:
    return payload.layer_group


def _entry(block: Block, segment: int) -> BlockEntry:
    return BlockEntry(block.key, block.layer_group, block.tokens, segment, block.offset, block.length, block.checksum)
