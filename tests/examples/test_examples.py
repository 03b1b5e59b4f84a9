"""The two example connectors in the reference executor: cold, then warm in a fresh one; and the limits they state."""

from __future__ import annotations

import random

import pytest

from examples.persistent_connector import PersistentKvCacheConnectorLeader, PersistentKvCacheConnectorWorker
from examples.vswa_connector import VswaKvCacheConnectorLeader, VswaKvCacheConnectorWorker
from tracekv.harness import Executor

FLAT = (PersistentKvCacheConnectorLeader, PersistentKvCacheConnectorWorker)
VSWA = (VswaKvCacheConnectorLeader, VswaKvCacheConnectorWorker)
PAIRS = {
    "flat on V1": ("llama", FLAT, "v1"),
    "flat on V2": ("llama", FLAT, "v2"),
    "by group, one group": ("llama", VSWA, "v2"),
    "by group, two groups": ("gemma3", VSWA, "v2"),
}


def tokens(seed, count=300):
    return random.Random(seed).choices(range(2048), k=count)


def run(model, pair, mode, prompt, **options):
    salt = options.pop("cache_salt", None)
    executor = Executor(model, *pair, mode=mode, num_blocks=64, **options)
    request = executor.submit(prompt, 4, cache_salt=salt)
    executor.run()
    assert request.error is None
    return request


@pytest.mark.parametrize("name", PAIRS)
def test_a_prompt_is_served_from_the_files_of_an_engine_that_ended(model, name):
    preset, pair, mode = PAIRS[name]
    prompt = tokens(1)
    bare = run(model(preset), (), mode, prompt)
    cold = run(model(preset), pair, mode, prompt)
    warm = run(model(preset), pair, mode, prompt)
    assert cold.honoured_tokens == 0
    assert warm.honoured_tokens == 288
    assert cold.output_tokens == warm.output_tokens == bare.output_tokens
    assert (warm.first_logits - bare.first_logits).abs().max() < 1e-3


@pytest.mark.parametrize("name", ["flat on V1", "by group, two groups"])
def test_a_changed_file_changes_the_answer(model, name, tmp_path):
    """The negative control: the equality above is not that of a prompt computed again."""
    import torch

    preset, pair, mode = PAIRS[name]
    prompt = tokens(2)
    cold = run(model(preset), pair, mode, prompt)
    for path in (tmp_path / "kv").glob("*.pt"):
        kept = torch.load(path)
        torch.save([torch.zeros_like(part) for part in kept] if isinstance(kept, list) else kept * 0, path)
    warm = run(model(preset), pair, mode, prompt)
    assert (warm.first_logits - cold.first_logits).abs().max() > 0.1


@pytest.mark.parametrize("name", ["flat on V1", "by group, two groups"])
def test_of_a_chunked_prompt_only_the_first_chunk_is_kept(model, name):
    preset, pair, mode = PAIRS[name]
    prompt = tokens(3)
    cold = run(model(preset), pair, mode, prompt, chunk_tokens=64)
    warm = run(model(preset), pair, mode, prompt, chunk_tokens=64)
    assert warm.honoured_tokens == 64
    assert warm.output_tokens == cold.output_tokens


@pytest.mark.parametrize("name", PAIRS)
def test_a_prompt_that_fills_its_blocks_leaves_one_to_compute(model, name):
    preset, pair, mode = PAIRS[name]
    run(model(preset), pair, mode, tokens(4, 96))
    assert run(model(preset), pair, mode, tokens(4, 96)).honoured_tokens == 64


@pytest.mark.parametrize("name", ["flat on V1", "by group, two groups"])
def test_another_salt_is_served_nothing(model, name):
    preset, pair, mode = PAIRS[name]
    run(model(preset), pair, mode, tokens(5), cache_salt="mine")
    assert run(model(preset), pair, mode, tokens(5), cache_salt="yours").honoured_tokens == 0
    assert run(model(preset), pair, mode, tokens(5), cache_salt="mine").honoured_tokens == 288


@pytest.mark.parametrize("name", ["flat on V1", "by group, two groups"])
def test_the_same_block_behind_another_beginning_is_another_block(model, name):
    preset, pair, mode = PAIRS[name]
    run(model(preset), pair, mode, tokens(6, 32) + tokens(7, 64) + [1])
    assert run(model(preset), pair, mode, tokens(8, 32) + tokens(7, 64) + [1]).honoured_tokens == 0


def test_a_page_that_left_the_window_is_neither_kept_nor_loaded(model):
    """Warm, the sliding group (128 tokens) has no page for the first blocks: they are passed over, the full group's aren't."""
    executor = Executor(model("gemma3"), *VSWA, num_blocks=64)
    executor.submit(tokens(9, 320), 2)
    executor.run()
    warm = Executor(model("gemma3"), *VSWA, num_blocks=64)
    planned = []
    build = warm.scheduler.build_connector_meta
    warm.scheduler.build_connector_meta = lambda output: planned.append(build(output)) or planned[-1]
    warm.submit(tokens(9, 320), 2)
    warm.run()
    loads = [load.layer_group_id for load in planned[0].load]
    assert loads.count(0) < loads.count(1) == 9
    assert all(slot >= 0 for plan in planned for _, _, slot in (*plan.load, *plan.save))
