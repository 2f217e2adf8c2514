"""The gated feed-forward layer."""

import jax
from flax import nnx
from jax import Array

from jaxllm.layers.linear import Linear
from jaxllm.model_config import ModelConfig
from jaxllm.parallel.shards import ONE_DEVICE, Shards


class GatedMLP(nnx.Module):
    """down(silu(gate(x)) * up(x)), gate and up as one product. Source: arXiv:2002.05202."""

    def __init__(self, config: ModelConfig):
        D, F = config.hidden_size, config.intermediate_size
        self.gate_up = Linear("td,dcf->tcf", (D, 2, F), ("embed", "gate_up", "mlp"), config.dtype, bias=config.mlp_bias)
        self.down = Linear("tf,fd->td", (F, D), ("mlp", "embed"), config.dtype, bias=config.mlp_bias)

    def __call__(self, x_TD: Array, shards: Shards = ONE_DEVICE) -> Array:
        """Of several devices, this one's part of the sum."""
        gate_up_TCF = self.gate_up(x_TD)
        return self.down(jax.nn.silu(gate_up_TCF[:, 0]) * gate_up_TCF[:, 1], shards)
