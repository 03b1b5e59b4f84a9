"""An engine that is killed (kill -9) at a point of its choice: its own folder of arenas and its store are what it leaves.

Run as a script it forks an engine for each line on its standard input, ``point url arena_dir``, and says how it ended; imports and the
model are paid once. Nothing here starts a thread before the fork.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import traceback
from dataclasses import replace

BLOCK, NEW, LENGTH = 16, 4, 7 * 16 + 5
PROMPTS = [random.Random(seed).choices(range(512), k=LENGTH) for seed in (1, 2)]


def executor(preset="llama", *pair):
    from tracekv.harness import Executor
    from tracekv.testing.playing import model_of

    return Executor(model_of(preset), *pair, tokens_per_block=BLOCK, num_blocks=64)


def settings(url, arena_dir, **more):
    """As variables."""
    named = {
        "url": url, "arena_dir": arena_dir, "model_id": "dying", "arena_bytes": 8 << 20, "offer_wait_ms": 20_000, **more,
    }  # fmt: skip
    return {f"TRACEKV_FSSPEC__{name.upper()}": str(value) for name, value in named.items()}


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def in_a_copy(running, direction):
    """When half of a pass's blocks are copied."""
    mover = running.worker._transfers._mover
    copy = getattr(mover, direction)

    def half(moves, pieces):
        count = len(moves.pages) // 2
        copy(replace(moves, pages=moves.pages[:count], starts=moves.starts[:count]), pieces)
        die()

    setattr(mover, direction, half)


def in_a_put(running, ending, *, is_after):
    """At an object whose path ends so, before or after it is written."""
    store = running.scheduler._engine.stager.store
    put = store.put

    def dying(path, *parts, create_only):
        if path.endswith(ending) and not is_after:
            die()
        put(path, *parts, create_only=create_only)
        if path.endswith(ending):
            die()

    store.put = dying


def in_a_read(running):
    """When the first segment was read into the arena, before anybody is told."""
    store = running.scheduler._engine.stager.store
    read = store.read

    def dying(path, ranges, into):
        read(path, ranges, into)
        if path.endswith(".seg"):
            die()

    store.read = dying


POINTS = {
    "load": lambda running: in_a_copy(running, "load"),
    "save": lambda running: in_a_copy(running, "save"),
    "before a segment": lambda running: in_a_put(running, ".seg", is_after=False),
    "between segment and manifest": lambda running: in_a_put(running, ".man", is_after=False),
    "behind the manifest": lambda running: in_a_put(running, ".man", is_after=True),
    "staging": in_a_read,
}


def run(point, url, arena_dir, offer):
    from tracekv_fsspec import Scheduler, Worker

    os.environ.update(settings(url, arena_dir, offer=offer))
    running = executor("llama", Scheduler, Worker)
    POINTS[point](running)
    for prompt in PROMPTS:
        running.submit(prompt, NEW)
    running.run()
    running.shutdown()


def main():
    import torch

    from tracekv.testing.playing import model_of

    torch.set_num_threads(1)
    model_of("llama")
    os.write(1, b"ready\n")
    for line in sys.stdin:
        point, url, arena_dir, offer = line.rstrip("\n").split("\t")
        child = os.fork()
        if child == 0:
            try:
                run(point, url, arena_dir, offer)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(3)
        _, status = os.waitpid(child, 0)
        os.write(1, b"gone %d\n" % status)


if __name__ == "__main__":
    main()
