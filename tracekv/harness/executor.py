"""The reference executor: the runtime's pass, call for call, on a real transformer."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

from tracekv.contract import on_enqueue
from tracekv.harness import bringup
from tracekv.harness.agreement import Agreement, LockStep
from tracekv.harness.cache import PagedCache
from tracekv.harness.cache_v1 import CacheV1
from tracekv.harness.cache_v2 import CacheV2
from tracekv.harness.collectives import Collectives, OneRank
from tracekv.harness.data_parallel import DataParallelPass, Deadlines
from tracekv.harness.ending import Requests
from tracekv.harness.forward import ForwardStep
from tracekv.harness.host_loop import HostLoop
from tracekv.harness.launcher import Launcher
from tracekv.harness.manager import KvCacheConnectorManager
from tracekv.harness.models import model_shape
from tracekv.harness.requests import Request, RequestState
from tracekv.harness.runner import ModelRunner, layer_groups
from tracekv.harness.schedule import BatchScheduler
from tracekv.harness.stream import Streams
from tracekv.harness.versions import RuntimeVersion


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
        overlap: Run the overlap loop: a pass is launched before the host knows the tokens of the one before.
        stop_tokens: Tokens that end any request; see :meth:`submit`.
        policy: MAX_UTILIZATION admits what fits and lets the newest request begin anew where an older one lacks pages (V2);
            GUARANTEED_NO_EVICT admits what is certain to fit. None: that, or what ``llm_args`` says.
        grow_limit: Most pages by which a layer group grows for an offer that reaches past the chunk (V2); with fewer than are
            needed the offer is honoured in part, or not at all. None: as many as there are.
        graph_replay: Passes that only generate call no per-layer hook, as replayed CUDA graphs don't.
        attention_dp: Attention data parallelism: every rank has a scheduler and requests of its own, and runs a forward
            whenever any rank does.
        deadlines: How long transfers may take, which attention data parallelism alone limits.
        version: What versions of the runtime differ in.

    Attributes:
        calls: ``"scheduler.NAME"`` / ``"worker.NAME"`` -> calls made to the connector, construction aside.
        scheduler: The connector's scheduler, or None (on ranks other than 0 too).
        worker: The connector's worker, or None.
        cache: The pages.

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
        overlap: bool = False,
        stop_tokens: Collection[int] = (),
        policy: bringup.Policy | None = None,
        grow_limit: int | None = None,
        graph_replay: bool = False,
        attention_dp: bool = False,
        deadlines: Deadlines | None = None,
        version: RuntimeVersion | None = None,
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
        self._mode = mode
        self._stop_tokens = stop_tokens
        self._attention_dp = attention_dp
        self.calls: Counter[str] = Counter()
        self._streams = Streams(self._shape.device)
        self._manager: KvCacheConnectorManager | None = None
        version = version or RuntimeVersion()
        if llm_args is None:
            llm_args = bringup.LlmArgs(
                bringup.KvCacheConfig(tokens_per_block, block_reuse, partial_reuse, None, mode == "v2"),
                enable_attention_dp=attention_dp,
                tensor_parallel_size=self._ranks.world,
                scheduler_config=bringup.SchedulerConfig(policy or "GUARANTEED_NO_EVICT"),
                cuda_graph_config=bringup.CudaGraphConfig() if graph_replay else None,
            )
        policy = policy or bringup.policy_of(llm_args)
        # The connector comes first, the cache next, the warm-up third; the caches are registered last.
        after_forward = None
        if scheduler_class is not None and worker_class is not None:
            bringup.know_the_rank()
            leads = attention_dp or self._ranks.rank == 0
            scheduler, worker = bringup.construct(scheduler_class if leads else None, worker_class, llm_args)
            after_forward = bringup.forward_pass_callable(worker, self.calls)
            self._manager = KvCacheConnectorManager(
                worker,
                scheduler,
                enable_attention_dp=attention_dp,
                collectives=self._ranks,
                current_stream=lambda: self._streams.execution,
                calls=self.calls,
            )
        self.cache: PagedCache = self._make_cache(
            num_blocks, tokens_per_block, block_reuse, partial_reuse, grow_limit, version
        )
        runner = ModelRunner(model, self._shape, self.cache.pools, tokens_per_block)
        self._forward = ForwardStep(runner, self.cache, self._streams, graph_replay=graph_replay)
        self._forward.after_forward = after_forward
        evicts = mode == "v2" and (policy == "MAX_UTILIZATION" or version.v2_policy == "coerced")
        self._scheduler = BatchScheduler(self.cache, chunk_tokens, max_batch_tokens, self._evict if evicts else None)
        self._requests = Requests(
            self.cache,
            self._scheduler.leave,
            cancel_waits_for_transfers=attention_dp,
            tells_of_resets=version.tells_of_cancelled_loads,
        )
        self._host = HostLoop(self._requests, overlap=overlap)
        self._agreement: Agreement = LockStep(self._requests)
        if attention_dp:
            self._agreement = DataParallelPass(
                self._ranks, self.cache, self._requests, deadlines, span_passes=version.deadlines_span_passes
            )
        self._launcher = Launcher(self.cache, self._streams, self._forward, self._requests, self._agreement)
        self._next_id = 1 + self._ranks.rank if attention_dp else 1
        self._forward.warm_up()
        if self._manager is not None:
            bringup.refuse(llm_args, self.cache, self._shape, policy=policy, attention_dp=attention_dp, version=version)
            bringup.register(self._manager, self.cache, version)
            self._forward.hooks = (self._manager.layer_pre_hook, self._manager.layer_post_hook)
            self._forward.before_leaving = self._wait_for_save
            self._manager.wait_for_initialization()
            self._requests.manager = self._manager

    def _make_cache(
        self,
        num_blocks: int,
        tokens_per_block: int,
        block_reuse: bool,
        partial_reuse: bool,
        grow_limit: int | None,
        version: RuntimeVersion,
    ) -> PagedCache:
        shapes, device = layer_groups(self._shape, self._mode), self._shape.device
        if self._mode == "v1":
            # V1 floors what it reuses to whole blocks.
            return CacheV1(shapes, num_blocks, tokens_per_block, device, block_reuse=block_reuse)
        return CacheV2(
            shapes,
            num_blocks,
            tokens_per_block,
            device,
            block_reuse=block_reuse,
            partial_reuse=partial_reuse,
            grow_limit=grow_limit,
            version=version,
        )

    def _wait_for_save(self) -> None:
        assert self._manager is not None
        self._manager.call("worker", "wait_for_save", self._streams.current)

    def _evict(self, request: Request) -> bool:
        return self._requests.destroy(request)

    @property
    def attention_dp(self) -> bool:
        """Every rank has requests of its own."""
        return self._attention_dp

    @property
    def passes(self) -> int:
        """Forwards run."""
        return self._forward.passes

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
        stop_tokens: Collection[int] | None = None,
        kv_cache_retention_config: Any = None,
        is_dummy: bool = False,
    ) -> Request:
        """Queue a request; it ends after ``max_new_tokens`` greedily chosen tokens, or with one of ``stop_tokens``.

        ``stop_tokens`` None: the executor's. In the overlap loop such a stop is found out late: the request is in the pass
        that is under way. A dummy is what the runtime pads and warms up with: computed, but a connector isn't asked for it.

        LoRA ids and multimodal items only tell requests apart: the model computes the same for all of them.
        ``trace_headers`` are the caller's (W3C trace context), for whoever listens to
        :func:`tracekv.contract.on_enqueue`; the leader tells it.

        Raises:
            ValueError: A request that could never run.
            RuntimeError: The engine is to shut down.
        """
        if self._requests.is_closing:
            raise RuntimeError(
                "tracekv: the engine was asked to shut down (request_shutdown); it takes no more requests"
            )
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
            stop_tokens=self._stop_tokens if stop_tokens is None else stop_tokens,
        )
        request.is_dummy_request = is_dummy
        request.kv_cache_retention_config = kv_cache_retention_config
        self._scheduler.check(request)
        self._next_id += self._ranks.world if self._attention_dp else 1
        if (self._attention_dp or self._ranks.rank == 0) and not is_dummy:
            on_enqueue(request.request_id, client_id, prompt_tokens, trace_headers, request=request)
        self._requests.incoming.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """Let a request end; the connector is never told, but for what contract-v2.md section 4 says of the overlap loop.

        One that no pass has seen ends here; any other, for which this may be called from any thread, ends in the next pass that runs
        a batch (overlap: that follows one), so a parked one stays while nothing else runs. A parked one then ends at once, its load
        still under way; with attention data parallelism it stays until that is done, which has only :attr:`Deadlines.grace_s` for it
        from here on. Once a request is finished, being saved or not, it has no effect.
        """
        self._requests.cancel(request)

    def destroy(self, request: Request, *, forget: bool = False) -> None:
        """Take a running request's pages away: it begins anew, its generated tokens a part of its prompt (V2).

        Its known blocks stay reusable on the device; with ``forget`` none does, so that the connector is asked for all of them.

        Raises:
            ValueError: The request holds no pages, or has ended, or is parked.
            NotImplementedError: V1, where nothing is ever evicted.
        """
        if self._mode == "v1":
            raise NotImplementedError("tracekv: V1 destroys no allocation while its request runs; use mode='v2'")
        running = (RequestState.CONTEXT_INIT, RequestState.GENERATION_IN_PROGRESS, RequestState.GENERATION_TO_COMPLETE)
        if request.state not in running or not self.cache.holds(request):
            raise ValueError(
                f"tracekv: request {request.request_id} ({request.state.value}) has no pages that could be destroyed"
            )
        self._requests.destroy(request, forget=forget)

    def suspend(self, request: Request) -> None:
        """Leave a request out of the batches, its pages held, until :meth:`resume`."""
        request.is_suspended = True

    def resume(self, request: Request) -> None:
        """Take a suspended request in again, where it was."""
        request.is_suspended = False

    @property
    def has_work(self) -> bool:
        """A request is waiting, running, parked or being saved, or a transfer is under way; suspended ones don't count."""
        return self._requests.have_work or self._host.is_behind

    def run(self, *, max_idle_passes: int | None = None) -> None:
        """Run passes until there is nothing left to do.

        A request that failed carries its ``error``; errors outside the forward end the run, as they end the runtime's.

        Args:
            max_idle_passes: Give up after so many passes in a row in which only transfers are under way. The runtime never does.

        Raises:
            RuntimeError: It gave up.
        """
        idle = 0
        while self._agreement.anyone(self.has_work):
            idle = 0 if self.step() else idle + 1
            if max_idle_passes is not None and idle > max_idle_passes and self.has_work:
                raise RuntimeError(
                    f"tracekv: {idle} passes in a row had nothing to run; get_finished has not returned the ids that are under way"
                )
            if idle:
                time.sleep(0.0002)  # only transfers are under way: leave them the processor

    def step(self) -> bool:
        """One pass, an idle one included; answers whether anything was scheduled."""
        requests = self._requests
        requests.begin_pass()
        batch = self._scheduler.schedule(requests.active)
        scheduled = self._agreement.may_run(batch, waits=self._host.is_behind or requests.wait_for_transfers)
        if not batch and not scheduled and not self._is_waiting():
            raise RuntimeError("tracekv: no request can be scheduled and no transfer is under way; raise num_blocks")
        launched = None
        if scheduled:
            launched = self._launcher.launch(batch, is_padded=self._attention_dp)
        elif self._manager is not None:
            self._manager.handle_metadata()
        self._host.finish(launched)
        self._agreement.poll()
        return scheduled

    def _is_waiting(self) -> bool:
        ready = any(not request.is_suspended for request in self._requests.active)
        return not ready or self._host.is_behind or self._requests.wait_for_transfers

    def request_shutdown(self) -> None:
        """Have the engine come to its end, from any thread: no more requests are taken, and those there are run to their ends.

        With attention data parallelism every rank's transfers have only :attr:`Deadlines.grace_s` left; one rank is enough to ask.
        """
        self._requests.is_closing = True

    def shutdown(self) -> None:
        """Call the connector's ``shutdown`` where it has one; the runtime itself never does (contract.md section 1.1)."""
        if self._manager is None:
            return
        for side, half in (("scheduler", self._manager.scheduler), ("worker", self._manager.worker)):
            if callable(getattr(half, "shutdown", None)):
                self.calls[f"{side}.shutdown"] += 1
                half.shutdown()
