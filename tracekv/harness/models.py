"""The models that the executor drives: two presets with seeded random weights, or any local checkpoint."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tracekv.harness.attention import driven

#: Entries of a model's config that say nothing about what it computes.
_NOT_IDENTITY = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures", "use_cache")


def build_model(preset: str, seed: int = 0, **overrides: Any) -> Any:
    """A small model with seeded random weights, float32, whose logits depend visibly on every page of its KV.

    Args:
        preset: ``llama`` (one layer group, full attention) or ``gemma3`` (two: a window of 128 tokens, and full).
        seed: The same seed gives the same weights.
        overrides: Entries of the config to change.

    Raises:
        ValueError: An unknown preset.
    """
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

    layers = int(overrides.get("num_hidden_layers", 4))
    common: dict[str, Any] = {
        "vocab_size": 2048,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 8192,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }
    presets: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "llama": (LlamaForCausalLM, LlamaConfig, {}),
        "gemma3": (
            Gemma3ForCausalLM,
            Gemma3TextConfig,
            {
                "sliding_window": 128,
                "layer_types": (["sliding_attention", "full_attention"] * layers)[:layers],
                "query_pre_attn_scalar": 32,
            },
        ),
    }
    if preset not in presets:
        raise ValueError(f"tracekv: no model preset {preset!r}; there are {', '.join(presets)}")
    model_class, config_class, own = presets[preset]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config_class(**{**common, **own, **overrides})).float().eval()
        _make_sensitive(model)
    return model


def _make_sensitive(model: Any) -> None:
    """Scale the random weights so that one wrong page among a thousand tokens shows in the logits.

    Attention averages over the prompt, so its output is raised to the embedding's size, and the head's gain makes a change of a
    few percent in the last hidden state exceed 0.1 in some logit. Rounding stays below 1e-4.
    """
    gains = {"embed_tokens": 3.0, "o_proj": 8.0, "mlp": 0.5, "lm_head": 16.0}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:  # norms keep their ones
                gain = next((gain for part, gain in gains.items() if part in name), 1.0)
                weight.normal_(0.0, gain * weight.shape[1] ** -0.5)


def load_model(directory: str | Path, *, dtype: str | torch.dtype = "auto", device: str = "cpu") -> Any:
    """A causal LM of Transformers from a local checkpoint directory; nothing is downloaded.

    Raises:
        FileNotFoundError: There is no ``config.json`` in the directory.
    """
    from transformers import AutoModelForCausalLM

    if not (Path(directory) / "config.json").is_file():
        raise FileNotFoundError(f"tracekv: {directory} holds no Transformers checkpoint (no config.json)")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, local_files_only=True)
    return model.to(device).eval()


def model_identity(model: Any) -> str:
    """Digest (64 hex digits) of a model's config and weights: equal exactly if two models compute the same KV."""
    config = {key: value for key, value in model.config.to_dict().items() if key not in _NOT_IDENTITY}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


@dataclass(frozen=True)
class LayerShape:
    """What a layer stores per token, and how far it looks back (None: to the start)."""

    layer: int
    kv_heads: int
    head_dim: int
    window: int | None


@dataclass(frozen=True)
class ModelShape:
    """What the executor has to know of a model."""

    layers: tuple[LayerShape, ...]
    dtype: torch.dtype
    device: torch.device
    vocabulary: int
    max_tokens: int


def model_shape(model: Any) -> ModelShape:
    """Read a model's shape from its config (windows) and from one forward of a single token (heads, sizes).

    Raises:
        NotImplementedError: A kind of layer that pages can't serve, or attention that isn't pluggable.
    """
    config = model.config.get_text_config()
    probe = _Probe()
    device = next(model.parameters()).device
    with torch.inference_mode(), driven(model, probe):
        model(
            input_ids=torch.zeros((1, 1), dtype=torch.long, device=device),
            position_ids=torch.zeros((1, 1), dtype=torch.long, device=device),
            use_cache=False,
        )
    count = config.num_hidden_layers
    if sorted(probe.seen) != list(range(count)):
        raise NotImplementedError(
            f"tracekv: of the {count} layers of {type(model).__name__} only {sorted(probe.seen)} attend through "
            "Transformers' AttentionInterface; the harness pages every layer or none"
        )
    max_tokens = int(config.max_position_embeddings)
    layers = []
    for layer in range(count):
        kv_heads, key_dim, value_dim = probe.seen[layer]
        if key_dim != value_dim:
            raise NotImplementedError(f"tracekv: layer {layer} has keys of {key_dim} and values of {value_dim} numbers")
        window = _window(config, layer)
        # A window that no sequence outgrows is full attention (contract-v2.md section 2).
        layers.append(LayerShape(layer, kv_heads, key_dim, None if window is None or window >= max_tokens else window))
    return ModelShape(tuple(layers), probe.dtype, device, int(config.vocab_size), max_tokens)


def _window(config: Any, layer: int) -> int | None:
    kinds: Any = getattr(config, "layer_types", None)
    window: Any = getattr(config, "sliding_window", None)
    if kinds is None:
        return None if window is None else int(window)
    if kinds[layer] == "sliding_attention":
        return int(window)
    if kinds[layer] == "full_attention":
        return None
    raise NotImplementedError(f"tracekv: layer {layer} is of type {kinds[layer]!r}; the harness has no pages for it")


class _Probe:
    """Attention that only notes what it is given."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[int, int, int]] = {}
        self.dtype = torch.float32

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """A single token attends to itself."""
        self.seen[layer] = (key.shape[0], key.shape[2], value.shape[2])
        self.dtype = key.dtype
        return value.repeat_interleave(query.shape[0] // value.shape[0], dim=0).transpose(0, 1)
