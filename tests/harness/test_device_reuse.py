from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harness.test_generate_equality import _small
from tracekv.harness import Executor

MODES = [("llama", "v1"), ("llama", "v2"), ("gemma3", "v2")]


def tokens(length, seed=5):
    return torch.randint(3, 1000, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def serve(executor, *prompts, new=4, **more):
    requests = [executor.submit(prompt, new, **more) for prompt in prompts]
    executor.run()
    assert all(request.error is None for request in requests)
    return requests


@pytest.mark.parametrize(("preset", "mode"), MODES)
def test_equal_passes_over_reused_pages_give_bit_equal_logits(preset, mode, model):
    warm = []
    for _ in range(2):
        executor = Executor(model(preset), mode=mode, chunk_tokens=128)
        serve(executor, tokens(500))
        warm.append(serve(executor, tokens(500))[0])
    assert warm[0].device_tokens == 480
    assert warm[0].passes == warm[1].passes == [(480, 20)]
    assert torch.equal(warm[0].first_logits, warm[1].first_logits)


@pytest.mark.parametrize(("preset", "mode"), MODES)
def test_a_changed_page_shows_in_the_logits(preset, mode, model):
    """Negative control: every layer group decides visibly."""
    executor = Executor(model(preset), mode=mode, chunk_tokens=256)
    serve(executor, tokens(1100))
    expected = serve(executor, tokens(1100))[0]
    assert expected.device_tokens == 1088
    for pool in executor.cache.pools:
        request = executor.submit(tokens(1100), 1)
        executor._requests.begin_pass()
        batch = executor._scheduler.schedule(executor._requests.active)
        executor.cache.prepare_resources(batch, None)
        page = executor.cache.slots(request)[pool.shape.layer_group_id][-3]
        kept = pool.tensor[page].clone()
        pool.tensor[page] = 0
        launched = executor._forward.run(batch)
        pool.tensor[page] = kept
        moved = (launched.samples[0].logits - expected.first_logits).abs().max()
        assert moved >= 100 * 1e-3


@pytest.mark.parametrize(("preset", "mode"), MODES)
@pytest.mark.parametrize("shorter", [130, 256, 390])
def test_a_shorter_prompt_on_reused_pages_gets_the_tokens_of_a_cold_run(preset, mode, shorter, model):
    driven = model(preset)
    executor = Executor(driven, mode=mode, chunk_tokens=128)
    serve(executor, tokens(500))
    warm = serve(executor, tokens(500)[:shorter])[0]
    cold = serve(Executor(driven, mode=mode), tokens(500)[:shorter])[0]
    assert warm.device_tokens == (shorter - 1) // 32 * 32
    assert warm.output_tokens == cold.output_tokens


def test_requests_that_differ_in_salt_lora_or_images_share_nothing(model):
    executor = Executor(model("llama"))
    serve(executor, tokens(100))
    image = {"multimodal_hashes": [[1, 2]], "multimodal_positions": [3], "multimodal_lengths": [4]}
    for more in ({"cache_salt": "a"}, {"cache_salt": "b"}, {"lora_task_id": 1}, image):
        assert serve(executor, tokens(100), **more)[0].device_tokens == 0
        assert serve(executor, tokens(100), **more)[0].device_tokens == 96
    unknown = {"multimodal_positions": [3]}
    for _ in range(2):
        assert serve(executor, tokens(100), **unknown)[0].device_tokens == 0


def test_generated_blocks_are_reused_too(model):
    executor = Executor(model("llama"))
    first = serve(executor, tokens(90), new=40)[0]
    continued = serve(executor, first.get_tokens(0))[0]
    assert continued.device_tokens == 128
    assert continued.output_tokens == serve(Executor(model("llama")), first.get_tokens(0))[0].output_tokens


@pytest.mark.parametrize("preset", ["llama", "gemma3"])
def test_partial_reuse_supplies_tokens_of_a_block_from_a_private_copy(preset, model):
    executor = Executor(model(preset), partial_reuse=True)
    first, other = tokens(320), [*tokens(320)[:209], *tokens(91, seed=9)]
    before = serve(executor, first)[0]
    diverging = serve(executor, other)[0]
    assert diverging.device_tokens == 209
    assert diverging.output_tokens == serve(Executor(model(preset)), other)[0].output_tokens
    again = serve(executor, first)[0]
    assert again.device_tokens == 319
    assert again.output_tokens == before.output_tokens


def test_without_partial_reuse_only_whole_blocks_are_supplied(model):
    executor = Executor(model("llama"))
    serve(executor, tokens(300))
    assert serve(executor, [*tokens(300)[:209], 7])[0].device_tokens == 192


def test_without_block_reuse_nothing_is_supplied(model):
    executor = Executor(model("llama"), block_reuse=False)
    serve(executor, tokens(300))
    assert serve(executor, tokens(300))[0].device_tokens == 0


def test_the_end_of_the_oldest_prefix_is_evicted_first(model):
    executor = Executor(model("llama"), num_blocks=12)
    serve(executor, tokens(10 * 32 + 1), new=1)
    serve(executor, tokens(4 * 32 + 1, seed=6), new=1)
    assert serve(executor, tokens(10 * 32 + 1), new=1)[0].device_tokens == 7 * 32


def test_a_match_needs_a_sliding_groups_live_pages_only(model):
    executor = Executor(model("gemma3", sliding_window=64), num_blocks=12)
    prompt = tokens(10 * 32 + 1)
    cold = serve(executor, prompt, new=1)[0]
    sliding = executor.cache.pools[0]
    for _ in range(sliding.available - 4):  # pages out of the window went back first: all but the last four are evicted
        sliding.take()
    warm = serve(executor, prompt, new=1)[0]
    assert warm.device_tokens == 320
    assert warm.output_tokens == cold.output_tokens


def test_a_partial_match_needs_its_page_in_every_group(model):
    executor = Executor(model("gemma3", sliding_window=64), num_blocks=12, partial_reuse=True)
    serve(executor, tokens(10 * 32 + 1), new=1)
    full = executor.cache.pools[1]
    for slot in [full.take() for _ in range(3)]:  # two free ones, and the last block's
        full.drop(slot)
    diverging = [*tokens(10 * 32 + 1)[:293], 7]
    warm = serve(executor, diverging)[0]
    assert warm.device_tokens == 288
    assert warm.output_tokens == serve(Executor(model("gemma3", sliding_window=64)), diverging)[0].output_tokens


@settings(max_examples=15, deadline=None)
@given(data=st.data(), mode=st.sampled_from(["v1", "v2"]), partial=st.booleans())
def test_reuse_and_eviction_never_change_tokens(data, mode, partial):
    """Few pages, prompts with common beginnings, several at a time."""
    executor = Executor(
        _small(),
        mode=mode,
        tokens_per_block=16,
        num_blocks=14,
        chunk_tokens=32,
        partial_reuse=partial,
        max_batch_tokens=64,
    )
    alone = Executor(_small(), tokens_per_block=16, block_reuse=False)
    stems = [tokens(100, seed) for seed in range(3)]
    for _ in range(data.draw(st.integers(1, 4))):
        prompts = data.draw(
            st.lists(st.builds(lambda s, n, t: [*s[:n], *t], st.sampled_from(stems), st.integers(1, 100),
                               st.lists(st.integers(3, 999), max_size=20)), min_size=1, max_size=3)
        )  # fmt: skip
        for request, prompt in zip(serve(executor, *prompts, new=3), prompts, strict=True):
            assert request.output_tokens == serve(alone, prompt, new=3)[0].output_tokens


@pytest.mark.parametrize(("preset", "mode"), MODES)
def test_pages_that_nobody_holds_are_never_read(preset, mode, model):
    """Poison: what no live request holds becomes NaN after each pass."""
    driven = model(preset)
    prompts = [tokens(n, seed=n) for n in (290, 64, 170)]
    expected = [request.output_tokens for request in serve(Executor(driven, mode=mode), *prompts, new=12)]
    executor = Executor(driven, mode=mode, chunk_tokens=96)
    requests = [executor.submit(prompt, 12) for prompt in prompts]
    poisoned = 0
    while executor.has_work:
        for pool in executor.cache.pools:
            slots = executor.cache.unheld(pool.shape.layer_group_id)
            pool.tensor[slots] = float("nan")
            poisoned += len(slots)
        executor.step()
    assert poisoned > 100
    assert [request.output_tokens for request in requests] == expected


def test_poison_in_a_held_page_is_noticed(model):
    """Negative control of the poison."""
    executor = Executor(model("llama"))
    request = executor.submit(tokens(100), 3)
    executor.step()
    executor.cache.pools[0].tensor[executor.cache.slots(request)[0][1]] = float("nan")
    expected = serve(Executor(model("llama")), tokens(100), new=3)[0]
    executor.run()
    assert request.output_tokens != expected.output_tokens


def test_a_prefix_whose_page_went_while_a_request_ran_on_behind_it_is_found_once_it_is_known_again(model):
    """Two compute it at once, and one's page is known for it; that page goes, and the other adds a block behind it."""
    executor = Executor(model("llama"), num_blocks=8, policy="MAX_UTILIZATION")
    prefix = tokens(33)
    executor.submit(prefix, 1)
    longer = executor.submit(prefix, 40)
    executor.step()
    crowd = executor.submit(tokens(191, seed=7), 1)  # all pages that the longer one doesn't hold
    while not crowd.is_finished:
        executor.step()
    executor.run()
    assert len(longer.output_tokens) == 40
    assert [serve(executor, prefix, new=1)[0].device_tokens for _ in range(2)] == [0, 32]
    serve(
        executor, tokens(200, seed=8), new=1
    )  # all pages but the prefix's, which was used last; the block behind it goes
    assert serve(executor, prefix, new=1)[0].device_tokens == 32
