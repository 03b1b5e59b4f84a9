"""kill -9 of a writer at random points: never a readable bad block, never a lost committed one."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading

import pytest

from tests.store.crashing import BLOCK_BYTES, BLOCKS, content_of, key_of
from tests.store.node import FULL, Node
from tracekv_fsspec.inventory import survey, verify
from tracekv_fsspec.store import open_store

ROUNDS, S3_ROUNDS = 200, 5
#: A writer commits every few milliseconds; the kill falls somewhere into the first handful of commits.
LONGEST_S = 0.12


def wait_s(seconds):
    """Let somebody else work for a random time; nothing is waited for."""
    threading.Event().wait(seconds)


def kill(pid):
    os.kill(pid, signal.SIGKILL)


def check(url, seed, committed):
    """What a fresh engine finds is right, and what was committed is found."""
    reader = Node(url, page_bytes={FULL: BLOCK_BYTES}, arena_bytes=32 * BLOCKS * BLOCK_BYTES)
    try:
        found = [key_of(seed, number) for number in range(32 * BLOCKS)]
        stored = reader.stager.prefix(FULL, found, 0)
        assert stored >= committed * BLOCKS, "a committed block was lost"
        assert stored % BLOCKS == 0, "a commit was seen in part"
        ticket, staged, reason = reader.stage(found[:stored])
        assert (staged, reason) == (stored, None)
        for key, slot in zip(found, ticket.slots[FULL], strict=False):
            assert reader.stager.arena.view(slot) == content_of(key), "a bad block was readable"
        reader.release(ticket, staged)
        return stored // BLOCKS
    finally:
        reader.stager.close()


@pytest.mark.slow
def test_a_writer_that_is_killed_loses_nothing_it_committed_and_leaves_nothing_bad(tmp_path):
    chance = random.Random(20261130)
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.store.crashing"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    seen = []
    try:
        assert server.stdout.readline() == "ready\n"
        for seed in range(ROUNDS):
            folder = tmp_path / str(seed)
            server.stdin.write(f"{folder.as_uri()} {seed}\n")
            _, pid = server.stdout.readline().split()
            wait_s(chance.uniform(0, LONGEST_S))
            kill(int(pid))
            committed = 0
            while not (line := server.stdout.readline()).startswith("gone"):
                committed = int(line)
            assert line == "gone 9\n"
            seen.append(check(folder.as_uri(), seed, committed))
            store = open_store(folder.as_uri())
            assert [verify(store, commit) for commit in survey(store).commits] == [{}] * seen[-1]
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        server.stdin.close()
        server.wait()
    # The kills fell into all of a writer's life: before its first commit, between, and behind several.
    assert min(seen) == 0
    assert max(seen) >= 2


@pytest.mark.s3
def test_a_writer_to_s3_that_is_killed_loses_nothing_either(s3, s3_url):
    chance = random.Random(1)
    seen = []
    for seed in range(S3_ROUNDS):
        url = f"{s3_url}/{seed}"
        writer = subprocess.Popen(
            [sys.executable, "-m", "tests.store.crashing", url, str(seed)], stdout=subprocess.PIPE, text=True
        )
        committed = int(writer.stdout.readline())  # it is at it now
        wait_s(chance.uniform(0, 0.3))
        kill(writer.pid)
        committed = max([committed, *map(int, writer.stdout.read().split())])
        writer.wait()
        seen.append(check(url, seed, committed))
    assert min(seen) >= 1


def test_the_check_itself_sees_a_bad_block(tmp_path):
    """A negative control: a block of other content under the key."""
    node = Node(tmp_path.as_uri(), page_bytes={FULL: BLOCK_BYTES})
    node.save([key_of(1, number) for number in range(BLOCKS)])
    node.stager.close()
    with pytest.raises(AssertionError, match="bad block"):
        check(tmp_path.as_uri(), 1, 1)
    with pytest.raises(AssertionError, match="lost"):
        check(tmp_path.as_uri(), 1, 2)
