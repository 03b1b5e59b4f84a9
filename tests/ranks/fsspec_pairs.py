"""Halves of the persistent connector that ranks load by name, each wrong in one way, and what tests look at in the ranks."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from time import monotonic

from tracekv.contract import current_runtime
from tracekv.harness.requests import RequestState
from tracekv_fsspec import Scheduler, Worker, parking
from tracekv_fsspec.index import Shard


class SpoilsASlotOnRank1(Worker):
    """Changes a byte of each slot that rank 1 is to load: the highest one of a float, so that the number becomes another."""

    def start_load_kv(self, stream):
        arena, plan = self._seat.arena, self.get_connector_meta()
        if current_runtime().rank == 1:
            for load in plan.loads:
                for number, generation in zip(load.slots, load.generations, strict=True):
                    if load.rank == 1:
                        start, _ = arena.extent(Shard(load.layer_group, 1), number, generation)
                        arena.buffer[start + 3] ^= 0x80
        super().start_load_kv(stream)


class StaleOnRank1(Worker):
    """Rank 1's slots are given to other blocks between the plan and the loads."""

    def start_load_kv(self, stream):
        arena, plan = self._seat.arena, self.get_connector_meta()
        if current_runtime().rank == 1:
            for load in plan.loads:
                if load.rank == 1:
                    _, _, generations = arena._places[Shard(load.layer_group, 1)]
                    generations[load.slots[-1]] += 1
        super().start_load_kv(stream)


class HoldsReadsUp(Scheduler):
    """No segment that is read comes before ``may_read`` is set."""

    def wait_for_initialization(self):
        super().wait_for_initialization()
        self.may_read = threading.Event()
        store = self._engine.stager.store
        read = store.read

        def held_up(path, ranges, into):
            if path.endswith(".seg"):
                self.may_read.wait()
            read(path, ranges, into)

        store.read = held_up


class Dies(Worker):
    """Kills its process where ``TEST_VICTIM`` names its rank: when it has issued the copies of a pass (``1 loads``, ``1 saves``), or
    when it is asked again about a request that every rank holds (``1 parked``)."""

    _is_holding = False

    def get_finished(self, finished_gen_req_ids, started_loading_req_ids):
        self._die("parked", self._is_holding)
        self._is_holding |= bool(started_loading_req_ids)
        return super().get_finished(finished_gen_req_ids, started_loading_req_ids)

    def start_load_kv(self, stream):
        super().start_load_kv(stream)
        self._die("loads", self.get_connector_meta().loads)

    def wait_for_save(self, stream):
        super().wait_for_save(stream)
        self._die("saves", self.get_connector_meta().saves)

    def _die(self, where, is_there):
        if is_there and os.environ["TEST_VICTIM"] == f"{current_runtime().rank} {where}":
            os.kill(os.getpid(), signal.SIGKILL)


class OtherBlockSizeOnRank1(Worker):
    def register_kv_cache_layout(self, layout):
        if current_runtime().rank == 1:
            layout = dataclasses.replace(layout, tokens_per_block=16)
        super().register_kv_cache_layout(layout)


class OnAHostOfItsOwn(Worker):
    def __init__(self, llm_args):
        super().__init__(llm_args)
        self._runtime = dataclasses.replace(self._runtime, host=f"host-{self._runtime.rank}")


def cancels_and_destroys(executor, requests):
    """Takes the first request's pages in the middle of its prompt, and cancels the second there."""
    executor.step()
    executor.destroy(requests[0], forget=True)
    executor.step()
    executor.cancel(requests[1])
    executor.step()


def cancels_what_is_parked(executor, requests):
    """Cancels the second request while it is held and the last one runs; then blocks come, and its pins go by time."""
    parking.PINS_S = 0.2
    executor.step()
    held = [request.state is RequestState.DISAGG_GENERATION_TRANS_IN_PROGRESS for request in requests]
    assert held == [True, True, False]
    executor.cancel(requests[1])
    executor.step()
    assert requests[1].is_cancelled
    if executor.scheduler is not None:
        executor.scheduler.may_read.set()
    executor.run()
    if executor.scheduler is not None:
        parked, deadline = executor.scheduler._engine.stager.parking._runs, monotonic() + 20
        while parked and monotonic() < deadline:
            threading.Event().wait(0.01)


def arena_at_rest(executor):
    """By rank 0, when it is shut down: slots that could be had, all of them, and copies under way; None by the others."""
    if executor.scheduler is None:
        return None
    stager = executor.scheduler._engine.stager
    return (
        {shard: stager.arena.free_slots(shard) for shard in stager.arena.shards},
        stager.arena.slots_per_shard,
        len(stager.copies._parts),
    )
