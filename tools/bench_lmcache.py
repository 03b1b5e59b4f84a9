"""LMCache's own file adapters beside ours, on the same machine, the same sizes and the same folder, in alternating rounds.

``python tools/bench_lmcache.py [--write docs/performance.md]`` makes a virtual environment of its own in the user's cache folder
(LMCache pins other versions of what we use), runs ``lmcache bench l2`` there, and our reader and writer here. LMCache's benchmark
reads what it has just written, so its loads come from the page cache; ours are warmed first. Neither side checks what it reads
(LMCache's benchmark skips that by default); ours with checks is a row of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

from tracekv.bench import page
from tracekv.bench.rounds import Spread, interleave, paired
from tracekv.bench.store import _Bench

VERSION = "0.5.6"
MIB = 1 << 20


def environment(folder: Path) -> Path:
    """The ``lmcache`` command of an environment in ``folder``, made where it is missing."""
    command = folder / "bin" / "lmcache"
    if not command.exists():
        sys.stderr.write(f"installing lmcache {VERSION} into {folder}\n")
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([folder / "bin" / "pip", "install", "--quiet", f"lmcache=={VERSION}"], check=True)
    return command


def lmcache(command: Path, adapter: str, folder: str, block_kib: int, blocks: int) -> dict[str, float]:
    """MB/s of one store and one load round, by operation."""
    with tempfile.TemporaryDirectory(dir=folder) as base, tempfile.NamedTemporaryFile(suffix=".json") as output:
        arguments = [
            "bench", "l2", "--l2-adapter", json.dumps({"type": adapter, "base_path": base}), "--num-keys", str(blocks),
            "--data-size-kb", str(block_kib), "--rounds", "1", "--warmup-rounds", "1", "--format", "json",
            "--output", output.name, "--quiet",
        ]  # fmt: skip
        done = subprocess.run([command, *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"lmcache bench l2 failed:\n{done.stderr[-2000:]}")
        metrics = json.loads(Path(output.name).read_text())["metrics"]
    found = {}
    for operation in (value for name, value in metrics.items() if name.startswith("op_")):
        moved = block_kib * 1024 * operation["total_success"]
        found[operation["operation"].lower()] = moved / (operation["duration_avg_ms"] / 1e3) / 1e6
    return found


def unchecked(_: object) -> bytes:
    """In place of a checksum; no mock, whose call would cost more than one."""
    return bytes(16)


class NoCheck:
    """In place of the verifier of a read: all that came is right."""

    took_ns = 0

    def __init__(self) -> None:
        self.buffers = 0

    def add(self, *_: object) -> None:
        self.buffers += 1

    def lead_in(self) -> None: ...

    def restart(self) -> None: ...

    def filled(self, number: int, end: int) -> None: ...

    def finish(self) -> list[list[int]]:
        return [[] for _ in range(self.buffers)]


class Ours:
    """Our writer and reader, with or without checksums."""

    def __init__(self, folder: str, block_kib: int, blocks: int, *, checked: bool) -> None:
        self._folder, self._block_kib, self._blocks = folder, block_kib, blocks
        self._checked = checked

    def __call__(self) -> dict[str, float]:
        """MB/s of one store and one load round."""
        from time import perf_counter

        size = self._block_kib << 10
        with ExitStack() as stack:
            if not self._checked:
                stack.enter_context(mock.patch("tracekv_fsspec.fetching.Verifier", new=NoCheck))
                stack.enter_context(mock.patch("tracekv_fsspec.writer.checksum", new=unchecked))
            bench = stack.enter_context(_Bench(Path(self._folder).as_uri(), size, self._blocks, {}, "obstore"))
            started = perf_counter()
            bench._store_blocks()
            store = self._blocks * size / (perf_counter() - started) / 1e6
            bench._limit.warm([path for path, _ in bench._pages[bench._turn]])
            return {"store": store, "load": bench._load_ours()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--block-kib", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--round-mib", type=int, default=64)
    parser.add_argument("--folder", default=None, help="on the disk to be measured; a temporary one otherwise")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser.add_argument("--venv", type=Path, default=cache / "tracekv" / f"lmcache-{VERSION}")
    parser.add_argument("--write", type=Path, help="the page whose part is to be replaced")
    given = parser.parse_args()
    command = environment(given.venv)
    rows = []
    with tempfile.TemporaryDirectory(dir=given.folder, prefix="tracekv-lmcache-") as folder:
        for kib in given.block_kib:
            blocks = max(2, given.round_mib * 1024 // kib)
            rows += compare(command, folder, kib, blocks, given.rounds)
    headings = ("blocks", "operation", "who", "MB/s", "ours, unchecked, is so many times as fast")
    note = (
        "`lmcache bench l2` with its adapters `fs` and `fs_native` as they are by default, and our writer and reader, each round with "
        "new objects; all loads come from the page cache, because LMCache's benchmark reads what it has just written."
    )
    table = page.table(headings, rows)
    body = f"{page.machine('xxhash')}, LMCache {VERSION}. {given.rounds} alternating rounds.\n\n{table}\n\n{note}"
    if given.write:
        page.write_part(given.write, "lmcache", "Beside LMCache's file adapters", body)
    print(body)


def compare(command: Path, folder: str, kib: int, blocks: int, rounds: int) -> list[tuple[str, ...]]:
    """The table's rows for one size."""
    measured: dict[str, list[dict[str, float]]] = {}

    def noted(name: str, run: object) -> object:
        def once() -> float:
            measured.setdefault(name, []).append(run())  # type: ignore[operator]
            return 0.0

        return once

    contenders = {
        "ours, unchecked": Ours(folder, kib, blocks, checked=False),
        "ours": Ours(folder, kib, blocks, checked=True),
        "LMCache fs": lambda: lmcache(command, "fs", folder, kib, blocks),
        "LMCache fs_native": lambda: lmcache(command, "fs_native", folder, kib, blocks),
    }
    interleave({name: noted(name, run) for name, run in contenders.items()}, rounds)
    rows = []
    for operation in ("store", "load"):
        values = {name: [each[operation] for each in found] for name, found in measured.items()}
        for name in contenders:
            ratio = paired(values, "ours, unchecked", name, lambda mine, theirs: mine / theirs)
            rows.append(
                (
                    f"{kib} KiB" if kib < 1024 else f"{kib // 1024} MiB",
                    operation,
                    name,
                    str(Spread.of(values[name])),
                    "" if name == "ours, unchecked" else str(ratio),
                )
            )
    return rows


if __name__ == "__main__":
    main()
