"""The V1 cache manager: one tensor, flat block ids, the whole prompt allocated at the first chunk."""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING

from tracekv.harness.cache import PagedCache
from tracekv.harness.requests import Batch, Request
from tracekv.harness.rules import blocks_for

if TYPE_CHECKING:
    import torch

    from tracekv.harness.manager import KvCacheConnectorManager


class CacheV1(PagedCache):
    """One layer group over all layers; windows only decide what is attended to, no page is given back early.

    Source: contract-v2.md section 7, column V1; contract.md section 1.7.
    """

    def unique_primary_pool(self) -> torch.Tensor:
        """``[num_blocks, num_layers, kv_factor, block_size]``, for ``register_kv_caches``."""
        return self.pools[0].tensor

    def schedule_context(self, request: Request, chunk: int) -> int:
        """Chunks are chosen as if nothing were supplied; pages come with :meth:`prepare_resources`."""
        start = request.context_current_position
        return _aligned_chunk(start, chunk, request.prompt_len, self.tokens_per_block)

    def schedule_generation(self, request: Request) -> bool:
        """True: V1 adds the token's page in :meth:`prepare_resources`."""
        return True

    def prepare_resources(self, batch: Batch, manager: KvCacheConnectorManager | None) -> None:
        """All queries, then all alloc callbacks; a page for each generated token.

        Raises:
            RuntimeError: An offer covers the whole prompt. (V2 clamps it.)
        """
        added = []
        for request in batch.context:
            # After an asynchronous load the request comes again, its pages in place.
            if not self.holds(request) and request.is_first_context_chunk:
                self._add_sequence(request, manager)
                added.append(request)
        batch.resort()
        for request in added:
            if manager is not None:
                manager.update_state_after_alloc(request, self.page_indices(request)[0])
                request.py_connector_allocation_reported = True
        for request in batch.generation:
            if not self._resize(self._allocations[request.request_id], request.num_device_tokens, 0):
                raise RuntimeError("tracekv: no page left for a generated token; raise num_blocks")

    def _add_sequence(self, request: Request, manager: KvCacheConnectorManager | None) -> None:
        allocation = self._allocate(request)
        position = local = allocation.local
        if manager is not None and not request.is_dummy_request and manager.should_add_sequence(request):
            offered = manager.get_num_new_matched_tokens(request, local)
            if local + offered >= request.prompt_len:
                raise RuntimeError(
                    f"tracekv: {local} tokens on the device and {offered} offered leave none of the {request.prompt_len} "
                    "prompt tokens to compute; V1 aborts here. Offer at most prompt_len - 1 - num_computed_tokens."
                )
            # Without block reuse the offer is taken and discarded (contract-v2.md section 7).
            if self.block_reuse and offered > 0:
                position = local + offered
        request.honoured_tokens = position - local
        if not self._resize(allocation, request.prompt_len, 0):
            raise RuntimeError("tracekv: no page left for an admitted prompt; raise num_blocks")
        if position:
            # The width stays, the end moves and is floored to a page boundary.
            chunk = _aligned_chunk(position, request.context_chunk_size, request.prompt_len, self.tokens_per_block)
            request.begin_at(position, chunk)

    def most_pages(self, request: Request, most_chunk: int) -> list[int]:
        """Prompt and output, whole."""
        return [blocks_for(request.orig_prompt_len + request.max_new_tokens, self.tokens_per_block)]

    def page_indices(self, request: Request) -> tuple[list[int], list[list[int]] | None]:
        """The flat list; V1 has no other.

        Raises:
            KeyError: The request holds no pages (any more).
        """
        return list(self.slots(request)[0]), None

    def block_hashes(self, request: Request) -> list[int]:
        """The cumulative chain over the blocks whose tokens are complete, one 64-bit number each."""
        chain, hashes = repr((request.cache_salt, request.lora_task_id)).encode(), []
        for ordinal in range((request.num_tokens - 1) // self.tokens_per_block):
            start = ordinal * self.tokens_per_block
            tokens = request.tokens_between(start, start + self.tokens_per_block)
            chain = hashlib.blake2b(chain + struct.pack(f"<{len(tokens)}q", *tokens), digest_size=8).digest()
            hashes.append(int.from_bytes(chain, "little"))
        return hashes


def _aligned_chunk(start: int, chunk: int, prompt: int, tokens_per_block: int) -> int:
    """The chunk from ``start``, its end floored to a page boundary unless it is the prompt's."""
    end = min(start + chunk, prompt)
    if end < prompt:
        end -= end % tokens_per_block
    return max(0, end - start)
