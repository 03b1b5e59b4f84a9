"""An engine that is dropped without being shut down: what was saved is stored, and its arena, threads and socket go."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from time import monotonic

import pytest
import torch

import tracekv
from tests.fsspec.dying import LENGTH, NEW, PROMPTS, executor, settings
from tracekv_fsspec import Scheduler, Worker, worker
from tracekv_fsspec.collected import WhenCollected

WHOLE = LENGTH // 16 * 16


@pytest.fixture
def arenas(monkeypatch, tmp_path):
    """Their folder."""
    torch.set_num_threads(1)
    folder = tmp_path / "arenas"
    monkeypatch.setenv("TRACEKV_AGENT", "off")
    monkeypatch.setenv("TRACEKV_JOURNAL_DIR", str(tmp_path / "journals"))
    for name, value in settings((tmp_path / "kv").as_uri(), folder).items():
        monkeypatch.setenv(name, value)
    tracekv.capture.shutdown()
    yield folder
    tracekv.capture.shutdown()


def serve(pair):
    """Honoured tokens of an engine that nobody shuts down; nothing refers to it when this is left."""
    running = executor("llama", *pair)
    requests = [running.submit(prompt, NEW) for prompt in PROMPTS]
    running.run()
    assert [request.error for request in requests] == [None] * len(PROMPTS)
    return [request.honoured_tokens for request in requests]


def until(is_so):
    deadline = monotonic() + 30
    while not is_so():
        assert monotonic() < deadline
        gc.collect()
        threading.Event().wait(0.01)


def ours():
    return {thread for thread in threading.enumerate() if thread.name.startswith("tracekv-")}


def maps(arenas):
    """How many of them this process has mapped, the removed ones included."""
    return sum(f"{arenas}/" in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.parametrize("is_traced", [False, True])
def test_what_a_dropped_engine_held_goes_and_what_it_saved_is_stored(arenas, is_traced, tmp_path):
    pair = [tracekv.trace(half) if is_traced else half for half in (Scheduler, Worker)]
    threads = ours()
    assert serve(pair) == [0] * len(PROMPTS)
    until(lambda: not list(arenas.iterdir()))
    until(lambda: {thread for thread in ours() if "journal" not in thread.name} <= threads)
    until(lambda: not maps(arenas))
    assert list((tmp_path / "journals").glob("tracekv-hints-*")) == []
    assert serve(pair) == [WHOLE] * len(PROMPTS)
    until(lambda: not list(arenas.iterdir()))


def test_what_a_dropped_worker_registered_with_cuda_is_unregistered_while_it_is_mapped(arenas, monkeypatch):
    """Here without a GPU: only who undoes it, and when."""
    seen = []
    undone = threading.Event()

    def undo():
        seen.append((maps(arenas), threading.current_thread().name))
        undone.set()

    monkeypatch.setattr(worker, "pin_for_gpu", lambda layout, buffer: undo)
    serve((Scheduler, Worker))
    until(undone.is_set)
    assert seen == [(1, "tracekv-collected")]
    until(lambda: not maps(arenas))


def test_who_shuts_it_down_waits_for_nobody(arenas):
    """And the engine's thread that waited for its end is gone, too."""
    threads = ours()
    running = executor("llama", Scheduler, Worker)
    assert "tracekv-collected" in {thread.name for thread in ours() - threads}
    running.shutdown()
    until(lambda: ours() <= threads)
    assert list(arenas.iterdir()) == []


class Owner:
    pass


def test_the_collector_may_run_while_a_lock_is_held():
    """What ends an engine takes locks that the thread on which the collector runs may hold: so it isn't done there."""
    lock, ended = threading.Lock(), threading.Event()
    owner = Owner()
    owner.itself = owner  # so that only the collector finds it
    gone = weakref.ref(owner)

    def end():
        with lock:
            ended.set()

    WhenCollected(owner, end)
    with lock:
        del owner
        gc.collect()
        assert gone() is None
        assert not ended.is_set()
    assert ended.wait(30)
