"""The persistent connector on two ranks: tokens of a run without it, whole loads, and what one rank's bytes are worth."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.ranks.test_tensor_parallel import SMALL, alone, tokens
from tracekv.harness.ranks import Prompt, RankJob, RanksFailed

CASES = [("llama", "v1"), ("llama", "v2"), ("gemma3", "v2")]
PROMPT = 500
HERE = "tests.ranks.fsspec_pairs"


@pytest.fixture
def arena_dir(tmp_path):
    folder = tmp_path / "arena"
    folder.mkdir()
    return folder


@pytest.fixture
def job(tmp_path, arena_dir):
    """Jobs of engines that share a store below the test's folder."""

    def make(preset="llama", mode="v2", **more):
        environ = {
            "TRACEKV_FSSPEC__URL": (tmp_path / "kv").as_uri(),
            "TRACEKV_FSSPEC__MODEL_ID": "two-ranks",
            "TRACEKV_FSSPEC__OFFER_WAIT_MS": "10000",
            "TRACEKV_FSSPEC__ARENA_BYTES": str(32 << 20),
            "TRACEKV_FSSPEC__ARENA_DIR": str(arena_dir),
            **more.pop("environ", {}),
        }
        options = {"mode": mode, "chunk_tokens": 256, **more.pop("executor_options", {})}
        defaults = {
            "rounds": [[Prompt(tokens(PROMPT), 5)]],
            "scheduler": "tracekv_fsspec:Scheduler",
            "worker": "tracekv_fsspec:Worker",
            "model_options": SMALL,
        }
        return RankJob(preset=preset, executor_options=options, environ=environ, **{**defaults, **more})

    return make


@pytest.mark.parametrize(("preset", "mode"), CASES)
def test_two_ranks_serve_what_two_ranks_stored(preset, mode, job, two_ranks):
    cold = two_ranks.run(job(preset, mode))
    warm = two_ranks.run(job(preset, mode))
    spoiled = two_ranks.run(job(preset, mode, worker=f"{HERE}:SpoilsASlotOnRank1"))
    twice = [[Prompt(tokens(PROMPT), 5)]] * 2
    reused = two_ranks.run(dataclasses.replace(job(preset, mode), scheduler=None, worker=None, rounds=twice))
    (expected,) = alone(preset, [Prompt(tokens(PROMPT), 5)], mode=mode, chunk_tokens=256)
    for rank in range(2):
        first, loaded, wrong, again = (result[rank].requests[-1] for result in (cold, warm, spoiled, reused))
        assert (first.honoured_tokens, loaded.honoured_tokens) == (0, 480)
        assert loaded.tokens == first.tokens == expected.output_tokens
        # The same passes over the same KV, whether the store put it there or it still was: bit by bit.
        assert loaded.passes == again.passes
        assert torch.equal(loaded.first_logits, again.first_logits)
        # Negative control: one byte of one of rank 1's slots is what rank 0 computes with, too.
        assert (wrong.first_logits - loaded.first_logits).abs().max() > 1e-3


@pytest.mark.parametrize("preset", ["llama", "gemma3"])
def test_nothing_stays_pinned_of_cancelled_and_replayed_requests(preset, job, two_ranks):
    rounds = [[Prompt(tokens(PROMPT, seed=seed + number), 3) for number in range(3)] for seed in (10, 20, 10)]
    again = job(
        preset,
        rounds=rounds,
        drive=f"{HERE}:cancels_and_destroys",
        observe=f"{HERE}:arena_at_rest",
        environ={"TRACEKV_FSSPEC__ARENA_BYTES": str(2 << 20)},
        executor_options={"chunk_tokens": 128},
    )
    without = two_ranks.run(dataclasses.replace(again, scheduler=None, worker=None, observe=None))
    two_ranks.run(again)
    for result, expected in zip(two_ranks.run(again), without, strict=True):
        for number, (served, plain) in enumerate(zip(result.requests, expected.requests, strict=True)):
            if number % 3 != 1:  # the one that is cancelled
                assert served.tokens == plain.tokens
                assert served.device_tokens + served.honoured_tokens > 0
        if result.rank == 0:
            free, slots, under_way = result.observed
            assert free == dict.fromkeys(free, slots)
            assert len(free) == 2 * (1 if preset == "llama" else 2)
            assert under_way == 0


@pytest.mark.slow
def test_nothing_stays_pinned_of_a_request_that_is_cancelled_while_it_is_parked(job, two_ranks, mortal_ranks):
    stored = [Prompt(tokens(PROMPT, seed=seed), 3) for seed in (30, 31)]
    running = Prompt(tokens(PROMPT, seed=32), 12)
    parking = job(rounds=[stored], environ={"TRACEKV_FSSPEC__OFFER": "async", "TRACEKV_FSSPEC__OFFER_WAIT_MS": "0"})
    two_ranks.run(parking)
    results = mortal_ranks.run(
        dataclasses.replace(
            parking,
            rounds=[[*stored, running]],
            scheduler=f"{HERE}:HoldsReadsUp",
            drive=f"{HERE}:cancels_what_is_parked",
            observe=f"{HERE}:arena_at_rest",
        )
    )
    first, _, last = alone("llama", [*stored, running], chunk_tokens=256)
    for result in results:
        held, cancelled, ran = result.requests
        assert (held.tokens, cancelled.tokens, ran.tokens) == (first.output_tokens, [], last.output_tokens)
        assert held.honoured_tokens == 480
    free, slots, under_way = results[0].observed
    assert (free, under_way) == (dict.fromkeys(free, slots), 0)


def test_with_attention_data_parallelism_each_rank_is_served_what_the_other_stored(job, arena_dir, two_ranks):
    prompts = [Prompt(tokens(PROMPT, seed=seed), 5) for seed in (5, 6)]
    data_parallel = job(executor_options={"attention_dp": True}, rounds=[prompts])
    cold = two_ranks.run(data_parallel)
    warm = two_ranks.run(dataclasses.replace(data_parallel, rounds=[prompts[::-1]]))
    expected = [request.output_tokens for request in alone("llama", prompts, chunk_tokens=256)]
    for rank in range(2):
        assert cold[rank].requests[0].tokens == expected[rank]
        assert warm[rank].requests[0].tokens == expected[1 - rank]
        assert (cold[rank].requests[0].honoured_tokens, warm[rank].requests[0].honoured_tokens) == (0, 480)
    assert list(arena_dir.iterdir()) == []


def failure_of(ranks, job):
    with pytest.raises(RanksFailed) as caught:
        ranks.run(job)
    return caught.value.failures


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["0 loads", "1 loads", "0 saves", "1 saves"])
def test_after_a_kill_in_a_copy_the_next_engine_starts_clean(victim, job, arena_dir, two_ranks, mortal_ranks):
    is_warm = victim.endswith("loads")
    if is_warm:
        two_ranks.run(job())
    failures = failure_of(mortal_ranks, job(worker=f"{HERE}:Dies", environ={"TEST_VICTIM": victim}))
    assert failures[int(victim[0])].what == "signal 9 (SIGKILL)"
    assert len(list(arena_dir.iterdir())) == 1  # nobody had the time to remove it
    after = two_ranks.run(job())
    (expected,) = alone("llama", [Prompt(tokens(PROMPT), 5)], chunk_tokens=256)
    for result in after:
        assert result.requests[0].tokens == expected.output_tokens
        assert (result.requests[0].honoured_tokens > 0) == is_warm
    assert list(arena_dir.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_after_a_kill_while_requests_are_parked_the_next_engine_starts_clean(
    victim, job, arena_dir, two_ranks, mortal_ranks
):
    prompts = [[Prompt(tokens(PROMPT, seed=seed), 5) for seed in (1, 2)]]
    parking = job(rounds=prompts, environ={"TRACEKV_FSSPEC__OFFER": "async", "TRACEKV_FSSPEC__OFFER_WAIT_MS": "0"})
    two_ranks.run(parking)
    holding = dataclasses.replace(
        parking,
        scheduler=f"{HERE}:HoldsReadsUp",
        worker=f"{HERE}:Dies",
        environ={**parking.environ, "TEST_VICTIM": f"{victim} parked"},
    )
    failures = failure_of(mortal_ranks, holding)
    assert failures[victim].what == "signal 9 (SIGKILL)"
    assert failures[1 - victim].kind == "blocked"
    assert len(list(arena_dir.iterdir())) == 1
    after = two_ranks.run(dataclasses.replace(parking, observe=f"{HERE}:arena_at_rest"))
    expected = alone("llama", prompts[0], chunk_tokens=256)
    for result in after:
        assert [request.tokens for request in result.requests] == [request.output_tokens for request in expected]
        assert [request.honoured_tokens for request in result.requests] == [480, 480]
    free, slots, under_way = after[0].observed
    assert (free, under_way) == (dict.fromkeys(free, slots), 0)
    assert list(arena_dir.iterdir()) == []


@pytest.mark.slow
def test_a_slot_that_was_given_away_stops_the_engine(job, two_ranks, mortal_ranks):
    two_ranks.run(job())
    failures = failure_of(mortal_ranks, job(worker=f"{HERE}:StaleOnRank1"))
    assert failures[1].what.startswith("StaleSlot")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("worker", "told"), [("OtherBlockSizeOnRank1", "tokens per block 16"), ("OnAHostOfItsOwn", "2 hosts")]
)
def test_ranks_that_dont_fit_are_refused_on_every_rank(worker, told, job, arena_dir, mortal_ranks):
    failures = failure_of(mortal_ranks, job(worker=f"{HERE}:{worker}"))
    assert [failures[rank].kind for rank in (0, 1)] == ["raised"] * 2
    assert all(told in failures[rank].what for rank in (0, 1))
    assert list(arena_dir.iterdir()) == []
