"""The executor against Transformers' own ``generate``, greedily."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tracekv.harness import Executor, build_model, load_model, model_identity
from tracekv.harness.models import model_shape


@functools.cache
def prompts():
    random = torch.Generator().manual_seed(11)
    return [torch.randint(3, 2000, (length,), generator=random).tolist() for length in (300, 77, 256)]


@functools.cache
def generated(model):
    out = []
    for tokens in prompts():
        ids = torch.tensor([tokens])
        result = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, pad_token_id=0
        )
        out.append(result[0, len(tokens) :].tolist())
    return out


@pytest.mark.parametrize("chunk", [None, 64])
@pytest.mark.parametrize("mode", ["v1", "v2"])
@pytest.mark.parametrize("preset", ["llama", "gemma3"])
def test_tokens_equal_generate(preset, mode, chunk, model):
    driven = model(preset)
    executor = Executor(driven, mode=mode, chunk_tokens=chunk)
    requests = [executor.submit(tokens, 6) for tokens in prompts()]
    executor.run()
    assert [request.output_tokens for request in requests] == generated(driven)
    # All three went through the model in the same passes.
    assert executor.passes < sum(len(request.passes) + 5 for request in requests)


def test_generate_works_on_a_model_that_was_driven(model):
    driven = model("llama")
    before = driven.config._attn_implementation
    executor = Executor(driven)
    executor.submit([1, 2, 3], 2)
    executor.run()
    assert driven.config._attn_implementation == before
    assert not any(layer._forward_pre_hooks or layer._forward_hooks for layer in driven.model.layers)


def test_a_model_whose_window_is_ignored_generates_something_else(model):
    """Negative control: tokens do depend on the window."""
    narrow, wide = model("gemma3"), build_model("gemma3", num_hidden_layers=2, sliding_window=4096)
    wide.load_state_dict(narrow.state_dict())
    executor = Executor(wide)
    request = executor.submit(prompts()[0], 6)
    executor.run()
    assert request.output_tokens != generated(narrow)[0]


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 130), min_size=1, max_size=4),
    chunk=st.sampled_from([None, 16, 48]),
    budget=st.sampled_from([16, 40, 500]),
    outputs=st.integers(1, 5),
)
def test_how_requests_are_cut_and_batched_never_changes_their_tokens(lengths, chunk, budget, outputs):
    driven = _small()
    alone = []
    for number, length in enumerate(lengths):
        executor = Executor(driven, tokens_per_block=16, block_reuse=False)
        request = executor.submit(_prompt(number, length), outputs)
        executor.run()
        alone.append(request.output_tokens)
    executor = Executor(driven, tokens_per_block=16, chunk_tokens=chunk, max_batch_tokens=budget, num_blocks=24)
    together = [executor.submit(_prompt(number, length), outputs) for number, length in enumerate(lengths)]
    executor.run()
    assert [request.output_tokens for request in together] == alone


@functools.cache
def _small():
    return build_model("gemma3", num_hidden_layers=2, sliding_window=40, hidden_size=32, head_dim=8, vocab_size=1000)


def _prompt(number, length):
    return torch.randint(3, 1000, (length,), generator=torch.Generator().manual_seed(number)).tolist()


def test_a_local_checkpoint_is_loaded_and_has_the_identity_of_what_was_saved(tmp_path, model):
    saved = model("llama")
    saved.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert model_identity(loaded) == model_identity(saved)
    executor = Executor(loaded)
    request = executor.submit(prompts()[1], 6)
    executor.run()
    assert request.output_tokens == generated(saved)[1]


def test_a_directory_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load_model(tmp_path)


def test_identity_changes_with_one_weight_and_with_the_config():
    first, again = build_model("llama", num_hidden_layers=1), build_model("llama", num_hidden_layers=1)
    assert model_identity(first) == model_identity(again)
    assert model_identity(build_model("llama", seed=1, num_hidden_layers=1)) != model_identity(first)
    theta = build_model("llama", num_hidden_layers=1, rms_norm_eps=1e-5)
    assert model_identity(theta) != model_identity(first)
    with torch.no_grad():
        again.model.layers[0].self_attn.v_proj.weight[0, 0] += 1
    assert model_identity(again) != model_identity(first)


def test_an_unknown_preset_is_refused():
    with pytest.raises(ValueError, match="llama, gemma3"):
        build_model("mistral")


@pytest.mark.parametrize(
    ("config_class", "model_class", "entries", "windows"),
    [
        ("MistralConfig", "MistralForCausalLM", {"sliding_window": 64}, [64, 64]),
        ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 16}, [None, None]),
        ("Gemma2Config", "Gemma2ForCausalLM", {"head_dim": 16, "sliding_window": 64}, [64, None]),
    ],
)
def test_other_causal_models_run_unchanged(config_class, model_class, entries, windows):
    import transformers

    config = getattr(transformers, config_class)(
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.3,
        eos_token_id=None,
        **entries,
    )
    torch.manual_seed(3)
    driven = getattr(transformers, model_class)(config).eval()
    assert [layer.window for layer in model_shape(driven).layers] == windows
    ids = torch.tensor([[token % 1000 for token in prompts()[0][:200]]])
    # Eager, since that is what some of these models ask for (Gemma2's softcap).
    driven.set_attn_implementation("eager")
    whole = driven(input_ids=ids, use_cache=False).logits[0, -1]
    executor = Executor(driven, chunk_tokens=64)
    request = executor.submit(ids[0].tolist(), 1)
    executor.run()
    assert whole.std() > 0.5
    assert torch.allclose(request.first_logits, whole, atol=1e-3)
