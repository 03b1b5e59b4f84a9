"""WINDOW_LOOKUP: more can be served without what a window has passed, and never where it might be needed after all."""

from __future__ import annotations

import random

import pytest

from tests.fsspec.engine import B, prompt
from tracekv.harness import Executor, build_model
from tracekv.journal.records import Lookup
from tracekv.journal.vocabulary import MissReason
from tracekv.settings import SettingsError
from tracekv_fsspec import Scheduler, Worker
from tracekv_fsspec.planning import OfferLost
from tracekv_fsspec.saving import SavePlanner

WINDOW = 2 * B + 1
WINDOWS = (None, WINDOW)
TOKENS = prompt(8)


@pytest.fixture
def stored(engines, configure):
    """Eight blocks, the first four of the sliding group left out: the device had kept that part of the prompt."""
    engine = engines(WINDOWS)
    running = engine.admit(1, TOKENS)
    for ordinal in range(4):
        running.pages[1][ordinal] = -1
    engine.run_pass((running, len(TOKENS)))
    assert engine.scheduler.flush(20)
    engine.stop()
    configure(window_lookup="window")


def test_a_sliding_group_needs_its_live_window_only(engines, stored, records):
    engine = engines(WINDOWS)
    running = engine.admit(5, TOKENS, context_chunk_size=len(TOKENS))
    assert running.offered == 8 * B
    lookup = records.of(Lookup)[-1]
    assert (lookup.stored_tokens, lookup.group_tokens, lookup.reason) == (8 * B, [8 * B, 0], None)
    plan = engine.run_pass((running, 1), forward=False)
    assert [len(copy.pages) for copy in plan.loads] == [8, 2]
    assert engine.holds_its_kv(running, 0, 8)
    copies = engine.scheduler._engine.stager.copies
    assert copies.wait(20)
    arena = engine.scheduler._engine.stager.arena
    assert all(arena.free_slots(shard) == arena.slots_per_shard for shard in arena.shards)


def test_strict_serves_none_of_it(engines, stored, configure, records):
    configure(window_lookup="strict")
    assert engines(WINDOWS).admit(5, TOKENS, context_chunk_size=len(TOKENS)).offered == 0
    assert records.of(Lookup)[-1].reason is MissReason.LAYER_GROUP_MISSING


def test_a_request_that_may_get_less_than_its_offer_is_served_strictly(engines, stored, records):
    engine = engines(WINDOWS)
    assert engine.admit(5, TOKENS, context_chunk_size=2 * B).offered == 0
    assert records.of(Lookup)[-1].reason is MissReason.LAYER_GROUP_MISSING
    assert engine.admit(6, TOKENS, context_chunk_size=8 * B).offered == 7 * B


def test_a_runtime_that_doesnt_tell_its_chunk_is_served_strictly_and_that_is_said_once(engines, stored, caplog):
    engine = engines(WINDOWS)
    for number in range(3):
        assert engine.admit(number, TOKENS).offered == 0
    assert len([record for record in caplog.records if "context_chunk_size" in record.message]) == 1


def test_a_run_that_is_staged_in_part_falls_back_to_what_is_whole(engines, stored, configure, records):
    configure(window_lookup="window", offer_wait_ms=0, arena_bytes=3 * 3 * 4096 + (1 << 16))
    engine = engines(WINDOWS)
    assert engine.admit(5, TOKENS, context_chunk_size=len(TOKENS)).offered == 0
    assert records.of(Lookup)[-1].reason in (MissReason.NOT_STAGED, MissReason.ARENA_FULL)


def test_less_honoured_than_offered_stops_the_engine(engines, stored):
    """A violation of what this setting rests on: with less honoured, the window begins at blocks that nobody has."""
    engine = engines(WINDOWS)
    running = engine.admit(5, TOKENS, context_chunk_size=len(TOKENS), honour=5 * B)
    with pytest.raises(OfferLost, match="WINDOW_LOOKUP=strict"):
        engine.run_pass((running, 1))


def test_nothing_honoured_is_no_violation(engines, stored):
    engine = engines(WINDOWS)
    running = engine.admit(5, TOKENS, context_chunk_size=len(TOKENS), honour=0)
    assert not engine.run_pass((running, len(TOKENS))).loads


def test_a_page_at_a_block_that_was_left_out_stops_the_engine(engines, stored):
    """It would go on as the request's own, and be found by whoever reuses the prefix on the device."""
    engine = engines(WINDOWS)
    running = engine.admit(5, TOKENS, context_chunk_size=len(TOKENS))
    assert running.pages[1][1] == -1
    running.pages[1][1] = engine.free[1].pop()
    with pytest.raises(OfferLost, match="1 of those blocks have pages"):
        engine.run_pass((running, 1))


@pytest.mark.parametrize("violation", ["less honoured", "page"])
def test_strict_stays_right_under_both_violations(engines, configure, violation):
    engine = engines(WINDOWS)
    engine.prefill(1, TOKENS)
    assert engine.scheduler.flush(20)
    fresh = engines(WINDOWS)
    running = fresh.admit(5, TOKENS, honour=5 * B if violation == "less honoured" else None)
    if violation == "page":
        running.pages[1][1] = fresh.free[1].pop()
    fresh.run_pass((running, 1), forward=False)
    assert fresh.holds_its_kv(running, 0, running.honoured // B)


def test_caches_without_windows_are_refused(engines, configure):
    configure(window_lookup="window")
    engine = engines(start=False)
    with pytest.raises(SettingsError, match="TRACEKV_FSSPEC__WINDOW_LOOKUP=window"):
        engine.start()


LENGTH, SLIDING = 520, 128
MODEL = []


@pytest.fixture
def model():
    if not MODEL:
        MODEL.append(build_model("gemma3"))
    return MODEL[0]


def long_prompt(seed=1):
    return random.Random(seed).choices(range(2048), k=LENGTH)


def run(executor, tokens):
    request = executor.submit(tokens, 8)
    executor.run()
    assert request.error is None
    executor.shutdown()
    return request


@pytest.fixture
def half_stored(model, configure, monkeypatch):
    """A prompt of 16 blocks, without the first ten of the sliding group."""
    sliding = next(n for n, pool in enumerate(Executor(model).cache.pools) if pool.shape.window)
    pages_of = SavePlanner._pages

    def leaves_out(self, request, block, position):
        found = pages_of(self, request, block, position)
        return {shard: page for shard, page in found.items() if shard.layer_group != sliding or block.ordinal >= 10}

    configure(url=None, arena_bytes=64 << 20)
    with monkeypatch.context() as patched:
        patched.setattr(SavePlanner, "_pages", leaves_out)
        run(Executor(model, Scheduler, Worker), long_prompt())


@pytest.fixture(autouse=True)
def _cache_home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_tokens_are_those_of_a_run_without_a_connector(model, half_stored, configure):
    cold = run(Executor(model), long_prompt())
    for lookup, honoured in (("window", LENGTH - LENGTH % 32), ("strict", 0)):
        configure(url=None, arena_bytes=64 << 20, window_lookup=lookup)
        warm = run(Executor(model, Scheduler, Worker), long_prompt())
        assert warm.honoured_tokens == honoured
        assert warm.output_tokens == cold.output_tokens
        assert (warm.first_logits - cold.first_logits).abs().max() < 1e-3


class Lying(Scheduler):
    """Told that the chunk is the whole prompt, where it isn't."""

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        chunk, request.context_chunk_size = request.context_chunk_size, request.prompt_len
        try:
            return super().get_num_new_matched_tokens(request, num_computed_tokens)
        finally:
            request.context_chunk_size = chunk


def test_an_engine_that_honours_less_after_all_is_stopped_and_served_rightly_by_strict(model, half_stored, configure):
    configure(url=None, arena_bytes=64 << 20, window_lookup="window")
    executor = Executor(model, Lying, Worker, chunk_tokens=448, grow_limit=0)
    executor.submit(long_prompt(), 8)
    with pytest.raises(OfferLost, match="WINDOW_LOOKUP=strict"):
        executor.run()
    executor.scheduler.shutdown()
    configure(url=None, arena_bytes=64 << 20, window_lookup="strict")
    warm = run(Executor(model, Lying, Worker, chunk_tokens=448, grow_limit=0), long_prompt())
    assert warm.output_tokens == run(Executor(model), long_prompt()).output_tokens
