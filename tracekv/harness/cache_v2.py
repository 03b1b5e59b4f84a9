"""The V2 cache manager: a pool per layer group, pages allocated chunk by chunk, -1 for what has left a window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tracekv.contract import BAD_PAGE_INDEX
from tracekv.harness.cache import Allocation, PagedCache
from tracekv.harness.pages import GroupShape, layout_of_pools
from tracekv.harness.requests import Batch, Request, RequestState
from tracekv.harness.rules import blocks_for, place_offer
from tracekv.harness.versions import RuntimeVersion

if TYPE_CHECKING:
    import torch

    from tracekv.contract import KvCacheLayout
    from tracekv.harness.manager import KvCacheConnectorManager


class CacheV2(PagedCache):
    """One layer group per window.

    Args:
        grow_limit: Most pages by which a layer group grows for an offer that reaches past the chunk; None: no limit.
        version: What versions of the runtime differ in.
        shapes, num_blocks, tokens_per_block, device, options: See :class:`PagedCache`.

    Raises:
        ValueError: ``served_position_survives`` is False, and a layer group has a window: what left it is gone.

    Source: contract-v2.md sections 1 and 2.
    """

    def __init__(
        self,
        shapes: Sequence[GroupShape],
        num_blocks: int,
        tokens_per_block: int,
        device: torch.device,
        *,
        grow_limit: int | None = None,
        version: RuntimeVersion | None = None,
        **options: bool,
    ) -> None:
        super().__init__(shapes, num_blocks, tokens_per_block, device, **options)
        self._grow_limit = grow_limit
        self._version = version or RuntimeVersion()
        if not self._version.served_position_survives and any(shape.window is not None for shape in shapes):
            raise ValueError(
                "tracekv: served_position_survives=False computes what was loaded again, and a sliding window has let go of its "
                "pages; use a model without windows"
            )

    def layout(self) -> KvCacheLayout:
        """What ``register_kv_cache_layout`` is given."""
        return layout_of_pools(self.pools, self.tokens_per_block)

    def schedule_context(self, request: Request, chunk: int) -> int:
        """Match the device's blocks on first sight, then make room for the chunk; 0 where pages are lacking."""
        if not self.holds(request):
            allocation = self._allocate(request)
            request.begin_at(allocation.local, request.prompt_len - allocation.local)
        allocation = self._allocations[request.request_id]
        is_re_entry = request.py_connector_allocation_reported and request.is_first_context_chunk
        if is_re_entry and not self._version.served_position_survives:
            request.begin_at(allocation.local, request.prompt_len - allocation.local)
        start = request.context_current_position
        end = min(start + chunk, request.prompt_len)
        if end < request.prompt_len:
            end -= end % self.tokens_per_block
        if end <= start or not self._resize(allocation, max(allocation.capacity, end), allocation.history):
            return 0
        return end - start

    def schedule_generation(self, request: Request) -> bool:
        """Capacity for one token more."""
        allocation = self._allocations[request.request_id]
        return self._resize(allocation, request.num_device_tokens, allocation.history)

    def prepare_resources(self, batch: Batch, manager: KvCacheConnectorManager | None) -> None:
        """Request by request: query, place, commit, alloc callback."""
        if manager is None:
            return
        for request in batch.context:
            if (
                not request.is_first_context_chunk
                or request.py_connector_allocation_reported
                or not manager.should_add_sequence(request)
            ):
                continue
            if not (
                request.is_dummy_request
                or request.is_generation_only_request()
                or request.state is RequestState.DISAGG_GENERATION_INIT
            ):
                self._serve(request, manager)
            request.py_connector_allocation_reported = True
            flat, by_group = self.page_indices(request)
            manager.update_state_after_alloc(request, flat, by_group)
        batch.resort()

    def free_resources(
        self, request: Request, written: int, manager: KvCacheConnectorManager | None, forget: bool = False
    ) -> None:
        """Give the pages back; what was reported of the request is forgotten with them (contract-v2.md section 7)."""
        super().free_resources(request, written, manager, forget)
        if manager is not None:
            manager.reset_request_state(request)

    def _serve(self, request: Request, manager: KvCacheConnectorManager) -> None:
        allocation = self._allocations[request.request_id]
        local = allocation.local
        offered, is_async = manager.query_num_new_matched_tokens(request, local)
        placement = place_offer(
            offered,
            local=local,
            prompt=request.prompt_len,
            chunk=request.context_chunk_size,
            tokens_per_block=self.tokens_per_block,
            capacity=allocation.capacity,
            resize=lambda capacity, history: (
                self._may_grow(allocation, capacity) and self._resize(allocation, capacity, history)
            ),
        )
        request.honoured_tokens = placement.position - local
        if request.honoured_tokens:
            request.begin_at(placement.position, placement.chunk)
        manager.commit_new_matched_tokens(request, request.honoured_tokens, is_async)
        if self._version.tells_of_cancelled_loads and request.honoured_tokens < offered:
            manager.cancel_load(request, local + request.honoured_tokens, local + offered)

    def _may_grow(self, allocation: Allocation, capacity: int) -> bool:
        added = blocks_for(capacity, self.tokens_per_block) - len(allocation.slots[0])
        return self._grow_limit is None or added <= self._grow_limit

    def most_pages(self, request: Request, most_chunk: int) -> list[int]:
        """Prompt and output; in a group with a window, the window and a chunk (twice: before and after an offer moves it)."""
        whole = blocks_for(request.orig_prompt_len + request.max_new_tokens, self.tokens_per_block)
        chunk = blocks_for(min(most_chunk, request.prompt_len), self.tokens_per_block)
        return [
            whole if window is None else min(whole, blocks_for(window, self.tokens_per_block) + 1 + 2 * chunk)
            for window in (pool.shape.window for pool in self.pools)
        ]

    def page_indices(self, request: Request) -> tuple[list[int], list[list[int]] | None]:
        """Per layer group one entry per block ordinal up to the capacity, -1 where stale; flat where there is one group.

        A released request has empty lists.
        """
        allocation = self._allocations.get(request.request_id)
        if allocation is None:
            by_group: list[list[int]] = [[] for _ in self.pools] if self._version.lists_of_released else []
        else:
            by_group = [self._listed(allocation, group) for group in range(len(self.pools))]
        return (by_group[0] if len(by_group) == 1 else []), by_group

    def _listed(self, allocation: Allocation, group: int) -> list[int]:
        stale = self._stale(self.pools[group], allocation.history)
        return [BAD_PAGE_INDEX if i in stale else slot for i, slot in enumerate(allocation.slots[group])]

    def block_hashes(self, request: Request) -> list[int]:
        """Empty: V2 has no such accessor."""
        return []
