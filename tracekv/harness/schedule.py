"""Which requests run in a pass, and how many tokens of each."""

from __future__ import annotations

from collections.abc import Sequence

from tracekv.harness.cache import PagedCache
from tracekv.harness.requests import Batch, Request, RequestState


class BatchScheduler:
    """Generation first, then prefill in order of arrival, within a token budget.

    A request is admitted when the pages that it and every admitted one can come to hold exist (the runtime's
    GUARANTEED_NO_EVICT): so nothing is ever evicted and replayed. Other policies have their place here.

    Args:
        cache: Whose pages are counted.
        chunk_tokens: Most prompt tokens of a request in one pass; None: no limit of its own.
        max_batch_tokens: Most tokens of a pass.

    Source: contract-v2.md section 1.1.
    """

    def __init__(self, cache: PagedCache, chunk_tokens: int | None, max_batch_tokens: int) -> None:
        self._cache = cache
        self._chunk_tokens = chunk_tokens
        self._max_batch_tokens = max_batch_tokens
        self._admitted: dict[int, list[int]] = {}

    @property
    def most_chunk(self) -> int:
        """Most prompt tokens of a request in one pass."""
        return min(self._chunk_tokens or self._max_batch_tokens, self._max_batch_tokens)

    def check(self, request: Request) -> None:
        """Refuse a request that could never run.

        Raises:
            ValueError: It needs more pages than a layer group has.
        """
        need = max(self._cache.most_pages(request, self.most_chunk))
        if need > self._cache.num_blocks:
            raise ValueError(
                f"tracekv: a prompt of {request.prompt_len} and {request.max_new_tokens} new tokens need up to {need} pages "
                f"of a layer group, and there are {self._cache.num_blocks}; raise num_blocks"
            )

    def schedule(self, active: Sequence[Request]) -> Batch:
        """The batch of the next pass; empty where nothing can run."""
        batch = Batch()
        budget = self._max_batch_tokens
        for request in active:
            if request.state is RequestState.GENERATION_IN_PROGRESS and budget > 0:
                self._cache.schedule_generation(request)
                batch.generation.append(request)
                budget -= 1
        for request in active:
            if request.state is not RequestState.CONTEXT_INIT:
                continue
            if budget <= 0:
                break
            if request.request_id not in self._admitted and not self._admit(request):
                break
            chunk = self._cache.schedule_context(request, min(self.most_chunk, budget))
            if chunk > 0:
                request.context_chunk_size = chunk
                batch.add_context(request)
                budget -= chunk
        return batch

    def _admit(self, request: Request) -> bool:
        need = self._cache.most_pages(request, self.most_chunk)
        for group, pages in enumerate(need):
            if pages + sum(admitted[group] for admitted in self._admitted.values()) > self._cache.num_blocks:
                return False
        self._admitted[request.request_id] = need
        return True

    def leave(self, request: Request) -> None:
        """The request gave its pages back."""
        self._admitted.pop(request.request_id, None)
