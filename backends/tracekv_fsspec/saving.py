"""What a pass saves: blocks whose tokens are complete when it is over, and the incomplete tail of a prompt that it ends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import tracekv
from tracekv.contract.reading import GroupView
from tracekv.journal.vocabulary import Direction, DropReason, Tier
from tracekv_fsspec.index import Shard
from tracekv_fsspec.offers import Engine
from tracekv_fsspec.plan import Copy, StepPlan
from tracekv_fsspec.requests import Request
from tracekv_fsspec.writer import SaveBlock


class _Block(NamedTuple):
    """A block to be saved, of every shard."""

    ordinal: int
    key: bytes
    tokens: int


class SavePlanner:
    """Plans the saves of one request after the other. On the executor's thread; no I/O."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._is_consumer = engine.settings.role == "consumer"
        self._tokens_per_block = engine.tokens_per_block
        self._groups = {group.layer_group_id: group for group in engine.layout.groups}

    def has_nothing(self, request: Request, end_token: int) -> bool:
        """Whether a pass that ends there completes nothing to save."""
        return self._is_consumer or (
            request.tail is None and (request.next_save + 1) * self._tokens_per_block > end_token
        )

    def plan(
        self, request: Request, position: int, scheduled: int, is_new: bool, plan: StepPlan, saved: list[SaveBlock]
    ) -> None:
        """Save each block that is complete when this pass is over and that is neither stored nor on its way.

        What was just loaded is stored, so it is not saved again. A prefix that the device had kept is looked at with the
        first record: if its save was dropped once, it is made good here.

        Args:
            position: Tokens that surely lie before this pass's begin.
            is_new: The request's page list was reported just now.
            plan: Gets the copies.
            saved: Gets the blocks that they fill.
        """
        if request.chain is None or self.has_nothing(request, position + scheduled):
            return
        saves: dict[Shard, Copy] = {}
        dropped: dict[Shard, int] = defaultdict(int)
        for block in self._completed(request, position + scheduled):
            pages = self._pages(request, block, None if is_new else position)
            reserved = self._reserve(request, block, pages)
            if reserved is None:
                for shard in pages:
                    dropped[shard] += 1
                continue
            for each in reserved:
                if each.shard not in saves:
                    saves[each.shard] = Copy(request.request_id, *each.shard, Tier.HOST)
                saves[each.shard].add(pages[each.shard], each.slot, block.tokens)
            saved += reserved
        request.is_being_saved |= bool(saves)
        plan.saves.extend(saves.values())
        for shard, count in dropped.items():
            tracekv.drop(
                request.broken_by or DropReason.ERROR,
                direction=Direction.SAVE,
                blocks=count,
                nbytes=count * self._engine.stager.arena.page_bytes(shard),
                request_id=request.request_id,
                layer_group=shard.layer_group,
            )

    def _completed(self, request: Request, end_token: int) -> Iterable[_Block]:
        """Blocks that weren't considered yet and whose tokens before ``end_token`` are all there will be; each comes once."""
        if request.chain is None:
            return
        size = self._tokens_per_block
        end = min(end_token, request.chain.tokens) // size
        for ordinal in range(request.next_save, end):
            yield _Block(ordinal, request.chain.keys[ordinal], size)
        request.next_save = max(request.next_save, end)
        if request.tail is not None:
            block = _Block(*request.tail)
            if end_token >= block.ordinal * size + block.tokens:
                request.tail = None
                yield block

    def _pages(self, request: Request, block: _Block, position: int | None) -> dict[Shard, int]:
        """The pages of a block that the store lacks. ``position`` is None where the page list was reported just now."""
        found = {}
        for shard in self._engine.shards:
            pages = request.pages.get(shard.layer_group, [])
            page = pages[block.ordinal] if block.ordinal < len(pages) else -1
            if page < 0 or self._engine.stager.writer.is_known(shard, block.key):
                continue
            if position is not None and not self._is_live(self._groups[shard.layer_group], block.ordinal, position):
                continue
            found[shard] = page
        return found

    def _is_live(self, group: GroupView, ordinal: int, position: int) -> bool:
        """Whether a page that was reported earlier is still the block's own.

        A window that has passed a block gives its page to somebody else, and no record says so (contract-v2.md section 2:
        block i is gone when history >= (i + 1) * B + W - 1). One token is left for loops whose records lag by one.
        """
        if group.window_size is None:
            return True
        return position + 1 < (ordinal + 1) * self._tokens_per_block + group.window_size - 1

    def _reserve(self, request: Request, block: _Block, shards: Iterable[Shard]) -> list[SaveBlock] | None:
        """Slots for a block's shards: all of them, or None where one can't be had."""
        writer = self._engine.stager.writer
        blocks: list[SaveBlock] = []
        for shard in shards:
            slot = request.broken_by or writer.reserve(shard, block.key, is_new_chain=not request.is_being_saved)
            if isinstance(slot, DropReason):
                # A block behind a gap can never be found, so the rest of this chain is dropped with it.
                request.broken_by = slot
                writer.cancel(blocks)
                return None
            namespace = request.chain.namespace if request.chain else b""
            blocks.append(SaveBlock(request.request_id, namespace, block.key, block.ordinal, block.tokens, slot))
        return blocks
