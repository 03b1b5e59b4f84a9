"""An engine that hangs where it is told to: run as a process, and killed there."""

from __future__ import annotations

import sys
import threading
from time import perf_counter_ns

import tracekv
from tests.support.connectors import FlatScheduler, TensorWorker, request
from tracekv.contract import (
    KvCacheBufferRef,
    KvCacheLayerGroupLayout,
    KvCacheLayout,
    KvCacheRegion,
    RequestData,
    SchedulerOutput,
)
from tracekv.journal.vocabulary import Direction, Tier


class Leader(FlatScheduler):
    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 64, False


class Worker(TensorWorker):
    hangs_in = ""

    def register_kv_cache_layout(self, layout):
        pass

    def _hang(self, where: str) -> None:
        if self.hangs_in == where:
            print(where, flush=True)
            threading.Event().wait()

    def start_load_kv(self, stream):
        now = perf_counter_ns()
        tracekv.transfer(Direction.LOAD, 7, 0, [3], 1024, Tier.HOST, now, now + 1)
        self._hang("start_load_kv")

    def wait_for_layer_load(self, layer_idx, stream):
        self._hang(f"layer {layer_idx}")

    def wait_for_save(self, stream):
        self._hang("wait_for_save")


def layout() -> KvCacheLayout:
    def region(layer: int) -> KvCacheRegion:
        return KvCacheRegion(
            4096, 1024, 1024, 16, (KvCacheBufferRef(layer, "key"), KvCacheBufferRef(layer, "value")), "cpu"
        )

    groups = (
        KvCacheLayerGroupLayout(0, (0, 1), None, (region(0),)),
        KvCacheLayerGroupLayout(1, (2, 3), 64, (region(2),)),
    )
    return KvCacheLayout(32, groups)


def main(where: str) -> None:
    Worker.hangs_in = where
    leader, worker = tracekv.trace(Leader)(None), tracekv.trace(Worker)(None)
    worker.register_kv_cache_layout(layout())
    asked = request(7, prompt_len=128, py_num_connector_matched_tokens=64)
    leader.get_num_new_matched_tokens(asked, 0)
    leader.update_state_after_alloc(asked, [3, 4, 5, 6])
    waiting = request(8, prompt_len=256)
    leader.get_num_new_matched_tokens(waiting, 0)
    data = RequestData(7, [1] * 64, [3, 4, 5, 6], 64, 64)
    worker.bind_connector_meta(leader.build_connector_meta(SchedulerOutput([data], [])))
    worker.start_load_kv(None)
    for layer in range(4):
        worker.wait_for_layer_load(layer, None)
    worker.wait_for_save(None)
    worker.get_finished([], [])
    worker._hang("between")


if __name__ == "__main__":
    main(sys.argv[1])
