"""The workers' half: copies between pages and the arena's slots, as the pass's metadata says. It does no I/O."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import torch

import tracekv
from tracekv.contract import KvCacheConnectorWorker
from tracekv.contract.reading import LayoutView, layout_of, layout_of_tensor, tokens_per_block
from tracekv.journal.vocabulary import Direction
from tracekv.settings import load_section
from tracekv_fsspec import local
from tracekv_fsspec.index import Shard
from tracekv_fsspec.node import meet, runtime_of
from tracekv_fsspec.plan import Copy, StepPlan
from tracekv_fsspec.settings import Settings
from tracekv_fsspec.stager import EXIT_FLUSH_S
from tracekv_fsspec.worker_arena import WorkerArena

if TYPE_CHECKING:
    from tracekv.contract import KvCacheLayout

_log = logging.getLogger("tracekv.fsspec")


class Worker(KvCacheConnectorWorker):
    """The worker half of the persistent connector. Called on the executor's thread.

    Args:
        llm_args: The engine's arguments; what pairs it with the scheduler of its process (see ``local``).

    Raises:
        SettingsError: A setting is wrong.
        UnknownRuntime: The rank can't be told.
    """

    def __init__(self, llm_args: Any = None) -> None:
        super().__init__(llm_args)
        self._settings = load_section("fsspec", Settings)
        self._runtime = runtime_of(llm_args)
        self._seat = local.Seat(llm_args)
        self._regions: dict[int, list[torch.Tensor]] = {}
        self._arena: torch.Tensor | None = None
        self._loaded_step = 0
        self._saved_step = 0

    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None:
        """Take the single pool; its block size is the engine's argument ``kv_cache_config.tokens_per_block``. Collective.

        Raises:
            ValueError: The engine's arguments don't say it.
            RuntimeError, NotImplementedError: As :func:`tracekv_fsspec.node.meet`.
        """
        self._register(lambda: self._layout_of_tensor(kv_cache_tensor))

    def register_kv_cache_layout(self, layout: KvCacheLayout) -> None:
        """Take pools by layer group. Collective, and raises as :func:`tracekv_fsspec.node.meet`."""
        self._register(lambda: layout_of(layout))

    def start_load_kv(self, stream: Any) -> None:
        """Copy the pass's loads from their slots to their pages, on ``stream`` where the pages are on a GPU."""
        plan, arena = self._plan(), self._seat.arena
        if plan is None or arena is None or plan.step <= self._loaded_step:
            return
        self._loaded_step = plan.step
        arena.loads_begun(plan.step)
        if not plan.loads:
            return
        with self._on(stream):
            for load in plan.loads:
                if load.rank == self._runtime.rank:
                    self._copy(arena, load, Direction.LOAD)
        arena.loads_done(plan.step, self._event(stream))

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Nothing: loads were issued before the forward, on a stream that it follows."""

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Nothing: a block is saved whole, when the pass is over."""

    def wait_for_save(self, stream: Any) -> None:
        """Copy the blocks that this pass completed from their pages to their slots; storing them waits for nobody."""
        plan, arena = self._plan(), self._seat.arena
        if plan is None or arena is None or plan.step <= self._saved_step:
            return
        self._saved_step = plan.step
        arena.saves_begun(plan.step)
        if not plan.saves:
            return
        with self._on(stream):
            for save in plan.saves:
                if save.rank == self._runtime.rank:
                    self._copy(arena, save, Direction.SAVE)
        arena.saves_done(plan.step, self._event(stream))

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """Nothing is ever awaited: no request is parked and no page is kept."""
        return [], []

    def shutdown(self) -> None:
        """Wait, for a bounded time, until what was saved is stored. The scheduler's ``shutdown`` ends the threads."""
        if self._seat.arena is not None:
            self._seat.arena.close(EXIT_FLUSH_S)
        if self._seat.stager is not None:
            self._seat.stager.flush(EXIT_FLUSH_S)

    def _layout_of_tensor(self, tensor: torch.Tensor) -> LayoutView:
        size = tokens_per_block(self._llm_args)
        if not size:
            raise ValueError(
                "tracekv: the single KV cache tensor doesn't say how many tokens a block has, and llm_args has no "
                "kv_cache_config.tokens_per_block. Pass llm_args that have it, or register a KvCacheLayout."
            )
        return layout_of_tensor(tensor, size)

    def _register(self, layout: Callable[[], LayoutView]) -> None:
        node = meet(self._runtime, self._settings, layout)
        groups = node.layout.groups
        self._regions = {group.layer_group_id: [region.slots() for region in group.regions] for group in groups}
        self._seat.register(node)

    def _plan(self) -> StepPlan | None:
        plan = self.get_connector_meta()
        return plan if isinstance(plan, StepPlan) else None

    def _copy(self, arena: WorkerArena, copy: Copy, direction: Direction) -> None:
        """Move whole pages, region after region within a slot, and report it."""
        started = perf_counter_ns()
        memory = self._arena_tensor(arena)
        shard = Shard(copy.layer_group, copy.rank)
        regions = self._regions[copy.layer_group]
        nbytes = 0
        for page, number, generation in zip(copy.pages, copy.slots, copy.generations, strict=True):
            at, _ = arena.extent(shard, number, generation)
            for region in regions:
                if not 0 <= page < len(region):
                    raise IndexError(
                        f"page slot {page} of layer group {copy.layer_group} is outside [0, {len(region)})"
                    )
                row, size = region[page], region.shape[1]
                slot = memory[at : at + size]
                if direction is Direction.LOAD:
                    row.copy_(slot, non_blocking=True)
                else:
                    slot.copy_(row, non_blocking=True)
                at += size
                nbytes += size
        ended = perf_counter_ns()
        tracekv.transfer(
            direction,
            copy.request_id,
            copy.layer_group,
            copy.pages,
            nbytes,
            copy.tier,
            started,
            ended,
            tokens=copy.tokens,
            queued_ns=copy.queued_ns,
            read_ns=copy.read_ns,
            verify_ns=copy.verify_ns,
            copy_ns=ended - started,
        )

    def _arena_tensor(self, arena: WorkerArena) -> torch.Tensor:
        if self._arena is None:
            self._arena = torch.frombuffer(arena.buffer, dtype=torch.uint8)
        return self._arena

    def _is_on_gpu(self) -> bool:
        return any(region.is_cuda for regions in self._regions.values() for region in regions)

    def _on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(stream) if self._is_on_gpu() else contextlib.nullcontext()

    def _event(self, stream: Any) -> Any:
        """What is done when everything issued on ``stream`` so far is; None on the CPU, where it is done by now."""
        record = getattr(stream, "record_event", None)
        return record() if record is not None else None
