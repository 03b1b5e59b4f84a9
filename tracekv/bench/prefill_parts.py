"""The parts of ``bench prefill`` that need no model: idle steps, queries, staging."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, perf_counter, perf_counter_ns
from types import SimpleNamespace
from typing import Any

import torch

from tracekv.bench._limits import limit_for
from tracekv.bench.rounds import interleave
from tracekv.contract import RequestData, SchedulerOutput
from tracekv.contract.enqueue import on_enqueue
from tracekv_fsspec.arena import Arena

TOKENS_PER_BLOCK = 32
IDLE_REQUESTS, IDLE_LAYERS = 64, 61
QUERY_BLOCKS = 1024
STAGED_MIB = 64
_BLOCK_BYTES = 256 << 10
_STEPS = 24
_CALLS = 5
_WAIT_S = 60.0


class LlmArgs:
    """Engine arguments of a pair without a model."""

    def __init__(self) -> None:
        self.kv_cache_config = SimpleNamespace(tokens_per_block=TOKENS_PER_BLOCK)


@contextmanager
def pair(folder: Path, pages: int, layers: int, *, hook: bool = False) -> Iterator[tuple[Any, Any]]:
    """A scheduler and a worker on small pages of so many layers."""
    from tracekv_fsspec import Scheduler, Worker

    named = {
        "TRACEKV_FSSPEC__URL": (folder / secrets.token_hex(4)).as_uri(),
        "TRACEKV_FSSPEC__MODEL_ID": "bench",
        "TRACEKV_FSSPEC__ARENA_BYTES": str(256 << 20),
        "TRACEKV_FSSPEC__WRITE_QUEUE_BYTES": str(256 << 20),
        "TRACEKV_ENQUEUE_HOOK": "1" if hook else "0",
    }
    os.environ.update(named)
    try:
        args = LlmArgs()
        worker, scheduler = Worker(args), Scheduler(args)
        worker.register_kv_caches(torch.zeros((pages, layers, 2, 512)))
        scheduler.wait_for_initialization()
    finally:
        for name in named:
            del os.environ[name]
    try:
        yield scheduler, worker
    finally:
        worker.shutdown()
        scheduler.shutdown()


def request_of(request_id: int, tokens: list[int]) -> Any:
    """As the runtime hands it over."""
    return SimpleNamespace(request_id=request_id, prompt_len=len(tokens), get_tokens=lambda _: tokens)


def idle_steps(folder: Path, rounds: int) -> list[float]:
    """Microseconds inside the connector per decoding step in which no block is completed; the median of a turn's steps."""
    prompt = 1000 - 1000 % TOKENS_PER_BLOCK + 2
    pages_each = prompt // TOKENS_PER_BLOCK + 2 + rounds
    with pair(folder, IDLE_REQUESTS * pages_each, IDLE_LAYERS) as (scheduler, worker):
        new = []
        for number in range(IDLE_REQUESTS):
            tokens = [1 + (number + at) % 1000 for at in range(prompt)]
            scheduler.get_num_new_matched_tokens(request_of(number, tokens), 0)
            pages = list(range(number * pages_each, (number + 1) * pages_each))
            scheduler.update_state_after_alloc(request_of(number, tokens), pages)
            new.append(RequestData(number, tokens, pages, 0, prompt))

        def step(output: SchedulerOutput) -> float:
            started = perf_counter_ns()
            worker.bind_connector_meta(scheduler.build_connector_meta(output))
            worker.start_load_kv(None)
            for layer in range(IDLE_LAYERS):
                worker.wait_for_layer_load(layer, None)
                worker.save_kv_layer(layer, None)
            worker.wait_for_save(None)
            worker.get_finished([], [])
            return (perf_counter_ns() - started) / 1e3

        step(SchedulerOutput(new, []))
        scheduler.flush(_WAIT_S)
        position, results = prompt, []
        for _ in range(rounds):
            times = []
            for _ in range(TOKENS_PER_BLOCK):
                cached = [RequestData(number, [7], [], position, 1) for number in range(IDLE_REQUESTS)]
                took = step(SchedulerOutput([], cached))
                position += 1
                if position % TOKENS_PER_BLOCK in range(3, 3 + _STEPS):
                    times.append(took)
            scheduler.flush(_WAIT_S)
            results.append(sorted(times)[len(times) // 2])
        return results


def queries(folder: Path, rounds: int) -> dict[str, list[float]]:
    """Microseconds of queries that find all blocks staged, the fastest of a few in a row, hinted and not."""
    tokens = [1 + (7 * at) % 30_000 for at in range(QUERY_BLOCKS * TOKENS_PER_BLOCK + 1)]
    nothing = SchedulerOutput([], [])
    with pair(folder, 8, 1) as (plain, _), pair(folder, 8, 1, hook=True) as (hinted, _):
        for scheduler in (plain, hinted):
            _stage_directly(scheduler, tokens)
        number = iter(range(1 << 30))

        def query(scheduler: Any, ready: Callable[[int], None]) -> float:
            times = []
            for _ in range(_CALLS):
                request_id = next(number)
                request = request_of(request_id, tokens)
                ready(request_id)
                started = perf_counter_ns()
                offered, _ = scheduler.get_num_new_matched_tokens(request, 0)
                times.append((perf_counter_ns() - started) / 1e3)
                if offered != len(tokens) - 1:
                    raise RuntimeError(f"tracekv: the benchmark's query found {offered} of {len(tokens) - 1} tokens")
                scheduler.build_connector_meta(nothing)  # gives the pins back
                scheduler.request_finished(request, [])
            return min(times)

        def hint(request_id: int) -> None:
            on_enqueue(request_id, None, tokens, None)
            prefetcher = hinted._engine.stager.prefetcher
            prefetcher.wait(prefetcher._of_request[request_id], _WAIT_S, monotonic() + _WAIT_S)

        return interleave(
            {
                "query_us_1024": lambda: query(hinted, hint),
                "query_unhinted_us_1024": lambda: query(plain, lambda _: None),
            },
            rounds,
        )


def _stage_directly(scheduler: Any, tokens: list[int]) -> None:
    from tracekv_fsspec.keys import KeyChain, namespace_digest

    stager = scheduler._engine.stager
    chain = KeyChain(namespace_digest(stager.deployment), TOKENS_PER_BLOCK)
    chain.extend(tokens)
    arena = stager.arena
    for shard in arena.shards:
        held = arena.commit_run(shard, arena.allocate_run(shard, len(chain.keys)), chain.keys)
        stager.release([arena.slot(shard, number) for number in reversed(held)])


class Staging:
    """A stager with two sets of blocks in a store, whose arena has room for both; it is emptied before each turn."""

    def __init__(self, url: str, options: dict[str, Any] | None = None) -> None:
        from tracekv_fsspec.format import padded
        from tracekv_fsspec.index import Shard
        from tracekv_fsspec.keys import Deployment
        from tracekv_fsspec.settings import Settings
        from tracekv_fsspec.stager import Stager
        from tracekv_fsspec.store import open_store

        self._url, self._options = f"{url.rstrip('/')}/bench-{secrets.token_hex(6)}", options or {}
        self._shard, self._blocks = Shard(0, 0), (STAGED_MIB << 20) // _BLOCK_BYTES
        self._store = open_store(self._url, self._options)
        settings = Settings(
            url=self._url,
            arena_bytes=2 * self._blocks * padded(_BLOCK_BYTES),
            write_queue_bytes=1 << 40,
            write_queue_ms=1 << 40,
            refresh_ms=3_600_000,
        )
        deployment = Deployment("bench", "torch.bfloat16", TOKENS_PER_BLOCK, secrets.token_bytes(32))
        self._stager = Stager(settings, self._store, deployment, {self._shard: _BLOCK_BYTES})
        self._limit = limit_for(self._url, self._options, "obstore")

    def __enter__(self) -> Staging:
        self._sets = [self._save() for _ in range(2)]
        self._paths = [entry.path for entry in self._store.list("") if entry.path.endswith(".seg")]
        return self

    def __exit__(self, *_: object) -> None:
        from tracekv_fsspec.store import StoreError, open_store

        self._stager.close()
        self._limit.close()
        store = open_store(self._url, self._options)
        with suppress(StoreError):
            for entry in store.list(""):
                store.delete(entry.path)
        store.close()

    def measure(self, rounds: int) -> dict[str, list[float]]:
        """MB/s of a hint, and of a reader that is asked by nobody but the benchmark, as in ``bench store``."""
        turn = iter(range(1 << 30))
        reader, prefetcher = self._stager.reader, self._stager.prefetcher

        def hint(keys: list[bytes]) -> None:
            prefetcher.wait(prefetcher.hint(keys), _WAIT_S, monotonic() + _WAIT_S)

        def read(keys: list[bytes]) -> None:
            ticket = reader.stage(keys, 0)
            reader.wait(ticket, _WAIT_S)
            reader.take(ticket)
            self._stager.release([slot for slots in ticket.slots.values() for slot in slots if slot is not None])

        def timed(stage: Callable[[list[bytes]], None]) -> float:
            keys = self._sets[next(turn) % 2]
            empty(self._stager.arena)
            self._limit.cool(self._paths)
            started = perf_counter()
            stage(keys)
            took = perf_counter() - started
            if self._stager.arena.staged_run(self._shard, keys, 0) != len(keys):
                raise RuntimeError(f"tracekv: not all blocks came back from {self._url}")
            return len(keys) * _BLOCK_BYTES / took / 1e6

        contenders = {"hint": lambda: timed(hint), "reader": lambda: timed(read)}
        interleave(contenders, 2)  # headers are checked and the arena's pages touched
        return interleave(contenders, rounds)

    def _save(self) -> list[bytes]:
        from tracekv_fsspec.arena import Slot
        from tracekv_fsspec.writer import SaveBlock

        keys = [secrets.token_bytes(16) for _ in range(self._blocks)]
        content = os.urandom(_BLOCK_BYTES)
        for ordinal, key in enumerate(keys):
            slot = self._stager.writer.reserve(self._shard, key)
            assert isinstance(slot, Slot), f"the benchmark's own queue is full ({slot})"
            self._stager.arena.view(slot)[:_BLOCK_BYTES] = content
            self._stager.writer.submit([SaveBlock(0, bytes(32), key, ordinal, TOKENS_PER_BLOCK, slot)])
        if not self._stager.flush(_WAIT_S):
            raise RuntimeError(f"tracekv: {self._url} took longer than {_WAIT_S:.0f} s")
        return keys


def empty(arena: Arena) -> None:
    """Evict everything that isn't pinned."""
    for shard in arena.shards:
        arena.abandon_run(shard, reversed(arena.allocate_run(shard, arena.free_slots(shard))))
