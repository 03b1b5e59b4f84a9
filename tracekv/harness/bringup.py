"""Bring-up of a connector: construction, refusals, registration, in the runtime's order.

Not here yet: the refusals that depend on what this harness lacks (parallelism other than by tensors, beams, drafts, lower
cache tiers) and attention data parallelism.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from tracekv.harness.cache import PagedCache
from tracekv.harness.cache_v1 import CacheV1
from tracekv.harness.cache_v2 import CacheV2
from tracekv.harness.manager import KvCacheConnectorManager
from tracekv.harness.models import ModelShape


@dataclass
class KvCacheConfig:
    """The part of the engine's arguments that describes its cache."""

    tokens_per_block: int = 32
    enable_block_reuse: bool = True
    enable_partial_reuse: bool = False
    host_cache_size: int | None = None
    use_kv_cache_manager_v2: bool = False


@dataclass
class LlmArgs:
    """The engine's arguments, as far as connectors read them."""

    kv_cache_config: KvCacheConfig = field(default_factory=KvCacheConfig)
    kv_connector_config: Any = None
    enable_attention_dp: bool = False
    tensor_parallel_size: int = 1


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


def refuse(cache: PagedCache, shape: ModelShape) -> None:
    """Raise NotImplementedError for a cache under which a connector can't work.

    Source: contract-v2.md section 3, points 9 and 12.
    """
    windows = {layer.window for layer in shape.layers}
    if isinstance(cache, CacheV1) and len(windows) > 1:
        raise NotImplementedError(
            f"tracekv: VSWA: the model's layers have different attention windows ({windows}), and the V1 cache has one "
            'list of blocks for all of them. Use mode="v2".'
        )
    if isinstance(cache, CacheV2) and not cache.block_reuse:
        raise NotImplementedError(
            "tracekv: block reuse disabled: the V2 cache would ask the connector and honour nothing. Use block_reuse=True."
        )


def register(manager: KvCacheConnectorManager, cache: PagedCache) -> None:
    """Hand the caches to the worker."""
    if isinstance(cache, CacheV1):
        manager.call("worker", "register_kv_caches", cache.unique_primary_pool())
    elif isinstance(cache, CacheV2):
        layout = cache.layout()
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
