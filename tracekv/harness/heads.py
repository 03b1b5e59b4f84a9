"""A rank's share of a model: some of its attention heads, everything else whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tracekv.harness.runner import decoder_layers


def keep_heads(model: Any, rank: int, world: int, add_up: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Keep the ``rank``-th of ``world`` equal shares of a model's query and KV heads, in place.

    What the attention of the shares yields is summed over the ranks behind each ``o_proj``, so that every rank goes on
    with the same hidden states. Neighbouring heads stay together: a query head keeps the KV head that it attends with.

    Args:
        model: A causal LM of Transformers whose attention has ``q_proj``, ``k_proj``, ``v_proj`` and ``o_proj``.
        rank: Which share, in ``[0, world)``.
        world: How many there are.
        add_up: Sums a tensor over all ranks; each rank calls it once per layer and forward, in the same order.

    Raises:
        NotImplementedError: The KV heads can't be shared out evenly, or the projections aren't there.
    """
    layers = decoder_layers(model, model.config.get_text_config().num_hidden_layers)
    for number, (_, attention) in enumerate(layers):
        linears: list[Any] = [getattr(attention, f"{name}_proj", None) for name in "qkvo"]
        if not all(isinstance(linear, torch.nn.Linear) for linear in linears):
            raise NotImplementedError(
                f"tracekv: {type(attention).__name__} doesn't have q_proj, k_proj, v_proj and o_proj; "
                "the harness can't share its heads out to several ranks"
            )
        query, key, value, output = linears
        kv_heads = key.out_features // attention.head_dim
        if kv_heads % world:
            raise NotImplementedError(
                f"tracekv: the {kv_heads} KV heads of layer {number} can't be shared out to {world} ranks; "
                "take a divisor of them"
            )
        with torch.no_grad():
            for linear in (query, key, value):
                _keep(linear, "weight", 0, rank, world)
                _keep(linear, "bias", 0, rank, world)
                linear.out_features //= world
            _keep(output, "weight", 1, rank, world)
            output.in_features //= world
            if output.bias is not None and rank > 0:
                output.bias.zero_()  # it is to be added once
        output.register_forward_hook(lambda _module, _inputs, partial: add_up(partial))


def _keep(linear: Any, name: str, dimension: int, rank: int, world: int) -> None:
    parameter = getattr(linear, name)
    if parameter is not None:
        # A copy, so that the other ranks' shares are given back.
        share = parameter.detach().chunk(world, dimension)[rank].clone()
        setattr(linear, name, torch.nn.Parameter(share, requires_grad=False))
