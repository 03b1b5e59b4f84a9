"""A minimal connector saves in one executor and loads in another: what it loads is what the model attends to."""

from __future__ import annotations

import pytest
import torch

from tests.harness.memory_connector import memory_pair
from tests.harness.test_device_reuse import serve, tokens
from tracekv.harness import Executor

CASES = [("llama", "v1"), ("llama", "v2"), ("gemma3", "v2")]
CHUNKS = [None, 256]


def cold_and_warm(model, mode, chunk, *, after_load=None, length=1100, **limits):
    store = {}
    cold = Executor(model, *memory_pair(store), mode=mode, chunk_tokens=chunk)
    saved = serve(cold, tokens(length))[0]
    warm = Executor(model, *memory_pair(store, after_load=after_load, **limits), mode=mode, chunk_tokens=chunk)
    loaded = serve(warm, tokens(length))[0]
    return saved, loaded, warm


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize(("preset", "mode"), CASES)
def test_a_loaded_prefix_gives_the_tokens_and_logits_of_a_reused_one(preset, mode, chunk, model):
    driven = model(preset)
    saved, loaded, warm = cold_and_warm(driven, mode, chunk)
    bare = Executor(driven, mode=mode, chunk_tokens=chunk)
    cold, reused = serve(bare, tokens(1100))[0], serve(bare, tokens(1100))[0]
    assert saved.honoured_tokens == 0
    assert loaded.honoured_tokens == reused.device_tokens == 1088
    assert loaded.passes == reused.passes
    assert warm.worker.loaded_pages > 0
    assert loaded.output_tokens == saved.output_tokens == cold.output_tokens
    assert torch.equal(loaded.first_logits, reused.first_logits)
    assert (loaded.first_logits - cold.first_logits).abs().max() <= 1e-3


@pytest.mark.parametrize(
    ("preset", "mode", "group"), [("llama", "v1", 0), ("llama", "v2", 0), ("gemma3", "v2", 0), ("gemma3", "v2", 1)]
)
def test_one_page_changed_after_loading_shows_in_the_logits(preset, mode, group, model):
    """Negative control of the equality, for every layer group."""
    driven, seen = model(preset), []

    def spoil_one(loaded_group, page):
        if loaded_group == group:
            seen.append(page)
            if len(seen) == 3:
                page.zero_()

    _, spoiled, _ = cold_and_warm(driven, mode, None, after_load=spoil_one)
    _, loaded, _ = cold_and_warm(driven, mode, None)
    assert len(seen) >= 3
    assert (spoiled.first_logits - loaded.first_logits).abs().max() >= 100 * 1e-3


@pytest.mark.parametrize(("preset", "mode"), CASES)
def test_a_shorter_prompt_on_loaded_pages_gets_the_tokens_of_a_cold_run(preset, mode, model):
    driven = model(preset)
    _, loaded, warm = cold_and_warm(driven, mode, 256)
    shorter = serve(warm, tokens(1100)[:500])[0]
    cold = serve(Executor(driven, mode=mode), tokens(1100)[:500])[0]
    assert loaded.honoured_tokens == 1088
    assert shorter.device_tokens > 0 or preset == "gemma3"
    assert shorter.output_tokens == cold.output_tokens


@pytest.mark.parametrize(("preset", "mode"), CASES)
def test_an_offer_of_less_than_is_stored_is_completed_by_computing(preset, mode, model):
    saved, loaded, _ = cold_and_warm(model(preset), mode, 256, offered=320)
    assert loaded.honoured_tokens == 320
    assert loaded.output_tokens == saved.output_tokens


def test_transfers_only_in_window_blocks(model):
    """contract-v2.md section 8: a sliding group loads its live window, the full group everything."""
    loads = []
    _, loaded, _ = cold_and_warm(
        model("gemma3", sliding_window=64), "v2", None, after_load=lambda group, _: loads.append(group), length=256
    )
    assert loaded.honoured_tokens == 224
    assert loads.count(0) <= 3
    assert loads.count(1) == 7


def test_a_salt_separates_what_is_stored(model):
    store = {}
    executor = Executor(model("llama"), *memory_pair(store))
    serve(executor, tokens(100), cache_salt="a")
    warm = Executor(model("llama"), *memory_pair(store))
    assert serve(warm, tokens(100), cache_salt="b")[0].honoured_tokens == 0
    assert serve(warm, tokens(100), cache_salt="a")[0].honoured_tokens == 96
