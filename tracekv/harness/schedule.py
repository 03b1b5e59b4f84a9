"""Which requests run in a pass, and how many tokens of each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from tracekv.harness.cache import PagedCache
from tracekv.harness.requests import Batch, Request, RequestState


class BatchScheduler:
    """Generation first, then prefill in order of arrival, within a token budget.

    By default a request is admitted when the pages that it and every admitted one can come to hold exist (the runtime's
    GUARANTEED_NO_EVICT), so nothing is ever evicted. With ``destroy`` it is admitted when its first chunk has pages, and the
    newest request that holds some is destroyed where an older one lacks them (MAX_UTILIZATION).

    Args:
        cache: Whose pages are counted.
        chunk_tokens: Most prompt tokens of a request in one pass; None: no limit of its own.
        max_batch_tokens: Most tokens of a pass.
        destroy: Takes a request's pages away; answers False where that has to wait.

    Source: contract-v2.md section 1.1.
    """

    def __init__(
        self,
        cache: PagedCache,
        chunk_tokens: int | None,
        max_batch_tokens: int,
        destroy: Callable[[Request], bool] | None = None,
    ) -> None:
        self._cache = cache
        self._chunk_tokens = chunk_tokens
        self._max_batch_tokens = max_batch_tokens
        self._destroy = destroy
        self._admitted: dict[int, list[int]] = {}
        self._destroyed: list[Request] = []

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
        self._destroyed.clear()
        for request in active:
            if not _is_ready(request, RequestState.GENERATION_IN_PROGRESS) or budget <= 0:
                continue
            place = functools.partial(self._cache.schedule_generation, request)
            if self._until_there_is_room(place, request, active, batch):
                batch.generation.append(request)
                budget -= 1
        for request in active:
            if not _is_ready(request, RequestState.CONTEXT_INIT) or request in self._destroyed:
                continue  # what lost its pages in this pass begins anew in the next one
            if budget <= 0:
                break
            if self._destroy is None and request.request_id not in self._admitted and not self._admit(request):
                break
            chunk = self._chunk(request, min(self.most_chunk, budget), active, batch)
            if chunk > 0:
                request.context_chunk_size = chunk
                batch.add_context(request)
                budget -= chunk
            elif self._destroy is not None:
                break
        return batch

    def _chunk(self, request: Request, most: int, active: Sequence[Request], batch: Batch) -> int:
        if self._destroy is None:
            return self._cache.schedule_context(request, most)
        is_first = request.is_first_context_chunk and not request.py_connector_allocation_reported
        if is_first:
            chunk = self._cache.schedule_context(request, most)
            if chunk == 0:  # its admission failed: nothing stays allocated
                self._cache.release(request, 0)
                request.begin_at(0, request.prompt_len)
            return chunk
        if most < self._cache.tokens_per_block < request.context_remaining_length:
            return 0  # the budget is spent, not the pages
        found = 0

        def place() -> bool:
            nonlocal found
            found = self._cache.schedule_context(request, most)
            return found > 0

        self._until_there_is_room(place, request, active, batch)
        return found

    def _until_there_is_room(
        self, place: Callable[[], bool], request: Request, active: Sequence[Request], batch: Batch
    ) -> bool:
        """Place a request, destroying newer ones while that fails, itself at last; False where it isn't placed.

        Raises:
            RuntimeError: Nothing may be destroyed, or nothing is left to.
        """
        while not place():
            if self._destroy is None:
                raise RuntimeError("tracekv: no page left for a generated token; raise num_blocks")
            victim = self._newest(active, batch)
            if victim is None or not self._destroy(victim):
                return False
            self._destroyed.append(victim)
            if victim is request:
                return False
        return True

    def _newest(self, active: Sequence[Request], batch: Batch) -> Request | None:
        """The newest request that holds pages, may lose them, and isn't in this pass."""
        scheduled = {request.request_id for request in batch}
        started = (RequestState.GENERATION_IN_PROGRESS, RequestState.CONTEXT_INIT)
        for request in reversed(active):
            if request.state in started and self._cache.holds(request) and request.request_id not in scheduled:
                return request
        return None

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


def _is_ready(request: Request, state: RequestState) -> bool:
    return request.state is state and not request.is_suspended and not request.awaits_replay
