"""Loads that run beside the forward pass: each layer waits for its own, nothing is left behind, and nothing is read too early."""

from __future__ import annotations

import functools
import random
import threading

import pytest
import torch

from tests.fsspec.engine import B, Engine, prompt
from tracekv.contract.reading import layout_of_tensor
from tracekv.harness import Executor, build_model
from tracekv.harness.bringup import CudaGraphConfig, KvCacheConfig, LlmArgs
from tracekv.journal.records import Transfer
from tracekv.journal.vocabulary import Direction, Tier
from tracekv_fsspec import Scheduler, Worker, loading, transfers
from tracekv_fsspec.loading import HostLoading, Job
from tracekv_fsspec.moving import HostMover, Moves, layer_by_layer
from tracekv_fsspec.plan import Copy
from tracekv_fsspec.transfers import LayerHooksMissing, hooks_surely_run

PROMPT = 700


@functools.cache
def model_of(preset):
    return build_model(preset)


@pytest.fixture
def begun(monkeypatch):
    """Loads of any size go beside the pass; the ones that did."""
    begun = []

    class Counted(HostLoading):
        def __init__(self, *arguments):
            begun.append(self)
            super().__init__(*arguments)

    monkeypatch.setattr(transfers, "LAYERWISE_BYTES", 0)
    monkeypatch.setattr(transfers, "HostLoading", Counted)
    return begun


@pytest.fixture
def executor():
    made = []

    def make(preset="llama", with_connector=True, **options):
        pair = (Scheduler, Worker) if with_connector else ()
        mode = {"llama": "v1", "gemma3": "v2"}[preset]
        defaults = {"mode": mode, "chunk_tokens": 256, "num_blocks": 96}
        made.append(Executor(model_of(preset), *pair, **{**defaults, **options}))
        return made[-1]

    yield make
    for each in made:
        each.shutdown()


def tokens(seed):
    return random.Random(seed).choices(range(2048), k=PROMPT)


def run(engine, prompt_tokens):
    submitted = engine.submit(prompt_tokens, 8)
    engine.run()
    return submitted


def stored(executor, prompt_tokens, **options):
    engine = executor(**options)
    first = run(engine, prompt_tokens)
    assert first.error is None
    engine.shutdown()
    return first


@pytest.mark.parametrize("preset", ["llama", "gemma3"])
def test_tokens_of_a_prompt_that_is_loaded_layer_by_layer_are_those_of_no_connector(preset, executor, configure, begun):
    configure(layerwise="on")
    ids = tokens(1)
    stored(executor, ids, preset=preset)
    warm = run(executor(preset), ids)
    alone = executor(preset, with_connector=False)
    cold, again = run(alone, ids), run(alone, ids)
    assert warm.honoured_tokens == again.device_tokens > 0
    assert begun
    assert warm.output_tokens == cold.output_tokens
    assert torch.equal(warm.first_logits, again.first_logits)


def test_a_layer_whose_load_is_withheld_moves_the_logits(executor, configure, begun, monkeypatch):
    configure(layerwise="on")
    ids = tokens(2)
    stored(executor, ids)
    parts = loading._parts
    monkeypatch.setattr(
        loading,
        "_parts",
        lambda jobs, pieces: [(layer, [] if layer == 2 else part) for layer, part in parts(jobs, pieces)],
    )
    warm = run(executor(), ids)
    alone = executor(with_connector=False)
    run(alone, ids)
    assert warm.honoured_tokens
    assert (warm.first_logits - run(alone, ids).first_logits).abs().max() > 0.1


def test_what_was_loaded_beside_the_pass_is_reported_once_with_its_times(executor, configure, begun, records):
    configure(layerwise="on")
    ids = tokens(3)
    stored(executor, ids, preset="gemma3")
    warm = run(executor("gemma3"), ids)
    loads = [record for record in records.of(Transfer) if record.direction is Direction.LOAD]
    assert sorted(record.layer_group for record in loads) == [0, 1]
    for record in loads:
        assert record.request_id == warm.request_id
        assert record.tokens == len(record.pages) * 32
        assert record.nbytes == len(record.pages) * 2 * 2 * 2 * 32 * 32 * 4
        assert 0 < record.copy_ns <= record.ended_ns - record.started_ns
        assert record.stall_ns >= 0


def test_where_loads_precede_the_pass_all_of_their_time_is_stall(executor, configure, begun, records):
    configure(layerwise="off")
    ids = tokens(3)
    stored(executor, ids)
    run(executor(), ids)
    (load,) = [record for record in records.of(Transfer) if record.direction is Direction.LOAD]
    assert load.stall_ns == load.copy_ns > 0
    assert not begun


class Gate:
    """A mover that copies a layer only when it is let."""

    def __init__(self, mover, layers):
        self._mover = mover
        self.open = {layer: threading.Event() for layer in range(layers)}
        self.done = []

    def load(self, moves, pieces):
        layer = pieces[0].layer
        assert self.open[layer].wait(30)
        self._mover.load(moves, pieces)
        self.done.append(layer)

    save = None


@pytest.fixture
def gated():
    """A load of three pages of four layers behind a gate."""
    pool = torch.zeros((8, 4, 2, 16))
    layout = layout_of_tensor(pool, 4)
    page = layout.groups[0].bytes_per_page
    arena = bytearray(random.Random(1).randbytes(8 * page))
    gate = Gate(HostMover({0: [layout.groups[0].regions[0].slots()]}, memoryview(arena)), 4)
    moves = Moves(0, [1, 5, 2], [0, page, 3 * page], page)
    pieces = {piece.layer: [piece] for piece in layer_by_layer(layout.groups[0])}
    with loading.ThreadPoolExecutor(1) as thread:
        job = Job(Copy(1, 0, 0, Tier.HOST), moves, 3 * page)
        yield gate, HostLoading(gate, [job], {0: pieces}, thread), pool
        for event in gate.open.values():
            event.set()


def test_a_layer_waits_for_its_own_load_and_for_no_later_one(gated):
    gate, load, pool = gated
    gate.open[0].set()
    load.wait(0, None)
    assert gate.done == [0]
    assert pool[[1, 5, 2], 0].any(dim=-1).all()
    assert not pool[:, 1:].any()
    assert load.unasked == {1, 2, 3}


def test_a_layer_is_held_back_until_it_is_loaded(gated):
    gate, load, _ = gated
    gone_on = threading.Event()
    waiting = threading.Thread(target=lambda: (load.wait(1, None), gone_on.set()))
    waiting.start()
    gate.open[0].set()
    load.wait(0, None)
    assert not gone_on.is_set()
    gate.open[1].set()
    assert gone_on.wait(30)
    waiting.join()
    assert gate.done == [0, 1]


def test_joining_waits_for_every_layer_and_counts_the_stall(gated):
    gate, load, _ = gated
    for event in gate.open.values():
        event.set()
    load.join(None)
    load.settle()
    assert gate.done == [0, 1, 2, 3]
    assert load.jobs[0].copy_ns > 0


def test_what_a_copy_raises_is_raised_to_who_waits_for_it(gated):
    gate, load, _ = gated

    def broken(moves, pieces):
        raise OSError("planted")

    gate._mover.load = broken
    gate.open[0].set()
    with pytest.raises(OSError, match="planted"):
        load.wait(0, None)
    with pytest.raises(OSError, match="planted"):
        load.join(None)


def test_a_forward_that_raised_leaves_its_loads_to_the_next_callback(configure, begun):
    configure(layerwise="on")
    engine = Engine()
    ids = prompt(6)
    engine.finish(engine.prefill(1, ids))
    assert engine.scheduler.flush(20)
    running = engine.admit(2, ids)
    assert running.honoured
    engine.run_pass((running, 1), forward=False)
    assert len(begun) == 1
    engine.worker.get_finished([], [])
    assert engine.holds_its_kv(running, 0, running.honoured // B)
    assert not engine.worker._transfers.is_loading
    engine.stop()


def test_a_pass_without_hooks_fails_saves_nothing_and_is_the_last_to_be_loaded_so(configure, begun):
    configure(layerwise="on")
    engine = Engine()
    ids, longer = prompt(6), prompt(6) + prompt(6, seed=9)
    engine.finish(engine.prefill(1, ids))
    assert engine.scheduler.flush(20)
    running = engine.admit(2, longer)
    with pytest.raises(LayerHooksMissing, match="TRACEKV_FSSPEC__LAYERWISE=off"):
        engine.run_pass((running, len(longer) - running.position))
    engine.worker.get_finished([], [])
    engine.finish(running)
    again = engine.prefill(3, longer)
    assert again.honoured == running.honoured
    assert engine.holds_its_kv(again)
    assert len(begun) == 1
    engine.stop()


@pytest.mark.parametrize("graph_replay", [False, True])
def test_by_itself_loads_go_beside_the_pass_only_where_hooks_surely_run(graph_replay, executor, configure, begun):
    configure(layerwise="auto")
    first, second = tokens(4), tokens(5)
    stored(executor, second)
    engine = executor(graph_replay=graph_replay)
    run(engine, first)  # its hooks are seen
    warm = run(engine, second)
    assert warm.honoured_tokens
    assert bool(begun) is not graph_replay
    alone = executor(with_connector=False)
    assert warm.output_tokens == run(alone, second).output_tokens


def test_before_hooks_were_seen_loads_precede_the_pass(executor, configure, begun):
    configure(layerwise="auto")
    ids = tokens(6)
    stored(executor, ids)
    assert run(executor(), ids).honoured_tokens
    assert not begun


def test_arguments_that_do_not_tell_leave_it_open_whether_hooks_run():
    assert hooks_surely_run(LlmArgs())
    assert not hooks_surely_run(LlmArgs(cuda_graph_config=CudaGraphConfig()))
    assert not hooks_surely_run(None)
    assert not hooks_surely_run(KvCacheConfig())
