"""Write-behind: arena -> segments and a manifest, on a thread of its own.

A block is *reserved* when its save is planned, *submitted* when its bytes are in its slot, and *pending* until it is stored or
dropped. Nothing waits for this thread. A failed write loses the blocks for the store, not for the arena, and the run goes on.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic, perf_counter_ns

import tracekv
from tracekv.journal.vocabulary import Direction, DropReason, Operation, Outcome
from tracekv_fsspec.arena import Arena, Slot
from tracekv_fsspec.backlog import Backlog
from tracekv_fsspec.format import Block, Payload, SegmentHeader, pack_segment
from tracekv_fsspec.index import Index, Shard
from tracekv_fsspec.manifest import BlockEntry, Manifest, SegmentEntry, pack
from tracekv_fsspec.paths import manifest_path, new_writer, segment_path
from tracekv_fsspec.report import reported
from tracekv_fsspec.store import Data, Store
from tracekv_fsspec.store_errors import DROP_OF, AlreadyExists, StoreError
from tracekv_fsspec.tally import tally

_log = logging.getLogger("tracekv.fsspec")

#: A segment is sealed at this size, when the last request in it has ended, or when its first block has waited this long.
SEGMENT_BYTES = 32 << 20
SEAL_AFTER_S = 0.2
#: A writer that committed nothing for so long goes on under a new id, which others find behind all they know: so they need not
#: look again and again at those who fell silent (``catalog.LIVE_S``).
ROTATE_S = 600.0
#: What a store answers only where that try wrote nothing; an earlier one may have.
_SURELY_NOT = (Outcome.NO_SPACE, Outcome.DENIED, Outcome.MISSING)


@dataclass(frozen=True)
class SaveBlock:
    """One block of one shard on its way to the store."""

    request_id: int
    namespace: bytes
    key: bytes
    ordinal: int
    tokens: int
    slot: Slot

    @property
    def shard(self) -> Shard:
        """Layer group and rank."""
        return self.slot.shard


@dataclass
class _Open:
    """Blocks that will be the next segment of their namespace. Each is pinned in the arena."""

    since: float
    since_ns: int
    nbytes: int = 0
    blocks: list[SaveBlock] = field(default_factory=list)
    requests: set[int] = field(default_factory=set)


class Writer:
    """The thread that writes, and the books of what is on its way.

    Args:
        header: What every segment's header of this engine has in common.
        backlog: How much may be pending.
        own: The ids that this engine wrote under; the header's is the first, others are appended.
    """

    def __init__(
        self, store: Store, index: Index, arena: Arena, header: SegmentHeader, backlog: Backlog, own: list[bytes]
    ) -> None:
        self._own = own
        self._committed_at = monotonic()
        self._ended: list[int] = []
        self._store = store
        self._index = index
        self._arena = arena
        self._header = header
        self._backlog = backlog
        self._changed = threading.Condition()
        self._pending: set[tuple[Shard, bytes]] = set()
        self._submitted: list[SaveBlock] = []
        self._unstored = 0
        self._open: dict[bytes, _Open] = {}
        self._sequence = 0
        self._is_flushing = False
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="tracekv-write", daemon=True)
        self._thread.start()

    def is_known(self, shard: Shard, key: bytes) -> bool:
        """Whether a block is stored or on its way, so that it needs no save."""
        return self._index.holds(shard, key) or (shard, key) in self._pending

    def reserve(self, shard: Shard, key: bytes, *, is_new_chain: bool = False) -> Slot | DropReason:
        """A slot for a block to be saved, or why there is none. Does no I/O and waits for nothing.

        Args:
            is_new_chain: Nothing of the block's request was taken in an earlier pass; when there is little room left, it is kept
                for those of which something was.
        """
        size = self._arena.slot_bytes(shard)
        with self._changed:
            if self._is_closed:
                return DropReason.CLOSED
            refusal = self._backlog.refusal(size, is_new_chain=is_new_chain)
            if refusal is not None:
                return refusal
            slot = self._arena.allocate(shard)
            if slot is None:
                return DropReason.ARENA_FULL
            self._pending.add((shard, key))
            self._backlog.add(size)
            return slot

    def cancel(self, blocks: Sequence[SaveBlock]) -> None:
        """Give up reserved blocks whose bytes never came."""
        with self._changed:
            for block in blocks:
                self._arena.abandon(block.slot)
                self._forget(block)

    def submit(self, blocks: Sequence[SaveBlock]) -> None:
        """Hand over reserved blocks whose bytes are in their slots now."""
        with self._changed:
            if not self._is_closed:
                self._submitted += blocks
                self._unstored += len(blocks)
                self._changed.notify_all()
                return
        self.cancel(blocks)
        _report_drop(DropReason.CLOSED, blocks, self._arena)

    def request_ended(self, request_id: int) -> None:
        """Nothing more comes of a request: a segment in which it was the last one needn't wait for others."""
        with self._changed:
            self._ended.append(request_id)
            self._changed.notify_all()

    def flush(self, seconds: float) -> bool:
        """Seal what is open and wait until all that was submitted is stored or dropped; False if that took too long."""
        deadline = monotonic() + seconds
        with self._changed:
            self._is_flushing = True
            self._changed.notify_all()
            while self._unstored and self._thread.is_alive():
                left = deadline - monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
            return not self._unstored

    def close(self, seconds: float) -> None:
        """Store what is submitted, for at most so long, and stop."""
        deadline = monotonic() + seconds
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(max(0.0, deadline - monotonic()))
        if self._thread.is_alive():
            _log.warning("tracekv: %d blocks were not stored in time at %s", self._unstored, self._store.url)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (
                    self._submitted
                    or self._ended
                    or self._is_closed
                    or (self._is_flushing and self._open)
                    or self._is_due()
                ):
                    self._is_flushing = False
                    self._changed.wait(self._until_due())
                blocks, self._submitted = self._submitted, []
                ended, self._ended = self._ended, []
                is_last = self._is_closed
                seal_all = is_last or self._is_flushing
            self._take(blocks)
            for group in self._open.values():
                group.requests.difference_update(ended)
            for namespace in [
                name for name, group in self._open.items() if seal_all or not group.requests or self._is_old(group)
            ]:
                self._seal(namespace)
            if is_last and not self._submitted:
                return

    def _is_due(self) -> bool:
        return any(map(self._is_old, self._open.values()))

    @staticmethod
    def _is_old(group: _Open) -> bool:
        return monotonic() - group.since >= SEAL_AFTER_S

    def _until_due(self) -> float | None:
        oldest = min((group.since for group in self._open.values()), default=None)
        return None if oldest is None else max(0.001, oldest + SEAL_AFTER_S - monotonic())

    def _take(self, blocks: Sequence[SaveBlock]) -> None:
        """Make blocks findable in the arena (what was copied from a page is right), and add them to their segment."""
        for block in blocks:
            slot = self._arena.commit(block.slot, block.key)
            group = self._open.get(block.namespace)
            size = self._arena.slot_bytes(block.shard)
            if group is not None and group.nbytes + size > SEGMENT_BYTES:
                self._seal(block.namespace)
                group = None
            if group is None:
                group = self._open[block.namespace] = _Open(monotonic(), perf_counter_ns())
            group.blocks.append(
                SaveBlock(block.request_id, block.namespace, block.key, block.ordinal, block.tokens, slot)
            )
            group.nbytes += size
            group.requests.add(block.request_id)

    def _seal(self, namespace: bytes) -> None:
        group = self._open.pop(namespace)
        reason, error = None, ""
        with self._changed:
            self._backlog.commit_begins()
        try:
            self._store_blocks(namespace, group)
        except StoreError as failure:
            reason, error = DROP_OF.get(failure.outcome, DropReason.ERROR), str(failure)
        except Exception as failure:
            _log.exception("tracekv: saving to %s failed in an unforeseen way", self._store.url)
            reason, error = DropReason.ERROR, type(failure).__name__
        if reason is not None:
            _log.warning("tracekv: %d blocks are not saved (%s): %s", len(group.blocks), reason.value, error)
            _report_drop(reason, group.blocks, self._arena)
        with self._changed:
            self._backlog.commit_ends(0 if reason else group.nbytes)
            self._arena.unpin_each(block.slot for block in reversed(group.blocks))
            for block in group.blocks:
                self._forget(block)
            self._unstored -= len(group.blocks)
            self._changed.notify_all()

    def _store_blocks(self, namespace: bytes, group: _Open) -> None:
        """Segments of every rank first, then the manifest: it is the commit."""
        if monotonic() - self._committed_at > ROTATE_S:
            self._header, self._sequence = self._header._replace(writer=new_writer()), 0
            self._own.append(self._header.writer)
        sequence, self._sequence = self._sequence, self._sequence + 1
        by_rank: dict[int, list[SaveBlock]] = defaultdict(list)
        for block in group.blocks:
            by_rank[block.shard.rank].append(block)
        entries: list[BlockEntry] = []
        segments: list[SegmentEntry] = []
        header = self._header
        is_committing = False
        try:
            for rank, blocks in sorted(by_rank.items()):
                path = segment_path(header.deployment, header.writer, sequence, rank)
                own = header._replace(namespace=namespace, sequence=sequence, rank=rank)
                parts, packed = pack_segment(own, self._payloads(blocks))
                size = self._put(path, parts, len(blocks), group, rank)
                entries += [_entry(block, len(segments)) for block in packed]
                segments.append(SegmentEntry(path, size, rank))
            manifest = Manifest(namespace, header.writer, sequence, header.world, segments, entries)
            path = manifest_path(header.deployment, header.writer, sequence)
            is_committing = True
            self._put(path, [pack(header.deployment, manifest)], len(entries), group, 0)
        except StoreError as error:
            # A manifest that nothing was heard of may be there all the same: then what it names has to be, too.
            if not is_committing or (error.outcome in _SURELY_NOT and tally.attempts <= 1):
                for segment in segments:  # nobody will ever find them
                    with contextlib.suppress(StoreError):
                        self._store.delete(segment.path)
            raise
        self._committed_at = monotonic()
        self._index.add(manifest)

    def _payloads(self, blocks: Sequence[SaveBlock]) -> list[Payload]:
        """Layer group by layer group, so that a prompt's blocks of a group are neighbours. Not copied: slots have their padding."""
        ordered = sorted(blocks, key=lambda block: block.shard.layer_group)
        return [
            Payload(
                block.key,
                block.shard.layer_group,
                block.ordinal,
                block.tokens,
                self._arena.view(block.slot),
                self._arena.page_bytes(block.shard),
            )
            for block in ordered
        ]

    def _put(self, path: str, parts: Sequence[Data], blocks: int, group: _Open, rank: int) -> int:
        size = sum(map(len, parts))
        queued_ns = perf_counter_ns() - group.since_ns
        with reported(
            self._store, Operation.PUT, path, nbytes=size, blocks=blocks, rank=rank, queued_ns=queued_ns
        ) as report:
            try:
                self._store.put(path, *parts, create_only=True)
            except AlreadyExists as error:
                # Nobody else writes this path: an earlier try got through, and its answer was lost.
                report.failed(error)
        return size

    def _forget(self, block: SaveBlock) -> None:
        self._pending.discard((block.shard, block.key))
        self._backlog.remove(self._arena.slot_bytes(block.shard))


def _entry(block: Block, segment: int) -> BlockEntry:
    return BlockEntry(block.key, block.layer_group, block.tokens, segment, block.offset, block.length, block.checksum)


def _report_drop(reason: DropReason, blocks: Sequence[SaveBlock], arena: Arena) -> None:
    by_owner: dict[tuple[int, int], list[SaveBlock]] = defaultdict(list)
    for block in blocks:
        by_owner[block.request_id, block.shard.layer_group].append(block)
    for (request_id, layer_group), dropped in by_owner.items():
        nbytes = sum(arena.page_bytes(block.shard) for block in dropped)
        tracekv.drop(
            reason,
            direction=Direction.SAVE,
            blocks=len(dropped),
            nbytes=nbytes,
            request_id=request_id,
            layer_group=layer_group,
        )
