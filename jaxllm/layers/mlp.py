"""The gated feed-forward layer."""

from collections.abc import Callable, Mapping
from functools import partial

import jax
from flax import nnx
from jax import Array

from jaxllm.layers.linear import Linear
from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import MLP, Activation
from jaxllm.parallel.shards import ONE_DEVICE, Shards

ACTIVATIONS: Mapping[Activation, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
}


class GatedMLP(nnx.Module):
    """down(activation(gate(x)) * up(x)), gate and up as one product. Source: arXiv:2002.05202."""

    def __init__(self, config: ModelConfig, part: MLP, prefix: str):
        D, F = config.hidden_size, part.width
        gate, up = (f"{prefix}{name}" for name in part.linears["gate_up"])
        (down,) = (f"{prefix}{name}" for name in part.linears["down"])
        self.activation = ACTIVATIONS[part.activation]
        self.gate_up = Linear(
            "td,dcf->tcf",
            (D, 2, F),
            ("embed", "gate_up", "mlp"),
            config.dtype,
            modules=[(gate, (1, F)), (up, (1, F))],
            bias=part.bias,
        )
        self.down = Linear("tf,fd->td", (F, D), ("mlp", "embed"), config.dtype, modules=[(down, (D,))], bias=part.bias)

    def __call__(self, x_TD: Array, shards: Shards = ONE_DEVICE) -> Array:
        """Of several devices, this one's part of the sum."""
        gate_up_TCF = self.gate_up(x_TD)
        return self.down(self.activation(gate_up_TCF[:, 0]) * gate_up_TCF[:, 1], shards)
