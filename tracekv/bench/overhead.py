"""What tracing costs the engine thread: per forward pass, per callback."""

from __future__ import annotations

import os
from collections.abc import Callable
from time import perf_counter, perf_counter_ns
from types import SimpleNamespace
from typing import Any

import msgspec

from tracekv import capture
from tracekv.bench.rounds import Spread, interleave, journal_folder, paired
from tracekv.contract import KvCacheConnectorScheduler, KvCacheConnectorWorker, RequestData, SchedulerOutput

LAYERS = 61
NEW_IDS = 2_000
DECODING = 256
_READINGS = 100


class CaptureCost(msgspec.Struct):
    """Microseconds on the engine's thread; medians of interleaved rounds, spreads as ``[low, high]``.

    Attributes:
        clock_ns: One reading of the hooks' clock, in a loop.
    """

    layers: int
    rounds: int
    clock_ns: float
    bare_us_per_pass: float
    traced_us_per_pass: float
    span_per_hook_us_per_pass: float
    added_us_per_pass: float
    ratio_span_per_hook: float
    added_us_per_callback: dict[str, float]
    spread: dict[str, list[float]]


class NullWorker(KvCacheConnectorWorker):
    """Does nothing: what is measured is what stands around it."""

    def register_kv_caches(self, kv_cache_tensor: Any) -> None:
        pass

    def start_load_kv(self, stream: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        pass

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        pass

    def wait_for_save(self, stream: Any) -> None:
        pass

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        return [], []


class NullScheduler(KvCacheConnectorScheduler):
    """Offers nothing."""

    def build_connector_meta(self, scheduler_output: Any) -> object:
        return None

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        pass

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        return False


def measure(rounds: int = 15, passes: int = 200) -> CaptureCost:
    """Measure in this process, which must not trace anything yet; journals go to a temporary folder."""
    with journal_folder() as folder:
        before = {name: os.environ.get(name) for name in _ENVIRON}
        os.environ.update(_ENVIRON, TRACEKV_JOURNAL_DIR=folder)
        capture.shutdown()
        try:
            return _measure(rounds, passes)
        finally:
            capture.shutdown()
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


# The budget must not cut in: a loop of nothing but callbacks is all tracing.
_ENVIRON = {"TRACEKV_AGENT": "off", "TRACEKV_DETAIL": "full", "TRACEKV_BUDGET_PCT": "100", "TRACEKV_JOURNAL_DIR": ""}


def _measure(rounds: int, passes: int) -> CaptureCost:
    scheduler, worker = capture.trace(NullScheduler)(None), capture.trace(NullWorker)(None)
    worker.register_kv_caches(TensorShape())
    bare_scheduler, bare_worker = NullScheduler(None), NullWorker(None)
    request = SimpleNamespace(request_id=1, prompt_len=64_000, py_num_connector_matched_tokens=0)
    blocks = list(range(NEW_IDS))
    output = SchedulerOutput([], [RequestData(i, [5], [], 1000 + i, 1) for i in range(DECODING)])
    results = interleave(
        {
            "bare": lambda: _per_call(lambda: _pass(bare_worker), passes),
            "traced": lambda: _per_call(lambda: _pass(worker), passes),
            "span": _SpanPerHook(passes),
            "alloc bare": lambda: _per_call(lambda: bare_scheduler.update_state_after_alloc(request, blocks), passes),
            "alloc": lambda: _per_call(lambda: scheduler.update_state_after_alloc(request, blocks), passes),
            "build bare": lambda: _per_call(lambda: bare_scheduler.build_connector_meta(output), passes),
            "build": lambda: _per_call(lambda: scheduler.build_connector_meta(output), passes),
            "idle bare": lambda: _per_call(lambda: bare_worker.get_finished([], []), passes),
            "idle": lambda: _per_call(lambda: worker.get_finished([], []), passes),
            "clock": lambda: _per_call(_read_clock, passes) / _READINGS,
        },
        rounds,
    )
    spreads = {name: Spread.of(values) for name, values in results.items()}
    added = {
        name: paired(results, name, f"{name} bare", lambda mine, theirs: mine - theirs)
        for name in ("alloc", "build", "idle")
    }
    whole = paired(results, "traced", "bare", lambda mine, theirs: mine - theirs)
    ratio = paired(results, "span", "traced", lambda mine, theirs: mine / theirs)
    return CaptureCost(
        LAYERS,
        rounds,
        clock_ns=spreads["clock"].median * 1000,
        bare_us_per_pass=spreads["bare"].median,
        traced_us_per_pass=spreads["traced"].median,
        span_per_hook_us_per_pass=spreads["span"].median,
        added_us_per_pass=whole.median,
        ratio_span_per_hook=ratio.median,
        added_us_per_callback={
            f"update_state_after_alloc, {NEW_IDS} new ids": added["alloc"].median,
            f"build_connector_meta, {DECODING} decoding requests": added["build"].median,
            "get_finished, idle": added["idle"].median,
        },
        spread={
            "bare_us_per_pass": [spreads["bare"].low, spreads["bare"].high],
            "traced_us_per_pass": [spreads["traced"].low, spreads["traced"].high],
            "span_per_hook_us_per_pass": [spreads["span"].low, spreads["span"].high],
            "added_us_per_pass": [whole.low, whole.high],
            "ratio_span_per_hook": [ratio.low, ratio.high],
            "alloc": [added["alloc"].low, added["alloc"].high],
            "build": [added["build"].low, added["build"].high],
            "idle": [added["idle"].low, added["idle"].high],
        },
    )


class TensorShape:
    """As much of a tensor as registering reads, so that the benchmark needs no torch."""

    shape = (16, LAYERS, 2, 64)
    dtype = "bfloat16"

    def element_size(self) -> int:
        return 2

    def stride(self, dimension: int) -> int:
        return LAYERS * 2 * 64


def _pass(worker: Any) -> None:
    """The hooks of one forward pass and what closes it."""
    for layer in range(LAYERS):
        worker.wait_for_layer_load(layer, None)
        worker.save_kv_layer(layer, None)
    worker.wait_for_save(None)


def _read_clock() -> None:
    for _ in range(_READINGS):
        perf_counter()


def _per_call(call: Callable[[], object], calls: int) -> float:
    """Median of single calls, in microseconds: a pause of the machine in one of them doesn't count."""
    times = []
    for _ in range(calls):
        started = perf_counter_ns()
        call()
        times.append(perf_counter_ns() - started)
    times.sort()
    return times[len(times) // 2] / 1000


class _SpanPerHook:
    """The usual way: an OpenTelemetry SDK span around each hook, no attributes, a batch processor, an exporter that drops all."""

    def __init__(self, passes: int) -> None:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

        class Null(SpanExporter):
            def export(self, spans: Any) -> SpanExportResult:
                return SpanExportResult.SUCCESS

        self._passes = max(10, passes // 10)
        provider = TracerProvider()
        provider.add_span_processor(BatchSpanProcessor(Null()))
        start_span = provider.get_tracer("bench").start_span

        class Spanned(NullWorker):
            def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
                span = start_span("wait_for_layer_load")
                super().wait_for_layer_load(layer_idx, stream)
                span.end()

            def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
                span = start_span("save_kv_layer")
                super().save_kv_layer(layer_idx, stream)
                span.end()

        self._worker = Spanned(None)

    def __call__(self) -> float:
        return _per_call(lambda: _pass(self._worker), self._passes)
