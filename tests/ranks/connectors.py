"""Connectors that ranks load by name, and what tests look at in the ranks' processes.

A rank's process keeps its modules from job to job, so what a job stored is there for the next one.
"""

from __future__ import annotations

import os
import signal
import threading

from tests.harness.memory_connector import memory_pair
from tests.harness.recording import Recorder, recording_pair
from tracekv.contract import current_runtime

STORE = {}
MemoryScheduler, MemoryWorker = memory_pair(STORE)


class DataParallelScheduler(MemoryScheduler):
    supports_attention_dp = True


class DataParallelWorker(MemoryWorker):
    supports_attention_dp = True


class SpoilsOnRank1(MemoryWorker):
    """Loads zeros in place of rank 1's share of the KV."""

    def start_load_kv(self, stream):
        super().start_load_kv(stream)
        if current_runtime().rank == 1:
            for _, _, group, slot in self._metadata[0]:
                self.page(group, slot).zero_()


def forget(executor):
    STORE.clear()


def stored(executor):
    """Pages that this rank stored, and the bytes of one."""
    return len(STORE), {page.nbytes for page in STORE.values()}


RECORDER = Recorder()
_Scheduler, _Worker = recording_pair(RECORDER)


class SavingScheduler(_Scheduler):
    """Saves asynchronously; its metadata is an object that remembers who made it."""

    def __init__(self, llm_args):
        super().__init__(llm_args)
        RECORDER.calls.clear()
        self.built = []

    def build_connector_meta(self, scheduler_output):
        super().build_connector_meta(scheduler_output)
        self.built.append(Plan(os.getpid()))
        return self.built[-1]

    def request_finished(self, request, cache_block_ids):
        RECORDER.answers["request_finished"].append(True)
        return super().request_finished(request, cache_block_ids)


class Plan:
    def __init__(self, pid):
        self.pid = pid


class LateOnRank1(_Worker):
    """Returns a saved id in the poll after it was announced, on rank 1 one poll later still."""

    def __init__(self, llm_args):
        super().__init__(llm_args)
        if current_runtime().rank:
            RECORDER.calls.clear()
        self.bound = []
        self.tensor_parallel_size = llm_args.tensor_parallel_size

    def bind_connector_meta(self, metadata):
        super().bind_connector_meta(None)
        self.bound.append(metadata)

    def get_finished(self, finished_gen_req_ids, started_loading_req_ids):
        rank = current_runtime().rank
        if finished_gen_req_ids:
            RECORDER.answers["get_finished"].extend([([], [])] * (1 + rank))
            RECORDER.answers["get_finished"].append((list(finished_gen_req_ids), []))
        return super().get_finished(finished_gen_req_ids, started_loading_req_ids)


def recorded(executor):
    """What reached this rank's half, and whose object the bound metadata is."""
    built = executor.scheduler.built if executor.scheduler else []
    return {
        "calls": RECORDER.calls,
        "made by": [plan.pid for plan in executor.worker.bound],
        "is the leader's own object": any(plan in built for plan in executor.worker.bound),
        "pid": os.getpid(),
        "tensor_parallel_size": executor.worker.tensor_parallel_size,
        "gathered": current_runtime().allgather(("from", current_runtime().rank)),
        "pages held": [pool.num_slots - pool.available for pool in executor.cache.pools],
    }


class AsksWithAnError(MemoryScheduler):
    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        raise ValueError("own error of the connector")


class DiesOnRank1(MemoryWorker):
    def start_load_kv(self, stream):
        if current_runtime().rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


class FailsASaveOnRank1(MemoryWorker):
    def wait_for_save(self, stream):
        if current_runtime().rank == 1:
            raise OSError("the store of rank 1 is full")


class FailsALayerOnRank1(MemoryWorker):
    def save_kv_layer(self, layer_idx, stream):
        if current_runtime().rank == 1 and layer_idx == 0:
            raise OSError("the store of rank 1 is full")


class NeverComesBack(MemoryWorker):
    def start_load_kv(self, stream):
        if current_runtime().rank == 1:
            threading.Event().wait()
