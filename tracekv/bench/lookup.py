"""What a lookup costs: hashing a prompt, walking the index, and the memory that an index takes."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter_ns

import msgspec

from tracekv.bench.rounds import Spread, interleave

INDEX_BLOCKS = 1_000_000
#: What a manifest of a 32 MiB segment of 64 KiB blocks lists.
_PER_COMMIT = 512
RUN_BLOCKS = 1024
_CALLS = 5
PROMPT_TOKENS, TOKENS_PER_BLOCK = 131_072, 32


class LookupCost(msgspec.Struct):
    """Medians of interleaved rounds; spreads as ``[low, high]``."""

    index_blocks: int
    index_bytes: int
    index_read_s: float
    rounds: int
    prefix_blocks: int
    prefix_ms: float
    prompt_tokens: int
    tokens_per_block: int
    hash_ms: float
    hash_and_lookup_ms: float
    spread: dict[str, list[float]]


def measure(rounds: int = 15, index_blocks: int = INDEX_BLOCKS) -> LookupCost:
    """Measure in a process of its own, whose memory is nobody else's."""
    command = [sys.executable, "-m", "tracekv.bench.lookup", str(rounds), str(index_blocks)]
    done = subprocess.run(command, capture_output=True, check=False, env={**os.environ, "PYTHONHASHSEED": "0"})
    if done.returncode:
        raise RuntimeError(f"tracekv: the benchmark's process failed:\n{done.stderr.decode(errors='replace')[-2000:]}")
    return msgspec.json.decode(done.stdout, type=LookupCost)


def _measure(rounds: int, index_blocks: int) -> LookupCost:
    from tracekv_fsspec.index import Index, Shard
    from tracekv_fsspec.keys import KeyChain
    from tracekv_fsspec.manifest import Manifest, parse

    shard = Shard(0, 0)
    namespace = bytes(32)
    chance = random.Random(1)  # noqa: S311
    tokens = [chance.randrange(128_000) for _ in range(PROMPT_TOKENS)]
    chain = KeyChain(namespace, TOKENS_PER_BLOCK)
    chain.extend(tokens)
    index = Index([shard])
    before = _resident_bytes()
    read_ns = 0
    for packed in _commits(chain.keys, index_blocks):
        started = perf_counter_ns()
        index.add(parse(Manifest, packed, bytes(32)))
        read_ns += perf_counter_ns() - started
    grown = _resident_bytes() - before
    run = chain.keys[:RUN_BLOCKS]
    if index.prefix(shard, run) != RUN_BLOCKS or len(index) < index_blocks:
        raise RuntimeError("tracekv: the benchmark's index lacks blocks")

    def prefix() -> float:
        return _timed(lambda: index.prefix(shard, run))

    def hashed() -> float:
        return _timed(lambda: KeyChain(namespace, TOKENS_PER_BLOCK).extend(tokens))

    def both() -> float:
        def look_up() -> None:
            fresh = KeyChain(namespace, TOKENS_PER_BLOCK)
            fresh.extend(tokens)
            index.prefix(shard, fresh.keys)

        return _timed(look_up)

    results = interleave({"prefix_ms": prefix, "hash_ms": hashed, "hash_and_lookup_ms": both}, rounds)
    spreads = {name: Spread.of(values) for name, values in results.items()}
    return LookupCost(
        index_blocks=len(index),
        index_bytes=grown,
        index_read_s=read_ns / 1e9,
        rounds=rounds,
        prefix_blocks=RUN_BLOCKS,
        prefix_ms=spreads["prefix_ms"].median,
        prompt_tokens=PROMPT_TOKENS,
        tokens_per_block=TOKENS_PER_BLOCK,
        hash_ms=spreads["hash_ms"].median,
        hash_and_lookup_ms=spreads["hash_and_lookup_ms"].median,
        spread={name: [spread.low, spread.high] for name, spread in spreads.items()},
    )


def _commits(first: list[bytes], blocks: int) -> Iterator[bytes]:
    """Packed manifests, as they lie in a store, one after the other; the prompt's blocks are in the first ones."""
    from tracekv_fsspec.format import ALIGNMENT, HEADER_BYTES
    from tracekv_fsspec.manifest import BlockEntry, Manifest, SegmentEntry, pack
    from tracekv_fsspec.paths import segment_path

    deployment, writer, size = bytes(32), bytes(16), 64 << 10
    for sequence in range(-(-blocks // _PER_COMMIT)):
        keys = first[sequence * _PER_COMMIT : (sequence + 1) * _PER_COMMIT]
        keys += [os.urandom(16) for _ in range(min(_PER_COMMIT, blocks - sequence * _PER_COMMIT) - len(keys))]
        entries = [
            BlockEntry(key, 0, TOKENS_PER_BLOCK, 0, HEADER_BYTES + number * size, size, os.urandom(16))
            for number, key in enumerate(keys)
        ]
        total = HEADER_BYTES + len(keys) * size + -(-(len(keys) * 64 + 64) // ALIGNMENT) * ALIGNMENT
        segment = SegmentEntry(segment_path(deployment, writer, sequence, 0), total, 0)
        yield pack(deployment, Manifest(bytes(32), writer, sequence, 1, [segment], entries))


def _timed(call: Callable[[], object]) -> float:
    """Milliseconds of a call, the fastest of a few in a row: other work on the machine doesn't count."""
    times = []
    for _ in range(_CALLS):
        started = perf_counter_ns()
        call()
        times.append(perf_counter_ns() - started)
    return min(times) / 1e6


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(_measure(int(sys.argv[1]), int(sys.argv[2]))))
