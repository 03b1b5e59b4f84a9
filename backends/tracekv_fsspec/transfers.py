"""One rank's copies, pass by pass: when they are issued, who waits for them, and how they come on the trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

import tracekv
from tracekv.contract.reading import LayoutView
from tracekv.journal.vocabulary import Direction
from tracekv_fsspec.index import Shard
from tracekv_fsspec.loading import HostLoading, Job, Loading, StreamCopies, StreamLoading
from tracekv_fsspec.moving import Moves, Piece, check_pages, layer_by_layer, mover_for, regions_of, whole_page
from tracekv_fsspec.plan import Copy
from tracekv_fsspec.worker_arena import WorkerArena

#: Less than this isn't loaded layer by layer: it is copied before a thread has woken up.
LAYERWISE_BYTES = 1 << 20


class LayerHooksMissing(RuntimeError):
    """A forward pass ran without the hooks that hold each layer back until its KV is loaded, so its results are wrong."""


class Transfers:
    """Copies between the caches and the arena's slots. Called on the executor's thread.

    Args:
        layout: The caches.
        rank: Whose copies of a plan are made.
        by_layer: Whether loads may run beside the forward pass, held back by :meth:`wait_for_layer`.
    """

    def __init__(self, layout: LayoutView, arena: WorkerArena, rank: int, *, by_layer: bool) -> None:
        self._arena = arena
        self._rank = rank
        self._slots = {group: min(map(len, regions)) for group, regions in regions_of(layout).items()}
        self._mover = mover_for(layout, arena.buffer)
        self._page_bytes = {group.layer_group_id: group.bytes_per_page for group in layout.groups}
        self._whole = {group.layer_group_id: whole_page(group) for group in layout.groups}
        self._by_layer: dict[int, dict[int, list[Piece]]] = {}
        for group in layout.groups:
            of_group = self._by_layer.setdefault(group.layer_group_id, {})
            for piece in layer_by_layer(group):
                of_group.setdefault(piece.layer, []).append(piece)
        devices = {region.device for regions in regions_of(layout).values() for region in regions}
        self._gpu = next((device for device in devices if device.type == "cuda"), None)
        self._side: Any = None
        self._thread: ThreadPoolExecutor | None = None
        self._loading: Loading | None = None
        self._loading_step = 0
        self.by_layer = by_layer

    @property
    def layers(self) -> set[int]:
        """Every layer that has bytes of its own in a page."""
        return {layer for of_group in self._by_layer.values() for layer in of_group}

    @property
    def is_loading(self) -> bool:
        """Whether loads of a pass may still be under way."""
        return self._loading is not None

    def load(self, step: int, loads: Sequence[Copy], stream: Any) -> None:
        """Issue a pass's loads: whole, so that everything that follows on ``stream`` follows them, or layer by layer.

        Raises:
            StaleSlot, IndexError: A slot or a page isn't what the plan says. Nothing of the pass was copied.
        """
        jobs = self._jobs(loads)
        if jobs and self.by_layer and sum(job.nbytes for job in jobs) >= LAYERWISE_BYTES:
            self._loading, self._loading_step = self._begin(jobs, stream), step
        else:
            self._arena.loads_done(step, self._issue(Direction.LOAD, jobs, stream))

    def save(self, step: int, saves: Sequence[Copy], stream: Any) -> None:
        """Issue a pass's saves on ``stream``; raises as :meth:`load`."""
        self._arena.saves_done(step, self._issue(Direction.SAVE, self._jobs(saves), stream))

    def wait_for_layer(self, layer: int, stream: Any) -> None:
        """Let the forward pass go on when the loads of its layers up to ``layer`` are over."""
        if self._loading is not None:
            self._loading.wait(layer, stream)

    def join(self, stream: Any = None) -> set[int]:
        """Wait for what is left of a pass's loads. Returns the layers that were loaded and never waited for.

        Args:
            stream: What follows on it follows the loads; None for torch's current one.
        """
        loading, self._loading = self._loading, None
        if loading is None:
            return set()
        if self._gpu is None:
            loading.join(stream)
            self._report(Direction.LOAD, loading.jobs, loading.settle)
            self._arena.loads_done(self._loading_step)
        else:
            stream = stream or torch.cuda.current_stream(self._gpu)
            loading.join(stream)
            over = _Over(stream.record_event(), lambda: self._report(Direction.LOAD, loading.jobs, loading.settle))
            self._arena.loads_done(self._loading_step, over)
        return loading.unasked

    def close(self) -> None:
        """End the thread, when its loads are over."""
        self.join()
        if self._thread is not None:
            self._thread.shutdown()

    def _jobs(self, copies: Sequence[Copy]) -> list[Job]:
        jobs = []
        for copy in copies:
            if copy.rank != self._rank:
                continue
            shard = Shard(copy.layer_group, copy.rank)
            starts, slot_bytes = self._arena.starts(shard, copy.slots, copy.generations)
            moves = Moves(copy.layer_group, copy.pages, starts, slot_bytes)
            check_pages(moves, self._slots[copy.layer_group])
            jobs.append(Job(copy, moves, self._page_bytes[copy.layer_group] * len(copy.pages)))
        return jobs

    def _begin(self, jobs: Sequence[Job], stream: Any) -> Loading:
        if self._gpu is None:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="tracekv-load")
            return HostLoading(self._mover, jobs, self._by_layer, self._thread)
        if self._side is None:
            self._side = torch.cuda.Stream(self._gpu)  # type: ignore[no-untyped-call]
        return StreamLoading(self._mover, jobs, self._by_layer, self._side, stream)

    def _issue(self, direction: Direction, jobs: Sequence[Job], stream: Any) -> _Over | None:
        """Copy at once. Returns what is over when the copies are; None where they are over now."""
        if not jobs:
            return None
        move = self._mover.load if direction is Direction.LOAD else self._mover.save
        if self._gpu is not None:
            issued = StreamCopies.issue(move, jobs, self._whole, stream)
            return _Over(stream.record_event(), lambda: self._report(direction, jobs, issued.settle))
        for job in jobs:
            job.run(move, self._whole[job.copy.layer_group])
            job.stall_ns = job.copy_ns
        self._report(direction, jobs)
        return None

    @staticmethod
    def _report(direction: Direction, jobs: Sequence[Job], settle: Callable[[], None] = lambda: None) -> None:
        settle()
        for job in jobs:
            copy = job.copy
            tracekv.transfer(
                direction,
                copy.request_id,
                copy.layer_group,
                copy.pages,
                job.nbytes,
                copy.tier,
                job.started_ns,
                job.ended_ns,
                tokens=copy.tokens,
                queued_ns=copy.queued_ns,
                read_ns=copy.read_ns,
                verify_ns=copy.verify_ns,
                copy_ns=job.copy_ns,
                stall_ns=job.stall_ns,
            )


class _Over:
    """An event on a GPU's stream with what is told once it is over: how long the copies took isn't known before."""

    def __init__(self, event: Any, then: Callable[[], None]) -> None:
        self._event = event
        self._then = then

    def synchronize(self) -> None:
        """Wait for it, on a thread that may."""
        self._event.synchronize()
        self._then()


def hooks_surely_run(llm_args: Any) -> bool:
    """Whether the engine's arguments leave no forward pass without its per-layer hooks.

    They are called by the layers' modules, so a replayed CUDA graph calls none, compiled code may not, and layers that draft tokens
    have none. Arguments that don't say so leave it open, which is no.

    Source: contract.md section 4.4.
    """
    unknown = object()
    return (
        getattr(llm_args, "cuda_graph_config", unknown) is None
        and getattr(llm_args, "torch_compile_config", None) is None
        and getattr(llm_args, "speculative_config", None) is None
        and getattr(llm_args, "backend", None) in (None, "pytorch")
    )
