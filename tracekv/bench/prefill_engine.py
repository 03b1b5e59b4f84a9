"""The engines of ``bench prefill``. A process of its own; writes one JSON object to standard output at its end."""

from __future__ import annotations

import itertools
import mmap
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from time import monotonic, perf_counter, sleep, thread_time
from typing import Any

import msgspec
import numpy as np
import torch

from tracekv.bench.prefill import SAVE_TURNS, PrefillCost
from tracekv.bench.prefill_parts import IDLE_LAYERS, IDLE_REQUESTS, STAGED_MIB, Staging, empty, idle_steps, queries
from tracekv.bench.rounds import Spread, interleave, paired
from tracekv.harness import Executor, build_model
from tracekv.journal.current import current
from tracekv.journal.memory import MemoryJournal
from tracekv.journal.records import Lookup, StoreOperation
from tracekv.journal.vocabulary import Operation
from tracekv_fsspec import Scheduler, Worker
from tracekv_fsspec.arena import Arena
from tracekv_fsspec.keys import KeyChain, namespace_digest

TOKENS_PER_BLOCK = 32
LAYERS = 8
MODEL = {
    "num_hidden_layers": LAYERS,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
SAVE_TOKENS = 2048
#: A conversation so far, and its next turn.
WARM_TOKENS, REST_TOKENS = 2048, 256
_CHUNK = 256
_VOCABULARY = 2048
_WAIT_S = 60.0


@contextmanager
def settings(url: str, **more: object) -> Iterator[None]:
    """The backend's settings for engines that are made inside the block."""
    chosen = {"URL": url, "MODEL_ID": "bench", "ARENA_BYTES": 256 << 20, "REFRESH_MS": 2000, **more}
    named = {
        f"TRACEKV_FSSPEC__{name}" if name != "HOOK" else "TRACEKV_ENQUEUE_HOOK": str(v) for name, v in chosen.items()
    }
    os.environ.update(named)
    try:
        yield
    finally:
        for name in named:
            del os.environ[name]


class Bench:
    """The engines' model, and prompts that nobody has seen."""

    def __init__(self, folder: Path) -> None:
        self.model = build_model("llama", **MODEL)
        self.folder = folder
        self._chance = random.Random(1)  # noqa: S311
        self._running = ExitStack()

    def close(self) -> None:
        """End the engines."""
        self._running.close()

    def tokens(self, count: int) -> list[int]:
        """Random ones."""
        return self._chance.choices(range(_VOCABULARY), k=count)

    def engine(self, url: str | None, num_blocks: int, **more: object) -> Executor:
        """An engine with the connector, or (``url`` None) without."""
        options: dict[str, Any] = {
            "mode": "v1",
            "num_blocks": num_blocks,
            "chunk_tokens": _CHUNK,
            "tokens_per_block": TOKENS_PER_BLOCK,
        }
        if url is None:
            return Executor(self.model, **options)
        with settings(url, **more):
            engine = Executor(self.model, Scheduler, Worker, **options)
        self._running.callback(engine.shutdown)
        np.frombuffer(arena_of(engine).buffer, np.uint8)[
            :: mmap.PAGESIZE
        ].max()  # the first touch of memory is nobody's cost
        return engine

    def saving(self, rounds: int) -> dict[str, list[float]]:
        """Seconds of a prefill that is saved and of the same without a connector, wall and processor time, by round.

        They take turns prompt by prompt, and all is stored before the other's turn: what the connector's own threads take from a
        prefill, they take from the one that is saved. Each round has engines of its own: where an engine's memory happens to lie
        makes more of a difference than saving does.
        """
        times: dict[str, list[float]] = {}
        urls = {"bare": None, "saving": self._url("saving")}
        for number in range(rounds):
            with self._running:
                engines = {
                    name: self.engine(urls[name], 2 * SAVE_TOKENS // TOKENS_PER_BLOCK)
                    for name in sorted(urls, reverse=bool(number % 2))
                }
                for name, turns in self._save_in_turns(engines).items():
                    times.setdefault(name, []).append(statistics.median(turns))
        return times

    def _save_in_turns(self, engines: dict[str, Executor]) -> dict[str, list[float]]:
        cpu: dict[str, list[float]] = {f"{name}_cpu": [] for name in engines}

        def prefill(name: str) -> float:
            engine = engines[name]
            request = engine.submit(self.tokens(SAVE_TOKENS), 1)
            began = thread_time()
            took = _timed(engine.run)
            cpu[f"{name}_cpu"].append(thread_time() - began)
            if request.error is not None:
                raise request.error
            if engine.scheduler is not None and not engine.scheduler.flush(_WAIT_S):
                raise RuntimeError("tracekv: the benchmark's store took too long")
            return took

        for name in engines:
            prefill(name)
        for each in cpu.values():
            each.clear()
        return interleave({name: partial(prefill, name) for name in sorted(engines)}, SAVE_TURNS) | cpu

    def warm(self, rounds: int) -> dict[str, list[float]]:
        """Seconds to the first token, from the arena, with a hint, from the store, and the two parts of the floor."""
        url = self._url("warm")
        pages = -(-(WARM_TOKENS + REST_TOKENS + 1) // TOKENS_PER_BLOCK)
        conversations = [self.tokens(WARM_TOKENS) for _ in range(2)]
        # Pages for one conversation, so that the other one's are gone from the device when its turn comes.
        engines = {
            "arena": self.engine(url, pages),
            "hint": self.engine(url, pages, READ_AHEAD="false", HOOK=1),
            "store": self.engine(url, pages, READ_AHEAD="false", OFFER_WAIT_MS=10_000),
            "rest": self.engine(None, 4 * pages),
        }
        nbytes = WARM_TOKENS * kv_bytes_per_token()
        source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)

        cpu: dict[str, list[float]] = {f"{name}_cpu": [] for name in engines}

        def first_token(name: str, conversation: list[int], *, is_cold: bool = False) -> float:
            engine = engines[name]
            if name in ("hint", "store"):
                empty(arena_of(engine))
            request = engine.submit(conversation + self.tokens(REST_TOKENS), 1)
            if name in ("arena", "hint") and not is_cold:
                self._wait_until_staged(engine, conversation)
            began = thread_time()
            took = _timed(engine.run)
            cpu[f"{name}_cpu"].append(thread_time() - began)
            if request.error is not None:
                raise request.error
            if not is_cold and (
                request.device_tokens + request.honoured_tokens != WARM_TOKENS
                or (name != "rest" and request.device_tokens > WARM_TOKENS // 8)
            ):
                raise RuntimeError(
                    f"tracekv: {name}: of {WARM_TOKENS} tokens {request.device_tokens} came from the device, and "
                    f"{request.honoured_tokens} from the connector"
                )
            if engine.scheduler is not None:
                engine.scheduler.flush(_WAIT_S)
            return took

        for name in engines:
            for conversation in conversations:
                first_token(name, conversation, is_cold=True)
        contenders: dict[str, Callable[[list[int]], float]] = {
            **{name: partial(first_token, name) for name in engines},
            "copy": lambda _: _timed(lambda: np.copyto(target, source)),
        }
        # Its own turn for each, or one would get the same conversation twice and find it on the device.
        conversation_of = {name: itertools.cycle(conversations) for name in contenders}

        def next_turn(name: str) -> float:
            return contenders[name](next(conversation_of[name]))

        for times in cpu.values():
            times.clear()
        return interleave({name: partial(next_turn, name) for name in contenders}, rounds) | cpu

    def handing_over(self, rounds: int) -> list[float]:
        """Milliseconds from the commit of a prompt's last block by one engine to the offer of another that was hinted."""
        url = self._url("shared")
        pages = 2 * SAVE_TOKENS // TOKENS_PER_BLOCK
        producer = self.engine(url, pages, ROLE="producer")
        consumer = self.engine(url, pages, ROLE="consumer", HOOK=1)
        took = []
        for _ in range(rounds):
            journal = current.journal = MemoryJournal()
            tokens = self.tokens(SAVE_TOKENS // 2) + self.tokens(1)
            producer.submit(tokens, 1)
            producer.run()
            request = consumer.submit(tokens, 1)
            self._wait_until_staged(consumer, tokens[: SAVE_TOKENS // 2])
            consumer.run()
            producer.scheduler.flush(_WAIT_S)
            current.journal = None
            records = journal.read(0)[0]
            committed = max(
                r.ended_ns for r in records if isinstance(r, StoreOperation) and r.operation is Operation.PUT
            )
            offers = [r for r in records if isinstance(r, Lookup) and r.offered_tokens]
            if request.honoured_tokens != SAVE_TOKENS // 2 or len(offers) != 1:
                raise RuntimeError(f"tracekv: {request.honoured_tokens} of {SAVE_TOKENS // 2} tokens were handed over")
            took.append((offers[0].ended_ns - committed) / 1e6)
        return took

    def _url(self, name: str) -> str:
        return (self.folder / name).as_uri()

    @staticmethod
    def _wait_until_staged(engine: Executor, tokens: Sequence[int]) -> None:
        stager = engine.scheduler._engine.stager
        keys = keys_of(stager, tokens)
        deadline = monotonic() + _WAIT_S
        while any(stager.arena.staged_run(shard, keys, 0) < len(keys) for shard in stager.arena.shards):
            if monotonic() > deadline:
                raise RuntimeError("tracekv: the benchmark's blocks were not staged in time")
            sleep(0.001)


def keys_of(stager: Any, tokens: Sequence[int]) -> list[bytes]:
    """The keys of a prompt's whole blocks."""
    chain = KeyChain(namespace_digest(stager.deployment), TOKENS_PER_BLOCK)
    chain.extend(tokens)
    return list(chain.keys)


def arena_of(engine: Executor) -> Arena:
    """Its leader's."""
    arena: Arena = engine.scheduler._engine.stager.arena
    return arena


def kv_bytes_per_token() -> int:
    """Of the model: keys and values of float32."""
    return LAYERS * 2 * MODEL["num_key_value_heads"] * MODEL["head_dim"] * 4


def _timed(call: Callable[[], object]) -> float:
    started = perf_counter()
    call()
    return perf_counter() - started


def measured(rounds: int, s3_url: str | None, folder: Path) -> PrefillCost:
    """All of it, with stores below ``folder``."""
    bench = Bench(folder)
    found: dict[str, Spread] = {}
    try:
        saving = bench.saving(rounds)
        found["save_slowdown_pct"] = paired(saving, "saving", "bare", _percent)
        found["save_thread_cpu_pct"] = paired(saving, "saving_cpu", "bare_cpu", _percent)
        found["prefill_ms"] = Spread.of([1e3 * seconds for seconds in saving["bare"]])
        warm = bench.warm(rounds)
        warm["floor"] = [rest + copy for rest, copy in zip(warm["rest"], warm["copy"], strict=True)]
        found["floor_ms"] = Spread.of([1e3 * seconds for seconds in warm["floor"]])
        for name in ("arena", "hint", "store"):
            found[f"warm_ttft_ratio_{name}"] = paired(warm, name, "floor", lambda mine, floor: mine / floor)
        warm["floor_cpu"] = [rest + copy for rest, copy in zip(warm["rest_cpu"], warm["copy"], strict=True)]
        found["warm_thread_cpu_ratio_arena"] = paired(warm, "arena_cpu", "floor_cpu", lambda mine, floor: mine / floor)
        found["commit_to_offer_ms"] = Spread.of(bench.handing_over(rounds))
    finally:
        bench.close()
    found["idle_step_us"] = Spread.of(idle_steps(folder, rounds))
    for name, times in queries(folder, rounds).items():
        found[name] = Spread.of(times)
    for name, url in (("disk", (folder / "staging").as_uri()), ("s3", s3_url)):
        if url is None:
            continue
        with Staging(url) as staging:
            speeds = staging.measure(rounds)
        found[f"staging_ratio_{name}"] = paired(speeds, "hint", "reader", lambda mine, reader: mine / reader)
        found[f"staging_mb_s_{name}"] = Spread.of(speeds["hint"])
    medians: dict[str, Any] = {"staging_ratio_s3": None, "staging_mb_s_s3": None}
    medians |= {name: spread.median for name, spread in found.items()}
    return PrefillCost(
        rounds=rounds,
        layers=LAYERS,
        tokens_per_block=TOKENS_PER_BLOCK,
        kv_bytes_per_token=kv_bytes_per_token(),
        page_bytes=kv_bytes_per_token() * TOKENS_PER_BLOCK,
        save_tokens=SAVE_TOKENS,
        warm_tokens=WARM_TOKENS,
        rest_tokens=REST_TOKENS,
        idle_requests=IDLE_REQUESTS,
        idle_layers=IDLE_LAYERS,
        staged_mib=STAGED_MIB,
        spread={name: [spread.low, spread.high] for name, spread in found.items()},
        **medians,
    )


def _percent(mine: float, bare: float) -> float:
    return 100 * (mine / bare - 1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="tracekv-bench-") as name:
        result = measured(int(sys.argv[1]), sys.argv[2] or None, Path(name))
    sys.stdout.buffer.write(msgspec.json.encode(result) + b"\n")
