"""The feed-forward layer."""

from collections.abc import Callable, Mapping
from functools import partial

import jax
from flax import nnx
from jax import Array

from jaxllm.layers.linear import Linear
from jaxllm.layers.source import Module
from jaxllm.layers.step import Step
from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import MLP, Activation

ACTIVATIONS: Mapping[Activation, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
}


class FeedForward(nnx.Module):
    """down(activation(gate(x)) * up(x)), gate and up as one product, or without a gate. Source: arXiv:2002.05202."""

    def __init__(self, config: ModelConfig, part: MLP, prefix: str):
        D, F, C = config.hidden_size, part.width, 2 if part.gated else 1
        names = [f"{prefix}{name}" for name in part.linears["gate_up"]]
        (down,) = (f"{prefix}{name}" for name in part.linears["down"])
        self.activation = ACTIVATIONS[part.activation]
        self.gated = part.gated
        self.gate_up = Linear(
            "td,dcf->tcf",
            (D, C, F),
            ("embed", "gate_up", "mlp"),
            config.dtype,
            modules=[Module(name, (C // len(names), F)) for name in names],
            bias=part.bias,
            transposed=part.transposed,
        )
        self.down = Linear(
            "tf,fd->td",
            (F, D),
            ("mlp", "embed"),
            config.dtype,
            modules=[Module(down, (D,))],
            bias=part.bias,
            transposed=part.transposed,
        )

    def __call__(self, x_TD: Array, step: Step, start: int = 0) -> Array:
        """The output; of several devices, this one's part of the sum. x are the tokens of the step from `start` on."""
        gate_up_TCF = step.product(self.gate_up, x_TD, start)
        x_TF = self.activation(gate_up_TCF[:, 0])
        return step.product(self.down, x_TF * gate_up_TCF[:, 1] if self.gated else x_TF, start)
