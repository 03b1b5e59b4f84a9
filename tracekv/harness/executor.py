"""The reference executor: the runtime's pass, call for call, on a real transformer.

Not here yet, each with its place: the overlap loop (a second order of the finish phase), cancellation, replay, graph replay (a
forward without hooks) and dummy requests.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from tracekv.contract import Runtime, UnknownRuntime, current_runtime, on_enqueue, use_runtime
from tracekv.harness import bringup
from tracekv.harness.attention import Segment
from tracekv.harness.cache import PagedCache
from tracekv.harness.cache_v1 import CacheV1
from tracekv.harness.cache_v2 import CacheV2
from tracekv.harness.collectives import Collectives, OneRank
from tracekv.harness.manager import KvCacheConnectorManager
from tracekv.harness.models import model_shape
from tracekv.harness.requests import Batch, Request, RequestState
from tracekv.harness.runner import LayerHook, ModelRunner, layer_groups
from tracekv.harness.schedule import BatchScheduler
from tracekv.harness.stream import Streams

_log = logging.getLogger("tracekv.harness")


class Executor:
    """Serves requests with a model, one pass at a time, on the calling thread.

    Args:
        model: Any causal LM of Transformers 5; executors may share it, taking turns.
        scheduler_class: Called with ``llm_args``; both classes None: run without a connector.
        worker_class: Called with ``llm_args``.
        mode: ``v1`` (one tensor, flat ids) or ``v2`` (layer groups).
        tokens_per_block: Tokens per page.
        num_blocks: Page slots of each layer group.
        chunk_tokens: Most prompt tokens of a request in one pass, a multiple of ``tokens_per_block``; None: unchunked.
        max_batch_tokens: Most tokens of a pass.
        block_reuse: Supply prompts from the pages of earlier ones.
        partial_reuse: Supply a partially equal block too (V2).
        llm_args: What the connector is constructed with, by default an object of the same attributes.
        pickle_metadata: Pickle the metadata, as a broadcast to a second rank would; False hands the very object over, as
            the runtime does with one rank. With several it always is.
        collectives: This rank's, where there are several: every rank runs an executor with the same arguments and
            requests, in lock step; the connector's scheduler is constructed on rank 0 only.

    Attributes:
        calls: ``"scheduler.NAME"`` / ``"worker.NAME"`` -> calls made to the connector, construction aside.
        scheduler: The connector's scheduler, or None (on ranks other than 0 too).
        worker: The connector's worker, or None.
        cache: The pages.
        passes: Forwards run.

    Raises:
        NotImplementedError: The connector can't work with this model and cache.

    Source: contract-v2.md section 1.1; contract.md sections 1.4 and 4.1.
    """

    def __init__(
        self,
        model: Any,
        scheduler_class: Callable[[Any], Any] | None = None,
        worker_class: Callable[[Any], Any] | None = None,
        *,
        mode: Literal["v1", "v2"] = "v2",
        tokens_per_block: int = 32,
        num_blocks: int = 128,
        chunk_tokens: int | None = None,
        max_batch_tokens: int = 8192,
        block_reuse: bool = True,
        partial_reuse: bool = False,
        llm_args: Any = None,
        pickle_metadata: bool = True,
        collectives: Collectives | None = None,
    ) -> None:
        if (scheduler_class is None) != (worker_class is None):
            raise ValueError("tracekv: a connector is a pair: give both scheduler_class and worker_class, or neither")
        if chunk_tokens is not None and (chunk_tokens <= 0 or chunk_tokens % tokens_per_block):
            raise ValueError(
                f"tracekv: chunk_tokens={chunk_tokens} is no multiple of tokens_per_block={tokens_per_block}"
            )
        if max_batch_tokens < tokens_per_block:
            raise ValueError(
                f"tracekv: max_batch_tokens={max_batch_tokens} is less than a page ({tokens_per_block} tokens)"
            )
        self._ranks: Collectives = collectives or OneRank(pickled=pickle_metadata)
        self._shape = model_shape(model)
        self.calls: Counter[str] = Counter()
        self._streams = Streams(self._shape.device)
        self._manager: KvCacheConnectorManager | None = None
        self._forward_callable: Callable[[], None] | None = None
        self._layer_hooks: tuple[LayerHook, LayerHook] | None = None
        if llm_args is None:
            llm_args = bringup.LlmArgs(
                bringup.KvCacheConfig(tokens_per_block, block_reuse, partial_reuse, None, mode == "v2"),
                tensor_parallel_size=self._ranks.world,
            )
        # The connector comes first, the cache next, the warm-up third; the caches are registered last.
        if scheduler_class is not None and worker_class is not None:
            _know_the_rank()
            leads = self._ranks.rank == 0
            scheduler, worker = bringup.construct(scheduler_class if leads else None, worker_class, llm_args)
            self._forward_callable = bringup.forward_pass_callable(worker, self.calls)
            self._manager = KvCacheConnectorManager(
                worker,
                scheduler,
                collectives=self._ranks,
                current_stream=lambda: self._streams.execution,
                calls=self.calls,
            )
        self.cache: PagedCache = {"v1": CacheV1, "v2": CacheV2}[mode](
            layer_groups(self._shape, mode),
            num_blocks,
            tokens_per_block,
            self._shape.device,
            block_reuse=block_reuse,
            partial_reuse=partial_reuse and mode == "v2",  # V1 floors what it reuses to whole blocks
        )
        self._runner = ModelRunner(model, self._shape, self.cache.pools, tokens_per_block)
        self._scheduler = BatchScheduler(self.cache, chunk_tokens, max_batch_tokens)
        self._incoming: deque[Request] = deque()
        self._active: list[Request] = []
        self._saving: list[Request] = []
        self._next_id = 1
        self.passes = 0
        self._warm_up()
        if self._manager is not None:
            bringup.refuse(self.cache, self._shape)
            bringup.register(self._manager, self.cache)
            self._layer_hooks = (self._manager.layer_pre_hook, self._manager.layer_post_hook)
            self._manager.wait_for_initialization()

    @property
    def scheduler(self) -> Any:
        """The connector's scheduler; None without a connector, and on ranks other than 0."""
        return self._manager.scheduler if self._manager else None

    @property
    def worker(self) -> Any:
        """The connector's worker, or None."""
        return self._manager.worker if self._manager else None

    def submit(
        self,
        prompt_tokens: Sequence[int],
        max_new_tokens: int,
        *,
        cache_salt: str | None = None,
        lora_task_id: int | None = None,
        multimodal_hashes: list[list[int]] | None = None,
        multimodal_positions: list[int] | None = None,
        multimodal_lengths: list[int] | None = None,
        client_id: int | None = None,
        trace_headers: Mapping[str, Any] | None = None,
    ) -> Request:
        """Queue a request; it ends after ``max_new_tokens`` greedily chosen tokens, whichever they are.

        LoRA ids and multimodal items only tell requests apart: the model computes the same for all of them.
        ``trace_headers`` are the caller's (W3C trace context), for whoever listens to
        :func:`tracekv.contract.on_enqueue`; the leader tells it.

        Raises:
            ValueError: A request that could never run.
        """
        if not prompt_tokens or max_new_tokens < 1:
            raise ValueError("tracekv: a request has at least one prompt token and one to generate")
        if not 0 <= min(prompt_tokens) <= max(prompt_tokens) < self._shape.vocabulary:
            raise ValueError(f"tracekv: a prompt token is outside the model's vocabulary of {self._shape.vocabulary}")
        if len(prompt_tokens) + max_new_tokens > self._shape.max_tokens:
            raise ValueError(
                f"tracekv: {len(prompt_tokens)} prompt and {max_new_tokens} new tokens are more than the model's "
                f"{self._shape.max_tokens} positions"
            )
        request = Request(
            self._next_id,
            prompt_tokens,
            max_new_tokens,
            cache_salt=cache_salt,
            lora_task_id=lora_task_id,
            multimodal_hashes=multimodal_hashes,
            multimodal_positions=multimodal_positions,
            multimodal_lengths=multimodal_lengths,
            client_id=client_id,
        )
        self._scheduler.check(request)
        self._next_id += 1
        if self._ranks.rank == 0:
            on_enqueue(request.request_id, client_id, prompt_tokens, trace_headers)
        self._incoming.append(request)
        return request

    @property
    def has_work(self) -> bool:
        """A request is waiting, running, parked or being saved."""
        return bool(self._incoming or self._active or self._saving)

    def run(self) -> None:
        """Run passes until there is nothing left to do.

        A request that failed carries its ``error``; errors outside the forward end the run, as they end the runtime's.
        """
        while self.has_work:
            if not self.step():
                time.sleep(0.0002)  # only transfers are under way: leave them the processor

    def step(self) -> bool:
        """One pass, an idle one included; answers whether anything was scheduled."""
        manager, streams = self._manager, self._streams
        self._active += self._incoming
        self._incoming.clear()
        batch = self._scheduler.schedule(self._active)
        can_queue = scheduled = bool(batch)
        if not scheduled and self._active and not self._waits_for_transfers():
            raise RuntimeError("tracekv: no request can be scheduled and no transfer is under way; raise num_blocks")
        if can_queue:
            self.cache.prepare_resources(batch, manager)
            if manager is not None:
                manager.build_scheduler_output(batch, self.cache)
        if manager is not None:
            manager.handle_metadata()
            if can_queue:
                manager.take_scheduled_requests_pending_load(batch)
                manager.handle_metadata()
                manager.call("worker", "start_load_kv", streams.current)
                can_queue = bool(batch)  # parking may have emptied it
        if can_queue:
            self._run_batch(batch)
        if manager is not None:
            for request in manager.get_finished():
                self._saving.remove(request)
                self._free(request)
        return scheduled

    def shutdown(self) -> None:
        """Call the connector's ``shutdown`` where it has one; the runtime itself never does (contract.md section 1.1)."""
        if self._manager is None:
            return
        for side, half in (("scheduler", self._manager.scheduler), ("worker", self._manager.worker)):
            if callable(getattr(half, "shutdown", None)):
                self.calls[f"{side}.shutdown"] += 1
                half.shutdown()

    # -- one batch ----------------------------------------------------------------------------------------------------

    def _run_batch(self, batch: Batch) -> None:
        try:
            logits = self._forward(batch)
        except Exception as error:
            # The runtime logs it, fails every active request and goes on (contract.md section 1.5).
            _log.exception("tracekv: a forward failed; %d active requests end here", len(self._active))
            self._fail_active(error)
            return
        self._advance(batch, logits)
        finished = [request for request in batch if request.state is RequestState.GENERATION_COMPLETE]
        for request in finished:
            self._active.remove(request)
            if self._manager is not None and self._announce(request):
                self._saving.append(request)
            else:
                self._free(request)
        for request in batch.generation:
            if request not in finished:
                self.cache.history_moved(request, request.num_tokens - 1)

    def _forward(self, batch: Batch) -> torch.Tensor:
        tokens: list[int] = []
        segments: list[Segment] = []
        rows: list[int] = []
        for request in batch.context:
            start = request.context_current_position
            request.passes.append((start, request.context_chunk_size))
            end = start + request.context_chunk_size
            segments.append(Segment(len(tokens), start, end, self.cache.slots(request)))
            tokens += request.tokens_between(start, end)
            if request.is_last_context_chunk:
                rows.append(len(tokens) - 1)
        for request in batch.generation:
            end = request.num_tokens
            segments.append(Segment(len(tokens), end - 1, end, self.cache.slots(request)))
            tokens += request.tokens_between(end - 1, end)
            rows.append(len(tokens) - 1)
        with self._streams.on_execution():
            logits = self._runner.forward(tokens, segments, rows, self._layer_hooks)
            if self._forward_callable is not None:
                self._forward_callable()
        self._streams.join()
        if self._manager is not None:
            self._manager.call("worker", "wait_for_save", self._streams.current)
        self.passes += 1
        return logits

    def _advance(self, batch: Batch, logits: torch.Tensor) -> None:
        """Sample greedily, move every request on, and commit the prefilled blocks."""
        sampled = iter(zip(logits.argmax(dim=-1).tolist(), logits, strict=True))
        for request in batch.context:
            is_last = request.is_last_context_chunk
            request.context_current_position += request.context_chunk_size
            if is_last:
                self._sample(request, *next(sampled))
            self.cache.history_moved(request, request.context_current_position)
        for request in batch.generation:
            self._sample(request, *next(sampled))

    def _sample(self, request: Request, token: int, logits: torch.Tensor) -> None:
        if request.first_logits is None:
            request.first_logits = logits.to(device="cpu", dtype=torch.float32, copy=True)
            request.ttft_s = time.perf_counter() - request.submitted_at
        request.append_token(token)
        done = len(request.output_tokens) >= request.max_new_tokens
        request.state = RequestState.GENERATION_COMPLETE if done else RequestState.GENERATION_IN_PROGRESS

    def _announce(self, request: Request) -> bool:
        assert self._manager is not None
        flat, by_group = self.cache.page_indices(request)
        return bool(self._manager.request_finished(request, flat, by_group))

    def _free(self, request: Request) -> None:
        self.cache.release(request, request.num_tokens - 1)
        self._scheduler.leave(request)

    def _fail_active(self, error: Exception) -> None:
        """End every active request; failed requests are never announced to the connector."""
        for request in self._active:
            request.error = error
            request.state = RequestState.GENERATION_COMPLETE
            self.cache.release(request, 0)
            self._scheduler.leave(request)
        self._active.clear()

    def _waits_for_transfers(self) -> bool:
        parked = RequestState.DISAGG_GENERATION_TRANS_IN_PROGRESS
        return bool(self._saving) or any(request.state is parked for request in self._active)

    # -- bring-up -----------------------------------------------------------------------------------------------------

    def _warm_up(self) -> None:
        """A forward before the caches are registered; the connector's callable runs after it, as after any."""
        dummy = Request(0, [0], 1)
        dummy.is_dummy_request = True
        slots = [[pool.take()] for pool in self.cache.pools]
        self._runner.forward(dummy.get_tokens(0), [Segment(0, 0, 1, slots)], [])
        if self._forward_callable is not None:
            self._forward_callable()
        for pool, taken in zip(self.cache.pools, slots, strict=True):
            pool.drop(taken[0])


def _know_the_rank() -> None:
    """The harness is a world of one rank, unless its host says otherwise."""
    try:
        current_runtime()
    except UnknownRuntime:
        pass
    else:
        return
    use_runtime(Runtime())
