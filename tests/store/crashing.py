"""A writer without torch that stores blocks until somebody kills it, and says which were committed.

Run as a script it forks a writer for each line on its standard input (imports are paid once; nothing here starts a thread before the
fork), or is the writer itself.
"""

from __future__ import annotations

import os
import random
import sys

#: Blocks of a commit, and bytes of a block: large enough that a kill falls into a write.
BLOCKS, BLOCK_BYTES = 8, 256 << 10


def key_of(seed: int, number: int) -> bytes:
    return bytes([7]) + seed.to_bytes(7, "big") + number.to_bytes(8, "big")


def content_of(key: bytes) -> bytes:
    return random.Random(key).randbytes(1024) * (BLOCK_BYTES // 1024)


def write(url: str, seed: int, said: int) -> None:
    """Store commits one after the other; each is announced once it is in the index."""
    from tests.store.node import FULL, Node

    class Writing(Node):
        def content(self, shard, key):
            return content_of(key)

    node = Writing(url, page_bytes={FULL: BLOCK_BYTES})
    commits = 0
    while True:
        keys = [key_of(seed, commits * BLOCKS + number) for number in range(BLOCKS)]
        node.save(keys)
        commits += 1
        os.write(said, b"%d\n" % commits)


def main() -> None:
    import tests.store.node
    import tracekv_fsspec.engines.local

    assert tests.store.node
    assert tracekv_fsspec.engines.local
    assert "torch" not in sys.modules
    os.write(1, b"ready\n")
    for line in sys.stdin:
        url, seed = line.split()
        child = os.fork()
        if child == 0:
            try:
                write(url, int(seed), 1)
            finally:
                os._exit(3)
        os.write(1, b"pid %d\n" % child)
        _, status = os.waitpid(child, 0)
        os.write(1, b"gone %d\n" % status)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        write(sys.argv[1], int(sys.argv[2]), 1)
    else:
        main()
