"""How fast a store gives and takes blocks: tracekv_fsspec, the connector document's way, and the limit, in the same rounds.

*tracekv* is the whole path of the backend: a run of keys is asked for, read from segments, verified, and lies in the arena; or is
copied to the arena, stored and committed. *The document's way* is one file per block, ``torch.save`` and
``torch.load(fs.open(path))``, one by one, with fsspec's defaults. *The limit* moves the bytes of the same segments with positioned
I/O or ranged requests, and does nothing else.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from time import perf_counter, process_time
from typing import Any

import msgspec

from tracekv.bench._limits import Limit, limit_for
from tracekv.bench.rounds import Spread, interleave, paired
from tracekv.journal.current import current
from tracekv.journal.memory import MemoryJournal
from tracekv.journal.records import StoreOperation
from tracekv.journal.vocabulary import Direction
from tracekv.reporting import store_ceiling

KIB, MIB = 1 << 10, 1 << 20
SIZES = (64 * KIB, MIB, 8 * MIB)
#: What a round of tracekv and of the limit moves; the document's way moves fewer blocks where it would take minutes.
ROUND_BYTES = 64 * MIB
_SEED_BLOCKS = {"local": 256, "s3": 64}
#: Pages that are saved, again and again; and how many bytes of them a pass completes.
_PAGES, _PASS_BYTES = 64, 4 * MIB
_WAIT_S = 120.0

Progress = Callable[[str], None]


def _quietly(what: object) -> None:
    """Nobody watches, or nothing is to be done."""


class Row(msgspec.Struct):
    """One operation on blocks of one size; MB are 10^6 bytes. ``spread`` holds ``[low, high]`` by field."""

    op: str
    temperature: str | None
    block_bytes: int
    tracekv_mb_s: float
    seed_mb_s: float
    limit_mb_s: float
    ratio_seed: float
    ratio_limit: float
    cpu_us_per_block: float
    limit_cpu_us_per_block: float
    requests_per_1024_blocks: float
    spread: dict[str, list[float]]


class StoreSpeed(msgspec.Struct):
    """What was measured; ``engine`` as in reports."""

    engine: str
    rounds: int
    round_bytes: int
    rows: list[Row]


def measure(
    url: str,
    *,
    rounds: int = 5,
    sizes: Sequence[int] = SIZES,
    round_bytes: int = ROUND_BYTES,
    options: Mapping[str, Any] | None = None,
    s3_client: str = "obstore",
    progress: Progress = _quietly,
) -> StoreSpeed:
    """Measure at ``url``, below a folder of this run's own that is removed at the end.

    Raises:
        StoreUnusable: The store can't be opened.
        ModuleNotFoundError: There is no torch, which the document's way needs.
    """
    rows: list[Row] = []
    engine = ""
    for size in sizes:
        blocks = max(2, round_bytes // size)
        here = f"{url.rstrip('/')}/bench-{secrets.token_hex(6)}"
        with _Bench(here, size, blocks, options or {}, s3_client) as bench:
            engine = bench.engine
            for temperature in ("cold", "warm") if engine == "local" else (None,):
                progress(f"load {size // KIB} KiB {temperature or ''}".rstrip())
                rows.append(bench.load(rounds, temperature))
            progress(f"save {size // KIB} KiB")
            rows.append(bench.save(rounds))
    return StoreSpeed(engine, rounds, round_bytes, rows)


class _Bench:
    """A stager with two sets of blocks in the store, and the same content as files of the document's way.

    The arena holds one set, so that loading the other always reads: a set that was loaded is evicted by the next.
    """

    def __init__(self, url: str, size: int, blocks: int, options: Mapping[str, Any], s3_client: str) -> None:
        import torch

        from tracekv_fsspec.format import padded
        from tracekv_fsspec.index import Shard
        from tracekv_fsspec.keys import Deployment, namespace_digest
        from tracekv_fsspec.moving import HostMover
        from tracekv_fsspec.settings import Settings
        from tracekv_fsspec.stager import Stager
        from tracekv_fsspec.store import open_store

        self._shard = Shard(0, 0)
        self._size = size
        self._blocks = blocks
        deployment = Deployment("bench", "torch.bfloat16", 32, secrets.token_bytes(32))
        self._namespace = namespace_digest(deployment.digest())
        settings = Settings(
            url=url,
            arena_bytes=blocks * padded(size),
            write_queue_bytes=1 << 40,
            write_queue_ms=1 << 40,
            refresh_ms=3_600_000,
        )
        self._journal = MemoryJournal()
        self._open = partial(open_store, url, options, s3_client=s3_client)
        self._store = self._open()
        self.engine = self._store.engine
        self._stager = Stager(settings, self._store, deployment, {self._shard: size})
        pages = torch.frombuffer(bytearray(os.urandom(size * min(blocks, _PAGES))), dtype=torch.uint8).view(-1, size)
        self._source = pages.numpy().data.cast("B")
        self._pool = len(pages)
        self._mover = HostMover({0: [pages]}, self._stager.arena.buffer)
        self._limit: Limit = limit_for(url, options, s3_client)
        self._seed = _Seed(url, size, min(blocks, _SEED_BLOCKS.get(self.engine, 64)), options)
        self._sets: list[list[bytes]] = []
        self._pages: list[list[tuple[str, int]]] = []
        self._turn = 0
        self._requests: list[float] = []
        self._cpu: dict[str, list[float]] = {"tracekv": [], "limit": []}

    def __enter__(self) -> _Bench:
        self._before, current.journal = current.journal, self._journal
        there: set[tuple[str, int]] = set()
        for _ in range(2):
            self._sets.append(self._store_blocks())
            now = {(entry.path, entry.size) for entry in self._store.list("") if entry.path.endswith(".seg")}
            self._pages.append(sorted(now - there))
            there = now
        self._seed.save()
        self._load_ours(count=False)  # touch the arena's pages once, and find the segments' headers right
        self._load_ours(count=False)
        return self

    def __exit__(self, *_: object) -> None:
        from tracekv_fsspec.store import StoreError

        current.journal = self._before
        self._stager.close()
        self._seed.remove()
        self._limit.close()
        store = self._open()  # the stager closed its own, after it wrote which blocks were used
        with contextlib.suppress(StoreError):
            for entry in store.list(""):
                store.delete(entry.path)
        store.close()

    def load(self, rounds: int, temperature: str | None) -> Row:
        """Ours, theirs and the limit, each time from the named temperature."""
        self._cpu = {"tracekv": [], "limit": []}
        self._requests = []
        by_temperature: dict[str | None, Callable[[Sequence[str]], None]] = {
            "cold": self._limit.cool,
            "warm": self._limit.warm,
            None: _quietly,
        }
        prepare = by_temperature[temperature]

        def tracekv() -> float:
            prepare([path for path, _ in self._pages[self._turn]])
            return self._load_ours()

        def seed() -> float:
            self._seed.prepare(prepare)
            return self._seed.load()

        def limit() -> float:
            pages = self._pages[self._turn]
            prepare([path for path, _ in pages])
            with self._measured("limit", sum(size for _, size in pages) / self._size):
                started = perf_counter()
                moved = self._limit.read(pages)
                took = perf_counter() - started
            return moved / took / 1e6

        results = interleave({"tracekv": tracekv, "seed": seed, "limit": limit}, rounds)
        return self._row("load", temperature, results)

    def save(self, rounds: int) -> Row:
        """As :meth:`load`; what was written is removed between the rounds."""
        self._cpu = {"tracekv": [], "limit": []}
        self._requests = []

        def tracekv() -> float:
            before = {entry.path for entry in self._store.list("")}
            mark = self._mark()
            with self._measured("tracekv", self._blocks):
                started = perf_counter()
                self._store_blocks()
                took = perf_counter() - started
            self._requests.append(self._requests_since(mark))
            for entry in self._store.list(""):
                if entry.path not in before:
                    self._store.delete(entry.path)
            return self._blocks * self._size / took / 1e6

        def limit() -> float:
            with self._measured("limit", self._blocks):
                started = perf_counter()
                moved = self._limit.write(self._source, self._blocks * self._size)
                took = perf_counter() - started
            self._limit.remove_written()
            return moved / took / 1e6

        results = interleave({"tracekv": tracekv, "seed": self._seed.save, "limit": limit}, rounds)
        return self._row("save", None, results)

    def _row(self, op: str, temperature: str | None, results: Mapping[str, Sequence[float]]) -> Row:
        ours, seed, limit = (Spread.of(results[name]) for name in ("tracekv", "seed", "limit"))
        ratio_seed = paired(results, "tracekv", "seed", lambda mine, theirs: mine / theirs)
        ratio_limit = paired(results, "tracekv", "limit", lambda mine, theirs: mine / theirs)
        cpu, raw_cpu = Spread.of(self._cpu["tracekv"]), Spread.of(self._cpu["limit"])
        direction = Direction.LOAD if op == "load" else Direction.SAVE
        current.journal, inner = self._before, current.journal  # the ceiling is for whoever traces this process
        store_ceiling(
            self.engine,
            direction,
            self._size,
            bytes_per_s=int(limit.median * 1e6),
            reached_bytes_per_s=int(ours.median * 1e6),
            bucket=self._store.bucket,
        )
        current.journal = inner
        named = {
            "tracekv_mb_s": ours, "seed_mb_s": seed, "limit_mb_s": limit, "ratio_seed": ratio_seed,
            "ratio_limit": ratio_limit, "cpu_us_per_block": cpu, "limit_cpu_us_per_block": raw_cpu,
        }  # fmt: skip
        return Row(
            op,
            temperature,
            self._size,
            requests_per_1024_blocks=Spread.of(self._requests).median,
            spread={name: [spread.low, spread.high] for name, spread in named.items()},
            **{name: spread.median for name, spread in named.items()},
        )

    def _store_blocks(self) -> list[bytes]:
        """A new set of blocks through the backend: page to arena, segments, commit."""
        from tracekv_fsspec.arena import Slot
        from tracekv_fsspec.moving import Moves, Piece
        from tracekv_fsspec.writer import SaveBlock

        writer, arena, size = self._stager.writer, self._stager.arena, self._size
        keys = [secrets.token_bytes(16) for _ in range(self._blocks)]
        whole, at_once = Piece(0, 0, 0, size, 0), max(1, _PASS_BYTES // size)
        for first in range(0, len(keys), at_once):
            blocks, starts = [], []
            for ordinal, key in enumerate(keys[first : first + at_once], first):
                slot = writer.reserve(self._shard, key)
                assert isinstance(slot, Slot), f"the benchmark's own queue is full ({slot})"
                starts.append(arena.extent(slot)[0])
                blocks.append(SaveBlock(0, self._namespace, key, ordinal, 32, slot))
            pages = [block.ordinal % self._pool for block in blocks]
            self._mover.save(Moves(0, pages, starts, arena.slot_bytes(self._shard)), [whole])
            writer.submit(blocks)
        if not self._stager.flush(_WAIT_S):
            raise RuntimeError(f"tracekv: {self._store.url} took longer than {_WAIT_S:.0f} s for one round")
        return keys

    def _load_ours(self, *, count: bool = True) -> float:
        keys = self._sets[self._turn]
        self._turn = 1 - self._turn
        reader = self._stager.reader
        mark = self._mark()
        with self._measured("tracekv" if count else None, self._blocks):
            started = perf_counter()
            ticket = reader.stage(keys, 0)
            reader.wait(ticket, _WAIT_S)
            staged, reason = reader.take(ticket)
            took = perf_counter() - started
        if staged != len(keys):
            raise RuntimeError(
                f"tracekv: {len(keys) - staged} blocks didn't come back from {self._store.url} ({reason})"
            )
        for slots in ticket.slots.values():
            self._stager.release([slot for slot in slots if slot is not None])
        if count:
            self._requests.append(self._requests_since(mark))
        return len(keys) * self._size / took / 1e6

    @contextlib.contextmanager
    def _measured(self, name: str | None, blocks: float) -> Iterator[None]:
        began = process_time()
        yield
        if name is not None:
            self._cpu[name].append((process_time() - began) * 1e6 / blocks)

    def _mark(self) -> int:
        return self._journal.read(0)[1]

    def _requests_since(self, mark: int) -> float:
        records = self._journal.read(mark)[0]
        requests = sum(record.requests for record in records if isinstance(record, StoreOperation))
        return requests * 1024 / self._blocks


class _Seed:
    """One file per block through ``torch.save`` and ``torch.load``, as the connector document's example does it."""

    def __init__(self, url: str, size: int, blocks: int, options: Mapping[str, Any]) -> None:
        import fsspec
        import torch

        self._torch = torch
        self._fs, root = fsspec.core.url_to_fs(url, **options)
        self._folder = f"{root}-seed"
        self._fs.makedirs(self._folder, exist_ok=True)
        self._paths = [f"{self._folder}/{number}.pt" for number in range(blocks)]
        self._tensors = [torch.randn(size // 2).to(torch.bfloat16) for _ in range(min(blocks, 8))]
        self._bytes = size * blocks

    def save(self) -> float:
        """MB/s."""
        started = perf_counter()
        for number, path in enumerate(self._paths):
            with self._fs.open(path, "wb") as file:
                self._torch.save(self._tensors[number % len(self._tensors)], file)
        return self._bytes / (perf_counter() - started) / 1e6

    def load(self) -> float:
        """MB/s."""
        started = perf_counter()
        for path in self._paths:
            with self._fs.open(path) as file:
                self._torch.load(file)
        return self._bytes / (perf_counter() - started) / 1e6

    def prepare(self, prepare: Callable[[Sequence[str]], None]) -> None:
        """Bring the files to a temperature."""
        prepare(self._paths)

    def remove(self) -> None:
        """Remove the files."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._folder, recursive=True)
