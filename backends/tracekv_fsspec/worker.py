"""The workers' half: copies between pages and the arena's slots, as the pass's metadata says. It does no I/O."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tracekv.contract import KvCacheConnectorWorker
from tracekv.contract.reading import LayoutView, layout_of, layout_of_tensor, tokens_per_block
from tracekv.settings import load_section
from tracekv_fsspec import seats
from tracekv_fsspec.collected import WhenCollected
from tracekv_fsspec.modes import checked
from tracekv_fsspec.node import meet, runtime_of
from tracekv_fsspec.parked import ParkedRequests
from tracekv_fsspec.pinning import pin_for_gpu
from tracekv_fsspec.plan import StepPlan
from tracekv_fsspec.settings import Settings
from tracekv_fsspec.stager import EXIT_FLUSH_S
from tracekv_fsspec.transfers import LayerHooksMissing, Transfers, hooks_surely_run

if TYPE_CHECKING:
    import torch

    from tracekv.contract import KvCacheLayout
    from tracekv_fsspec.worker_arena import WorkerArena

_log = logging.getLogger("tracekv.fsspec")


class Worker(KvCacheConnectorWorker):
    """The worker half of the persistent connector. Called on the executor's thread.

    Args:
        llm_args: The engine's arguments; what pairs it with the scheduler of its process (see ``seats``).

    Raises:
        SettingsError: A setting is wrong.
        UnknownRuntime: The rank can't be told.
    """

    #: Each rank is an engine of its own then (``node.runtime_of``), with ``TRACEKV_FSSPEC__ARENA_BYTES`` of its own.
    supports_attention_dp = True

    def __init__(self, llm_args: Any = None) -> None:
        super().__init__(llm_args)
        self._settings = load_section("fsspec", Settings)
        self._runtime = runtime_of(llm_args)
        self._seat = seats.Seat(llm_args)
        self._transfers: Transfers | None = None
        self._unpin: Callable[[], None] | None = None
        self._collected: WhenCollected | None = None
        self._unhooked: set[int] | None = None
        self._parked: ParkedRequests | None = None
        self._loaded_step = 0
        self._parked_step = 0
        self._saved_step = 0

    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None:
        """Take the single pool; its block size is the engine's argument ``kv_cache_config.tokens_per_block``. Collective.

        Raises:
            ValueError: The engine's arguments don't say it.
            RuntimeError, NotImplementedError: As :func:`tracekv_fsspec.node.meet`.
        """
        self._register(lambda: checked(self._settings, self._layout_of_tensor(kv_cache_tensor)))

    def register_kv_cache_layout(self, layout: KvCacheLayout) -> None:
        """Take pools by layer group. Collective, and raises as :func:`tracekv_fsspec.node.meet`."""
        self._register(lambda: checked(self._settings, layout_of(layout)))

    def start_load_kv(self, stream: Any) -> None:
        """Issue the pass's loads, from their slots to their pages, on ``stream`` or beside the forward pass, layer by layer."""
        self._join(stream)
        plan, transfers, arena = self._plan(), self._transfers, self._seat.arena
        if plan is None or transfers is None or arena is None or plan.step <= self._loaded_step:
            return
        self._loaded_step = plan.step
        arena.loads_begun(plan.step)
        if plan.loads:
            transfers.load(plan.step, plan.loads, stream)

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Hold the forward pass back until the KV of this layer is in its pages. Nothing, where loads preceded the pass."""
        transfers = self._transfers
        if transfers is None:
            return
        if transfers.is_loading:
            transfers.wait_for_layer(layer_idx, stream)
        elif self._unhooked is not None:
            self._saw_hook(transfers, layer_idx)

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Nothing: a block is saved whole, when the pass is over."""

    def wait_for_save(self, stream: Any) -> None:
        """Copy the blocks that this pass completed from their pages to their slots; storing them waits for nobody.

        Raises:
            LayerHooksMissing: The pass read pages that nothing had held it back for. Its requests fail, and nothing of it is saved.
        """
        unhooked = self._join(stream)
        plan, transfers, arena = self._plan(), self._transfers, self._seat.arena
        if unhooked and transfers is not None:
            transfers.by_layer = False
            raise LayerHooksMissing(
                f"tracekv: a forward pass called wait_for_layer_load for all but {len(unhooked)} of the layers that were being "
                "loaded beside it, so it may have read KV that wasn't there yet. From now on loads precede the pass. Set "
                "TRACEKV_FSSPEC__LAYERWISE=off for this engine (CUDA graphs and compiled layers call no hooks)."
            )
        if plan is None or transfers is None or arena is None or plan.step <= self._saved_step:
            return
        self._saved_step = plan.step
        arena.saves_begun(plan.step)
        if plan.saves:
            transfers.save(plan.step, plan.saves, stream)

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """Parked requests whose blocks are in the arena by now; no page is kept for a save, so there is never one to tell of.

        Joins the loads of a pass that came to no end.

        Raises:
            ParkedLoadFailed: Blocks that were promised can't be had (``TRACEKV_FSSPEC__OFFER=async`` only).
        """
        self._join(None)
        plan, parked = self._plan(), self._parked
        if parked is None:
            return [], []
        if plan is not None and plan.step > self._parked_step:
            self._parked_step = plan.step
            parked.named(plan.parked)
        return [], parked.finished(started_loading_req_ids)

    def shutdown(self) -> None:
        """Wait, for a bounded time, until what was saved is stored. The scheduler's ``shutdown`` ends the threads."""
        if self._collected is not None:
            self._collected.is_done()
        if self._transfers is not None:
            self._transfers.close()
        if self._seat.arena is not None:
            self._seat.arena.close(EXIT_FLUSH_S)
        if self._unpin is not None:
            self._unpin()
            self._unpin = None
        if self._seat.stager is not None:
            self._seat.stager.flush(EXIT_FLUSH_S)
        elif self._seat.node is not None:
            self._seat.node.file.close()  # no scheduler came to own it, or this isn't the leader

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
        self._seat.register(node)
        self._unpin = pin_for_gpu(node.layout, node.file.buffer)
        if self._seat.arena is not None:
            if self._unpin is not None:  # memory that stays registered with CUDA is never given back
                arena, unpin = self._seat.arena, self._unpin
                self._collected = WhenCollected(self, lambda: _end(arena, unpin))
            self._parked = ParkedRequests(self._seat.arena)
            wanted = self._settings.layerwise
            self._transfers = Transfers(node.layout, self._seat.arena, node.rank, by_layer=wanted == "on")
            if wanted == "auto" and hooks_surely_run(self._llm_args):
                self._unhooked = self._transfers.layers

    def _plan(self) -> StepPlan | None:
        plan = self.get_connector_meta()
        return plan if isinstance(plan, StepPlan) else None

    def _join(self, stream: Any) -> set[int]:
        """Wait for loads that are left of a pass; the layers that it didn't wait for itself."""
        transfers = self._transfers
        return transfers.join(stream) if transfers is not None and transfers.is_loading else set()

    def _saw_hook(self, transfers: Transfers, layer: int) -> None:
        """Loads go beside the forward pass only after hooks were seen for every layer, whatever the engine's arguments say."""
        assert self._unhooked is not None
        self._unhooked.discard(layer)
        if not self._unhooked:
            self._unhooked = None
            transfers.by_layer = True


def _end(arena: WorkerArena, unpin: Callable[[], None]) -> None:
    arena.close(EXIT_FLUSH_S)
    unpin()
