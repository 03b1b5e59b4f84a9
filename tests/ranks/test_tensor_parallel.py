"""Two ranks compute what one does, each on its own half of the KV heads."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.harness.two_threads import on_two_ranks
from tracekv.harness import Executor, build_model
from tracekv.harness.heads import keep_heads
from tracekv.harness.ranks import Prompt, RankJob

SMALL = {"num_hidden_layers": 2}
HERE = "tests.ranks.connectors"
CASES = [("llama", "v1"), ("llama", "v2"), ("gemma3", "v1"), ("gemma3", "v2")]
CONNECTED = [case for case in CASES if case != ("gemma3", "v1")]  # V1 refuses a connector under several windows


def tokens(length, seed=5):
    return torch.randint(3, 2000, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def alone(preset, prompts, **options):
    executor = Executor(build_model(preset, **SMALL), **options)
    requests = [executor.submit(prompt.tokens, prompt.max_new_tokens) for prompt in prompts]
    executor.run()
    return requests


@pytest.mark.parametrize(("preset", "mode"), CASES)
def test_two_ranks_give_the_tokens_of_one(preset, mode, two_ranks):
    prompts = [Prompt(tokens(300), 6), Prompt(tokens(77, seed=6), 4)]
    options = {"mode": mode, "chunk_tokens": 128}
    job = RankJob(rounds=[prompts], preset=preset, model_options=SMALL, executor_options=options)
    expected = alone(preset, prompts, **options)
    results = two_ranks.run(job)
    assert [result.rank for result in results] == [0, 1]
    for one, *both in zip(expected, *(result.requests for result in results), strict=True):
        assert [rank.tokens for rank in both] == [one.output_tokens] * 2
        assert [rank.passes for rank in both] == [one.passes] * 2
        assert torch.equal(both[0].first_logits, both[1].first_logits)
        assert (both[0].first_logits - one.first_logits).abs().max() <= 1e-4


def test_half_of_the_heads_alone_gives_other_tokens():
    """Negative control: what the other rank adds matters."""
    model = build_model("llama", **SMALL)
    keep_heads(model, 0, 2, lambda partial: partial)
    executor = Executor(model)
    request = executor.submit(tokens(300), 6)
    executor.run()
    (whole,) = alone("llama", [Prompt(tokens(300), 6)])
    assert request.output_tokens != whole.output_tokens
    assert (request.first_logits - whole.first_logits).abs().max() > 1


def test_a_bias_behind_the_heads_is_added_once():
    def biased():
        model = build_model("llama", attention_bias=True, **SMALL)
        random = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for layer in model.model.layers:
                for name in "qkvo":
                    bias = getattr(layer.self_attn, f"{name}_proj").bias
                    bias.copy_(torch.randn(bias.shape, generator=random))
        return model

    def run(model, ranks=None):
        executor = Executor(model, collectives=ranks)
        request = executor.submit(tokens(100), 4)
        executor.run()
        return request

    def rank_main(ranks):
        model = halves[ranks.rank]
        keep_heads(model, ranks.rank, 2, lambda partial: partial.copy_(sum(ranks.allgather(partial))))
        return run(model, ranks)

    halves = [biased(), biased()]  # made one after the other: the seed is the process's
    whole, both = run(biased()), on_two_ranks(rank_main)
    assert [request.output_tokens for request in both] == [whole.output_tokens] * 2
    assert (both[0].first_logits - whole.first_logits).abs().max() <= 1e-4


def test_heads_that_can_not_be_shared_out_are_refused():
    with pytest.raises(NotImplementedError, match="2 KV heads of layer 0 can't be shared out to 3 ranks"):
        keep_heads(build_model("llama", **SMALL), 0, 3, lambda partial: partial)


def test_a_checkpoint_is_loaded_on_every_rank(tmp_path, two_ranks):
    build_model("llama", seed=3, **SMALL).save_pretrained(tmp_path)
    job = RankJob(rounds=[[Prompt(tokens(50), 3)]], checkpoint=str(tmp_path))
    expected = RankJob(rounds=job.rounds, seed=3, model_options=SMALL)
    got, same = two_ranks.run(job), two_ranks.run(expected)
    assert [result.requests[0].tokens for result in got] == [result.requests[0].tokens for result in same]


def connected(preset, mode, **more):
    names = {"scheduler": f"{HERE}:MemoryScheduler", "worker": f"{HERE}:MemoryWorker"}
    options = {"mode": mode, "chunk_tokens": 256}
    return RankJob(
        rounds=[[Prompt(tokens(500), 5)]],
        preset=preset,
        model_options=SMALL,
        executor_options=options,
        **{**names, **more},
    )


@pytest.mark.parametrize(("preset", "mode"), CONNECTED)
def test_what_two_ranks_saved_two_ranks_load(preset, mode, two_ranks):
    cold = two_ranks.run(connected(preset, mode, observe=f"{HERE}:stored"))
    warm = two_ranks.run(connected(preset, mode))
    spoiled = two_ranks.run(connected(preset, mode, worker=f"{HERE}:SpoilsOnRank1", observe=f"{HERE}:forget"))
    reused = two_ranks.run(dataclasses.replace(connected(preset, mode), scheduler=None, worker=None, rounds=TWICE))
    for rank in range(2):
        first, loaded, wrong, again = (result[rank].requests[-1] for result in (cold, warm, spoiled, reused))
        assert (first.honoured_tokens, loaded.honoured_tokens) == (0, 480)
        assert loaded.tokens == first.tokens
        # The same passes over the same KV, whether a connector put it there or it still was: bit by bit.
        assert loaded.passes == again.passes
        assert torch.equal(loaded.first_logits, again.first_logits)
        # Negative control: rank 1's half of the KV is what rank 0 computes with too.
        assert (wrong.first_logits - loaded.first_logits).abs().max() > 0.1
    pages, sizes = cold[0].observed
    assert cold[1].observed == (pages, sizes)
    assert pages > 0
    # A rank's page holds one of the two KV heads: keys and values of 32 tokens of 32 numbers, per layer of its group.
    layers = 2 if preset == "llama" else 1
    assert sizes == {layers * 2 * 32 * 32 * 4}


TWICE = [[Prompt(tokens(500), 5)], [Prompt(tokens(500), 5)]]


def test_one_rank_takes_the_same_job():
    from tracekv.harness.ranks import run_ranks

    (result,) = run_ranks(1, connected("llama", "v2", observe=f"{HERE}:stored"))
    (expected,) = alone("llama", [Prompt(tokens(500), 5)], chunk_tokens=256)
    assert result.requests[0].tokens == expected.output_tokens
    assert result.observed == (15, {2 * 2 * 2 * 32 * 32 * 4})
