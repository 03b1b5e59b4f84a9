"""Write-behind: arena -> store, on threads of its own. One takes blocks and seals them, others commit them (``committing``).

A block is *reserved* when its save is planned, *submitted* when its bytes are in its slot, and *pending* until it is stored or
dropped. Nothing waits for these threads. A failed write loses the blocks for the store, not for the arena, and the run goes on.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import NamedTuple

import tracekv
from tracekv.journal.vocabulary import Direction, DropReason, Tier
from tracekv_fsspec.arena import Arena, Slot
from tracekv_fsspec.backlog import Backlog
from tracekv_fsspec.committing import Committer, Sealed
from tracekv_fsspec.format import Payload, SegmentHeader, checksum
from tracekv_fsspec.index import Index, Shard
from tracekv_fsspec.store import Store

_log = logging.getLogger("tracekv.fsspec")

#: A segment is sealed at this size, when the last request in it has ended, or when its first block has waited this long. To an object
#: store each is a request that costs; a disk may begin sooner.
SEGMENT_BYTES = 32 << 20
SEGMENT_BYTES_ON_DISK = 16 << 20
SEAL_AFTER_S = 0.2


class SaveBlock(NamedTuple):
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
class _Open(Sealed):
    """Blocks that will be the next segment of their namespace.

    Attributes:
        since: When the first one came (``monotonic``).
        slots: Where they lie, each pinned in the arena.
    """

    since: float = field(default_factory=monotonic)
    saved: list[SaveBlock] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)
    requests: set[int] = field(default_factory=set)


class Writer:
    """The thread that takes and seals, and the books of what is on its way.

    Args:
        header: What every segment's header of this engine has in common.
        backlog: How much may be pending.
        own: The ids that this engine wrote under; the header's is the first, others are appended.
    """

    def __init__(
        self, store: Store, index: Index, arena: Arena, header: SegmentHeader, backlog: Backlog, own: list[bytes]
    ) -> None:
        self._ended: list[int] = []
        self._url = store.url
        self._segment_bytes = SEGMENT_BYTES_ON_DISK if store.tier is Tier.DISK else SEGMENT_BYTES
        self._index = index
        self._arena = arena
        self._backlog = backlog
        self._changed = threading.Condition()
        self._pending: set[tuple[Shard, bytes]] = set()
        self._submitted: list[SaveBlock] = []
        self._unstored = 0
        self._open: dict[bytes, _Open] = {}
        self._is_flushing = False
        self._is_closed = False
        self._committer = Committer(store, index, header, own, self._commit_begins, self._commit_ends)
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
            _log.warning("tracekv: %d blocks were not stored in time at %s", self._unstored, self._url)

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
                self._committer.close()
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
        """Make blocks findable in the arena (what was copied from a page is right), and add them to their segment.

        Their checksums are taken here: they have just been written, and a commit may be in progress meanwhile.
        """
        slots = self._arena.commit_each([block.slot for block in blocks], [block.key for block in blocks])
        for block, slot in zip(blocks, slots, strict=True):
            data = self._arena.view(slot)
            group = self._open.get(block.namespace)
            if group is not None and group.nbytes + len(data) > self._segment_bytes:
                self._seal(block.namespace)
                group = None
            if group is None:
                group = self._open[block.namespace] = _Open(block.namespace)
            self._add(block, slot, data, group)

    def _add(self, block: SaveBlock, slot: Slot, data: memoryview, group: _Open) -> None:
        (layer_group, rank), length = slot.shard, self._arena.page_bytes(slot.shard)
        digest = checksum(data if len(data) == length else data[:length])
        payload = Payload(block.key, layer_group, block.ordinal, block.tokens, data, length, digest)
        group.by_rank.setdefault(rank, []).append(payload)
        group.nbytes += len(data)
        group.saved.append(block)
        group.slots.append(slot)
        group.requests.add(block.request_id)

    def _seal(self, namespace: bytes) -> None:
        self._committer.put(self._open.pop(namespace))

    def _commit_begins(self) -> None:
        with self._changed:
            self._backlog.commit_begins()

    def _commit_ends(self, group: Sealed, reason: DropReason | None) -> None:
        assert isinstance(group, _Open)
        if reason is not None:
            _report_drop(reason, group.saved, self._arena)
        with self._changed:
            self._backlog.commit_ends(0 if reason else group.nbytes)
            self._arena.unpin_each(reversed(group.slots))
            self._pending.difference_update([(block.slot.shard, block.key) for block in group.saved])
            self._backlog.remove(group.nbytes)
            self._unstored -= len(group.saved)
            self._changed.notify_all()

    def _forget(self, block: SaveBlock) -> None:
        self._pending.discard((block.shard, block.key))
        self._backlog.remove(self._arena.slot_bytes(block.shard))


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
