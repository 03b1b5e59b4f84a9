"""The engine of ``bench overhead``: steps of about 10 ms of real work, a bare pair and a traced pair taking turns.

A process of its own, pinned to one core. Reads nothing; writes one JSON object to standard output at its end.
"""

from __future__ import annotations

import json
import os
import sys
from time import perf_counter_ns, thread_time_ns
from typing import Any

from tracekv import capture
from tracekv.bench.overhead import LAYERS, NullScheduler, NullWorker, TensorShape
from tracekv.contract import RequestData, SchedulerOutput

STEP_NS = 10_000_000
REQUESTS = 8
#: Steps that one pair makes before the other takes its turn: few, so that what slows the machine down slows both.
TURN = 2
_WARM_UP = 25


class _Work:
    """One layer's worth of arithmetic, sized so that a step of all layers takes about 10 ms."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)
        self._left, self._right = torch.randn(64, 512), torch.randn(512, 512)
        self._repeats = 1
        target = STEP_NS / LAYERS
        self.layer()
        took = min(self._timed() for _ in range(50))
        self._repeats = max(1, round(target / took))

    def _timed(self) -> int:
        started = perf_counter_ns()
        self.layer()
        return perf_counter_ns() - started

    def layer(self) -> None:
        """Multiply."""
        for _ in range(self._repeats):
            self._left @ self._right


class _Pair:
    """A connector pair with the requests that it decodes."""

    def __init__(self, scheduler: Any, worker: Any) -> None:
        self.scheduler, self.worker = scheduler, worker
        self.worker.register_kv_caches(TensorShape())
        self._position = 1000

    def step(self, work: _Work) -> None:
        """One pass, as the runtime calls it."""
        self._position += 1
        output = SchedulerOutput([], [RequestData(i, [5], [], self._position, 1) for i in range(REQUESTS)])
        worker = self.worker
        worker.bind_connector_meta(self.scheduler.build_connector_meta(output))
        worker.start_load_kv(None)
        for layer in range(LAYERS):
            worker.wait_for_layer_load(layer, None)
            work.layer()
            worker.save_kv_layer(layer, None)
        worker.wait_for_save(None)
        worker.get_finished([], [])


def main(turns: int, core: int) -> None:
    """Run ``turns`` turns of each pair on ``core``."""
    os.sched_setaffinity(0, {core})
    work = _Work()
    pairs = {
        "bare": _Pair(NullScheduler(None), NullWorker(None)),
        "traced": _Pair(capture.trace(NullScheduler)(None), capture.trace(NullWorker)(None)),
    }
    for pair in pairs.values():
        for _ in range(_WARM_UP):
            pair.step(work)
    wall: dict[str, list[list[int]]] = {name: [] for name in pairs}
    cpu: dict[str, list[float]] = {name: [] for name in pairs}
    for turn in range(2 * turns):
        name = ("bare", "traced")[(turn + turn // 2) % 2]
        pair = pairs[name]
        times = []
        cpu_before = thread_time_ns()
        for _ in range(TURN):
            started = perf_counter_ns()
            pair.step(work)
            times.append(perf_counter_ns() - started)
        cpu[name].append((thread_time_ns() - cpu_before) / TURN)
        wall[name].append(times)
    flushed = capture.shutdown(timeout_s=30)
    sys.stdout.write(
        json.dumps(
            {
                "wall_ns": wall,
                "cpu_ns_per_step": cpu,
                "flushed": flushed,
                "heavy": [name for name in ("pydantic", "typer", "rich", "opentelemetry.sdk") if name in sys.modules],
            }
        )
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
