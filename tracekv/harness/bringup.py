"""Bring-up of a connector: construction, refusals, registration, in the runtime's order."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

from tracekv.contract import Runtime, UnknownRuntime, current_runtime, use_runtime
from tracekv.harness.cache import PagedCache
from tracekv.harness.cache_v1 import CacheV1
from tracekv.harness.cache_v2 import CacheV2
from tracekv.harness.manager import KvCacheConnectorManager
from tracekv.harness.models import ModelShape
from tracekv.harness.versions import RuntimeVersion

_log = logging.getLogger("tracekv.harness")

Policy = Literal["GUARANTEED_NO_EVICT", "MAX_UTILIZATION"]


@dataclass
class KvCacheConfig:
    """The part of the engine's arguments that describes its cache; sizes in bytes."""

    tokens_per_block: int = 32
    enable_block_reuse: bool = True
    enable_partial_reuse: bool = False
    host_cache_size: int | None = None
    use_kv_cache_manager_v2: bool = False
    disk_cache_size: int | None = None


@dataclass
class SchedulerConfig:
    """The part that describes how requests are admitted."""

    capacity_scheduler_policy: Policy = "GUARANTEED_NO_EVICT"


@dataclass
class SpeculativeConfig:
    """The part that describes draft tokens."""

    max_draft_len: int = 0


@dataclass(frozen=True)
class CudaGraphConfig:
    """Passes are replayed, as far as they can be."""


@dataclass
class LlmArgs:
    """The engine's arguments, as far as connectors read them and bring-up refuses them."""

    kv_cache_config: KvCacheConfig = field(default_factory=KvCacheConfig)
    kv_connector_config: Any = None
    enable_attention_dp: bool = False
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    max_beam_width: int = 1
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculative_config: SpeculativeConfig | None = None
    cache_transceiver_config: Any = None
    #: None: every forward runs eagerly, and so with its per-layer hooks.
    cuda_graph_config: CudaGraphConfig | None = None


def know_the_rank() -> None:
    """The harness is a world of one rank, unless its host says otherwise."""
    try:
        current_runtime()
    except UnknownRuntime:
        pass
    else:
        return
    use_runtime(Runtime())


def construct(
    scheduler_class: Callable[[Any], Any] | None, worker_class: Callable[[Any], Any], llm_args: Any
) -> tuple[Any, Any]:
    """Construct both halves, each in a thread of a pool, at the same time; one positional argument.

    Only the leader has a scheduler: elsewhere ``scheduler_class`` is None, and so is what comes of it.

    Source: contract.md sections 1.1 and 3.
    """
    with ThreadPoolExecutor(max_workers=2, thread_name_prefix="tracekv-bringup") as threads:
        scheduler = threads.submit(scheduler_class, llm_args) if scheduler_class is not None else None
        worker = threads.submit(worker_class, llm_args)
        return scheduler.result() if scheduler is not None else None, worker.result()


def policy_of(llm_args: Any) -> Policy | None:
    """The capacity policy that the engine's arguments name, or None."""
    named = getattr(getattr(llm_args, "scheduler_config", None), "capacity_scheduler_policy", None)
    name = str(getattr(named, "value", named))
    return "MAX_UTILIZATION" if name == "MAX_UTILIZATION" else "GUARANTEED_NO_EVICT" if named is not None else None


def refuse(
    llm_args: Any,
    cache: PagedCache,
    shape: ModelShape,
    *,
    policy: Policy | None = None,
    attention_dp: bool = False,
    version: RuntimeVersion | None = None,
) -> None:
    """Raise NotImplementedError for engine arguments and a cache under which a connector can't work, in the runtime's order.

    Source: contract-v2.md section 3, points 1 to 12 (there is no hybrid model here, and always a cache).
    """
    version = version or RuntimeVersion()
    is_v1 = isinstance(cache, CacheV1)
    kv_config = getattr(llm_args, "kv_cache_config", None)
    host, disk = _number(kv_config, "host_cache_size", 0), _number(kv_config, "disk_cache_size", 0)
    if getattr(llm_args, "cache_transceiver_config", None) is not None:
        _log.warning("Both a KV cache transceiver and a KV connector are configured; this is not tested.")
    parallel = ("pipeline_parallel_size", "context_parallel_size")
    if any(_number(llm_args, name, 1) > 1 for name in parallel):
        _refuse("pipeline or context parallelism", "use pipeline_parallel_size=1 and context_parallel_size=1")
    if _number(llm_args, "max_beam_width", 1) > 1:
        _refuse("beam search", "use max_beam_width=1")
    if attention_dp and (is_v1 or not version.knows_attention_dp):
        _refuse("attention data parallelism", 'use mode="v2" of a runtime that knows it, or enable_attention_dp=False')
    if not is_v1 and version.refuses_drafts and _drafts(llm_args) > 0:
        _refuse("speculative decoding", "a request's page list shrinks under it; use no speculative_config")
    if is_v1 and policy not in (None, "GUARANTEED_NO_EVICT"):
        if version.v1_policy == "refused":
            _refuse(f"the capacity policy {policy}", "use GUARANTEED_NO_EVICT, or use_kv_cache_manager_v2=True")
        _log.warning("The capacity policy %s is not supported with a KV connector; nothing is evicted.", policy)
    if is_v1 and host:
        _refuse("host offloading", "use host_cache_size=0")
    windows = {layer.window for layer in shape.layers}
    if is_v1 and len(windows) > 1:
        raise NotImplementedError(
            f"tracekv: VSWA: the model's layers have different attention windows ({windows}), and the V1 cache has one "
            'list of blocks for all of them. Use mode="v2".'
        )
    if not is_v1:
        if _number(kv_config, "host_cache_size", -1) == -1:
            _log.info("host tier disabled: a KV connector is attached, and it could not see pages that left the GPU")
        if tiers := [name for name, size in (("host", host), ("disk", disk)) if size > 0]:
            _refuse(f"cache tiers below GPU (found {', '.join(tiers)})", "use host_cache_size=0 and disk_cache_size=0")
        if version.v2_policy == "refused" and policy not in (None, "GUARANTEED_NO_EVICT"):
            _refuse(f"the capacity policy {policy}", "use GUARANTEED_NO_EVICT")
    if isinstance(cache, CacheV2) and not cache.block_reuse:
        raise NotImplementedError(
            "tracekv: block reuse disabled: the V2 cache would ask the connector and honour nothing. Use block_reuse=True."
        )


def _refuse(what: str, remedy: str) -> None:
    raise NotImplementedError(f"tracekv: a KV connector does not work with {what}: {remedy}.")


def _number(holder: Any, name: str, default: int) -> int:
    """A number among arguments that may be of any type, or lack it."""
    value = getattr(holder, name, None)
    return value if isinstance(value, int) else default


def _drafts(llm_args: Any) -> int:
    return _number(getattr(llm_args, "speculative_config", None), "max_draft_len", 0)


def register(manager: KvCacheConnectorManager, cache: PagedCache, version: RuntimeVersion | None = None) -> None:
    """Hand the caches to the worker."""
    if isinstance(cache, CacheV1):
        manager.call("worker", "register_kv_caches", cache.unique_primary_pool())
    elif isinstance(cache, CacheV2):
        layout = cache.layout()
        if version is None or version.probes_layer_groups:
            manager.reject_flat_only_scheduler(len(layout.groups))
            if len(layout.groups) == 1:
                manager.warn_flat_scheduler_under_swa(layout.groups[0].window_size)
        manager.call("worker", "register_kv_cache_layout", layout)


def forward_pass_callable(worker: Any, calls: Counter[str]) -> Callable[[], None] | None:
    """Ask the worker for its callable, right after construction; calls of it are counted."""
    calls["worker.register_forward_pass_callable"] += 1
    callable_ = worker.register_forward_pass_callable()
    if not callable_:
        return None

    def counted() -> None:
        calls["worker.forward_pass_callable"] += 1
        callable_()

    return counted
