"""kill -9 of an engine in a load, in a save and between, then a clean start on the same folder of arenas and the same store."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from tests.fsspec import dying
from tests.fsspec.dying import BLOCK, LENGTH, NEW, POINTS, PROMPTS, executor
from tracekv_fsspec import Scheduler, Worker
from tracekv_fsspec.inventory import survey, verify
from tracekv_fsspec.store import open_store

WHOLE = LENGTH // BLOCK * BLOCK


@pytest.fixture(scope="module")
def killed():
    """Run an engine in a process of its own until it is killed at a point."""
    server = subprocess.Popen(
        [sys.executable, "-m", dying.__name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert server.stdout.readline() == "ready\n"

    def at(point, url, arena_dir, offer):
        server.stdin.write(f"{point}\t{url}\t{arena_dir}\t{offer}\n")
        return server.stdout.readline()

    yield at
    server.stdin.close()
    server.wait()


@pytest.fixture(scope="module")
def cold():
    return served(executor())


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch, tmp_path):
    torch.set_num_threads(1)
    monkeypatch.setenv("TRACEKV_JOURNAL_DIR", str(tmp_path / "journals"))


def served(running):
    requests = [running.submit(prompt, NEW) for prompt in PROMPTS]
    running.run()
    running.shutdown()
    assert [request.error for request in requests] == [None] * len(PROMPTS)
    return requests


def is_equal(ours, theirs):
    return [each.output_tokens for each in ours] == [each.output_tokens for each in theirs] and all(
        (mine.first_logits - other.first_logits).abs().max() < 1e-3 for mine, other in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("offer", ["staged", "async"])
@pytest.mark.parametrize("point", POINTS)
def test_the_next_engine_starts_clean_and_serves_what_is_right(killed, cold, monkeypatch, tmp_path, point, offer):
    url, arenas = (tmp_path / "kv").as_uri(), tmp_path / "arenas"
    for name, value in dying.settings(url, arenas, offer=offer).items():
        monkeypatch.setenv(name, value)
    is_warm = point in ("load", "staging")
    if is_warm:
        served(executor("llama", Scheduler, Worker))
    assert killed(point, url, arenas, offer) == "gone 9\n"
    assert len(list(arenas.iterdir())) == 1  # nobody had the time to remove it
    store = open_store(url)
    commits = survey(store).commits
    assert [verify(store, commit) for commit in commits] == [{}] * len(commits)
    assert bool(commits) == (is_warm or point == "behind the manifest")
    after = executor("llama", Scheduler, Worker)
    assert len(list(arenas.iterdir())) == 1  # its own
    requests = served(after)
    assert is_equal(requests, cold)
    if is_warm:
        assert [request.honoured_tokens for request in requests] == [WHOLE] * len(PROMPTS)
    # What was computed anew is stored by now.
    assert [request.honoured_tokens for request in served(executor("llama", Scheduler, Worker))] == [WHOLE] * 2
    assert list(arenas.iterdir()) == []


def test_a_changed_block_of_the_store_would_be_seen(cold, monkeypatch, tmp_path):
    """The negative control: what a load brings decides on the tokens' logits."""
    for name, value in dying.settings((tmp_path / "kv").as_uri(), tmp_path / "arenas").items():
        monkeypatch.setenv(name, value)
    served(executor("llama", Scheduler, Worker))
    running = executor("llama", Scheduler, Worker)
    mover = running.worker._transfers._mover
    load = mover.load

    def half(moves, pieces):
        count = len(moves.pages) // 2
        load(replace(moves, pages=moves.pages[:count], starts=moves.starts[:count]), pieces)

    mover.load = half
    assert not is_equal(served(running), cold)
