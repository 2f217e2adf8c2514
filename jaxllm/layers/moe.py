"""A mixture of experts."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxllm.layers.linear import abstract_param, precision_of
from jaxllm.layers.mlp import FeedForward
from jaxllm.layers.routing import rule_of
from jaxllm.layers.source import Source, Stacked, Tensor
from jaxllm.layers.step import Step
from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import MoE


class MixtureOfExperts(nnx.Module):
    """The weighted sum of a few experts' results for each token, and those of shared experts. Source: arXiv:1701.06538.

    Weights of experts are output-major, as checkpoints hold them: gate_up [E, 2, F, D] and down [E, D, F].
    """

    def __init__(self, config: ModelConfig, part: MoE, prefix: str):
        E, D, F = part.routing.num_experts, config.hidden_size, part.width
        self.part = part
        name = f"{prefix}{part.name}"
        self.router = abstract_param((E, D), ("experts", "embed"), config.dtype, source=f"{name}.{part.routing.router}.weight")
        bias, rank = part.routing.correction_bias, part.routing.correction_bias_rank
        stored = Tensor(f"{name}.{bias}", (*(1,) * (rank - 1), E), (E,))
        self.correction_bias = (
            None
            if bias is None
            else abstract_param((E,), ("experts",), "float32", source=Source((stored,), 0, (0,)), init="zeros")
        )
        by_expert, by_width = ("split_experts", "expert_mlp"), ("experts", "mlp")
        experts, width = by_expert if part.by_expert else by_width
        gates, down = [f"{name}.{part}" for part in part.gate_up], f"{name}.{part.down}"
        axes = (experts, "gate_up", width, "embed")
        source = _experts(gates, E, (F, D) if "{}" in gates[0] else (2, F, D))
        self.gate_up = abstract_param((E, 2, F, D), axes, config.dtype, source=source)
        self.down = abstract_param((E, D, F), (experts, "embed", width), config.dtype, source=_experts([down], E, (D, F)))
        self.shared = None if part.shared is None else FeedForward(config, part.shared, prefix)
        self.shared_gate = (
            None
            if part.shared_gate is None
            else abstract_param((1, D), ("gate_up", "embed"), config.dtype, source=f"{name}.{part.shared_gate}.weight")
        )

    def __call__(self, x_TD: Array, step: Step, start: int = 0) -> Array:
        """Of several devices, this one's part of the sum. x are the tokens of the step from `start` on."""
        shards = step.shards
        logits_TE = _scores(x_TD, self.router[...])
        bias = None if self.correction_bias is None else self.correction_bias[...]
        expert_Tk, weight_Tk = step.choose_experts(logits_TE, bias, rule=rule_of(self.part.routing))
        gate_up_E2FD, down_EDF = self.gate_up[...], self.down[...]
        out_TD = step.experts(
            x_TD,
            expert_Tk,
            weight_Tk,
            gate_up_E2FD.astype(x_TD.dtype),
            down_EDF.astype(x_TD.dtype),
            is_real_T=None if step.is_real_T is None else step.is_real_T[start : start + len(x_TD)],
            activation=self.part.activation,
            first_expert=shards.index * len(down_EDF) if self.part.by_expert else 0,
        )
        if self.shared is None:
            return out_TD
        shared_TD = self.shared(x_TD, step, start)
        if self.shared_gate is not None:
            shared_TD = shared_TD * jax.nn.sigmoid(_scores(x_TD, self.shared_gate[...])).astype(x_TD.dtype)
        return out_TD + shared_TD


def _scores(x_TD: Array, weight_ED: Array) -> Array:
    """Float32 products [T, E]."""
    weight_ED = weight_ED.astype(x_TD.dtype)
    precision = precision_of(x_TD.dtype)
    return jnp.einsum("td,ed->te", x_TD, weight_ED, precision=precision, preferred_element_type=jnp.float32)


def _experts(names: list[str], num_experts: int, shape: tuple[int, ...]) -> Source | Stacked:
    """The weights of all experts, of a tensor per expert and name, or of one of all."""
    if "{}" in names[0]:
        per_expert = [Tensor(f"{name.format(i)}.weight", shape, shape) for i in range(num_experts) for name in names]
        return Stacked(tuple(per_expert), (num_experts, len(names)) if len(names) > 1 else (num_experts,))
    whole = (num_experts, *shape)
    return Source(
        (Tensor(f"{names[0]}.weight", (num_experts, math.prod(shape[:-1]), shape[-1]), whole),), 0, tuple(range(len(whole)))
    )
