"""Which pages a request holds, in each layer group: what both cache managers share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tracekv.contract import BAD_PAGE_INDEX
from tracekv.harness.pages import GroupShape, PagePool
from tracekv.harness.requests import Batch, Request
from tracekv.harness.reuse import Block, ReuseTree
from tracekv.harness.rules import blocks_for, stale_blocks

if TYPE_CHECKING:
    from tracekv.harness.manager import KvCacheConnectorManager

#: Of a block for which a retention config says nothing.
_DEFAULT_PRIORITY = 35


@dataclass
class Allocation:
    """The pages of one request.

    Attributes:
        slots: ``[g][ordinal]``: page slot in layer group g, or -1; as long in every group.
        local: Tokens that device reuse supplied.
        capacity: Tokens that the pages cover.
        history: Tokens whose KV is final; pages out of a window at this point are given back.
        block: The last block entered into the reuse tree.
        committed: How many were.
    """

    slots: list[list[int]]
    block: Block
    local: int = 0
    capacity: int = 0
    history: int = 0
    committed: int = 0

    def ends_with(self, block: Block) -> None:
        """Take another block of the reuse tree for the last one that is known."""
        block.follow()
        self.block.unfollow()
        self.block = block


class PagedCache(ABC):
    """Pages, device reuse and the prepare phase of one kind of cache manager.

    Args:
        shapes: The layer groups, by id.
        num_blocks: Page slots of each group.
        tokens_per_block: Tokens per page.
        device: Where the pages lie.
        block_reuse: Keep the pages of known prefixes and supply them to later requests.
        partial_reuse: Supply a partially equal block too, by a copy of its page.

    Source: contract-v2.md section 7 (how the two managers differ).
    """

    def __init__(
        self,
        shapes: Sequence[GroupShape],
        num_blocks: int,
        tokens_per_block: int,
        device: torch.device,
        *,
        block_reuse: bool = True,
        partial_reuse: bool = False,
    ) -> None:
        self.tokens_per_block = tokens_per_block
        self.num_blocks = num_blocks
        self.block_reuse = block_reuse
        self.partial_reuse = partial_reuse
        self.pools = [PagePool(shape, num_blocks, tokens_per_block, device) for shape in shapes]
        self._tree = ReuseTree(len(shapes), tokens_per_block)
        self._allocations: dict[int, Allocation] = {}

    @abstractmethod
    def schedule_context(self, request: Request, chunk: int) -> int:
        """Make room for a chunk of at most ``chunk`` tokens; answers the chunk, 0 where there is none."""

    @abstractmethod
    def schedule_generation(self, request: Request) -> bool:
        """Make room for the next generated token, if that is done while scheduling; False where pages are lacking."""

    @abstractmethod
    def prepare_resources(self, batch: Batch, manager: KvCacheConnectorManager | None) -> None:
        """Ask the connector for the first chunks of a final batch, and place them."""

    @abstractmethod
    def most_pages(self, request: Request, most_chunk: int) -> list[int]:
        """Page slots that a request can hold at one time, by layer group."""

    @abstractmethod
    def page_indices(self, request: Request) -> tuple[list[int], list[list[int]] | None]:
        """What a connector is told: the flat list, and the lists per layer group where the cache has them."""

    @abstractmethod
    def block_hashes(self, request: Request) -> list[int]:
        """The chain of a request's full blocks, or an empty list."""

    def block_priorities(self, request: Request, ordinals: range) -> list[int]:
        """Priority of each block by the request's retention config: its range's, else that of generated tokens, else 35.

        Source: contract-v2.md section 8, priorities; the config's fields are the LLM API's.
        """
        config = request.kv_cache_retention_config
        prompt = [
            (part.token_start, request.prompt_len if part.token_end is None else part.token_end, part.priority)
            for part in config.token_range_retention_configs
        ]
        found = []
        for ordinal in ordinals:
            first = ordinal * self.tokens_per_block
            own = [priority for start, end, priority in prompt if start <= first < end]
            generated = config.decode_retention_priority if first >= request.prompt_len else _DEFAULT_PRIORITY
            found.append(own[0] if own else generated)
        return found

    def history_moved(self, request: Request, history: int) -> None:
        """``history`` tokens are final: enter their blocks into the reuse tree, give back what left a window."""
        allocation = self._allocations[request.request_id]
        self._commit(request, allocation, history)
        self._raise_history(allocation, history)

    def slots(self, request: Request) -> list[list[int]]:
        """The pages themselves, ``[g][ordinal]``."""
        return self._allocations[request.request_id].slots

    def holds(self, request: Request) -> bool:
        """The request has pages."""
        return request.request_id in self._allocations

    def release(self, request: Request, written: int, *, forget: bool = False) -> None:
        """Give a request's pages back; the full blocks of the first ``written`` tokens stay known.

        With ``forget`` none of its blocks does, unless another request holds it.
        """
        allocation = self._allocations.pop(request.request_id, None)
        request.py_connector_allocation_reported = False
        if allocation is None:
            return
        self._commit(request, allocation, written)
        allocation.block.unfollow()
        for pool, slots in zip(self.pools, allocation.slots, strict=True):
            for slot in reversed(slots):  # the end of a prefix is the first to be evicted
                if slot >= 0:
                    pool.drop(slot)
                    if forget:
                        pool.forget(slot)

    def free_resources(
        self, request: Request, written: int, manager: KvCacheConnectorManager | None, forget: bool = False
    ) -> None:
        """:meth:`release`, as the loop does it when a request ends or begins anew."""
        self.release(request, written, forget=forget)

    def unheld(self, group: int) -> list[int]:
        """The page slots of a group that no request holds."""
        pool = self.pools[group]
        return [slot for slot in range(pool.num_slots) if pool.holders(slot) == 0]

    def _allocate(self, request: Request) -> Allocation:
        """An allocation that begins with what device reuse supplies; at most ``prompt_len - 1`` tokens."""
        allocation = Allocation([[] for _ in self.pools], self._tree.root(request))
        allocation.block.follow()
        self._allocations[request.request_id] = allocation
        if not self.block_reuse:
            return allocation
        match = self._tree.find(request, request.prompt_len - 1)
        if self.partial_reuse and match.partial is not None:
            history = len(match.blocks) * self.tokens_per_block + match.extra
            if self._alive([*match.blocks, match.partial], history) and self._room_to_copy(
                [*match.blocks, match.partial]
            ):
                self._share(allocation, match.blocks, history)
                self._copy_partial(allocation, match.partial)
        for count in range(len(match.blocks), 0, -1):
            if allocation.local:
                break
            if self._alive(match.blocks[:count], count * self.tokens_per_block):
                self._share(allocation, match.blocks[:count], count * self.tokens_per_block)
        request.device_tokens = allocation.local
        return allocation

    def _alive(self, blocks: Sequence[Block], history: int) -> bool:
        """Every group still has the pages that a history of that length needs."""
        return all(
            blocks[ordinal].pages[pool.shape.layer_group_id] is not None
            for pool in self.pools
            for ordinal in range(self._stale(pool, history).stop, len(blocks))
        )

    def _room_to_copy(self, blocks: Sequence[Block]) -> bool:
        """A page is left in every group when all of these are held."""
        for pool in self.pools:
            pages = [block.pages[pool.shape.layer_group_id] for block in blocks]
            if pool.available <= sum(page is not None and pool.holders(page) == 0 for page in pages):
                return False
        return True

    def _share(self, allocation: Allocation, blocks: Sequence[Block], history: int) -> None:
        for pool, slots in zip(self.pools, allocation.slots, strict=True):
            live = self._stale(pool, history).stop
            for ordinal, block in enumerate(blocks):
                page = block.pages[pool.shape.layer_group_id]
                if ordinal < live or page is None:
                    slots.append(BAD_PAGE_INDEX)
                else:
                    pool.hold(page)
                    slots.append(page)
        if blocks:
            allocation.ends_with(blocks[-1])
        allocation.local = allocation.history = history
        allocation.committed = len(blocks)
        allocation.capacity = history

    def _copy_partial(self, allocation: Allocation, source: Block) -> None:
        for pool, slots in zip(self.pools, allocation.slots, strict=True):
            page = source.pages[pool.shape.layer_group_id]
            assert page is not None
            pool.hold(page)  # or taking a page could evict it
            mine = pool.take()
            pool.copy(page, mine)
            pool.drop(page)
            slots.append(mine)

    def _resize(self, allocation: Allocation, capacity: int, history: int) -> bool:
        """Cover ``capacity`` tokens, ``history`` of them final; answers False, changing nothing, where pages are lacking."""
        end = blocks_for(capacity, self.tokens_per_block)
        for pool, slots in zip(self.pools, allocation.slots, strict=True):
            stale = self._stale(pool, history)
            wanted = sum(ordinal not in stale for ordinal in range(len(slots), end))
            leaving = sum(pool.holders(slots[i]) == 1 for i in stale if i < len(slots) and slots[i] >= 0)
            if wanted > pool.available + leaving:
                return False
        self._raise_history(allocation, history)
        for pool, slots in zip(self.pools, allocation.slots, strict=True):
            stale = self._stale(pool, history)
            slots.extend(BAD_PAGE_INDEX if i in stale else pool.take() for i in range(len(slots), end))
        allocation.capacity = max(allocation.capacity, capacity)
        return True

    def _raise_history(self, allocation: Allocation, history: int) -> None:
        allocation.history = max(allocation.history, history)
        for pool, slots in zip(self.pools, allocation.slots, strict=True):
            for ordinal in self._stale(pool, allocation.history):
                if ordinal < len(slots) and slots[ordinal] >= 0:
                    pool.drop(slots[ordinal])
                    slots[ordinal] = BAD_PAGE_INDEX

    def _commit(self, request: Request, allocation: Allocation, written: int) -> None:
        """Enter the full blocks of the first ``written`` tokens into the reuse tree, those that a connector loaded included."""
        if not self.block_reuse:
            return
        size = self.tokens_per_block
        while (end := (allocation.committed + 1) * size) <= written:
            tokens = tuple(request.tokens_between(end - size, end))
            block = allocation.block.child(tokens)
            for pool, slots in zip(self.pools, allocation.slots, strict=True):
                group, slot = pool.shape.layer_group_id, slots[allocation.committed]
                # A block that is known already keeps its page; ours stays private.
                if slot >= 0 and block.pages[group] is None:
                    block.pages[group] = slot
                    pool.owned_by(slot, block)
            allocation.ends_with(block)
            allocation.committed += 1

    def _stale(self, pool: PagePool, history: int) -> range:
        return stale_blocks(history, pool.shape.window, self.tokens_per_block)
