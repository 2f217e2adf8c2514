"""The attention layer around whatever computes attention itself."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jaxllm.layers.attend import Attend, Projection
from jaxllm.layers.linear import Linear, abstract_param
from jaxllm.layers.norm import RMSNorm
from jaxllm.model_config import ModelConfig
from jaxllm.parallel.shards import ONE_DEVICE, Shards


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions; q, k and v of all heads are one product.

    The weight [D, K, G+2, H] holds per KV head its G query heads, then its key, then its value, so that splitting K over
    devices gives each what belongs together.
    """

    def __init__(self, config: ModelConfig, layer: int):
        D, K, G, H = config.hidden_size, config.num_kv_heads, config.group_size, config.head_dim
        self.layer = layer
        self.scale = config.scale
        self.window = config.window(layer)
        self.eps = config.rms_norm_eps
        self.qkv = Linear(
            "td,dkgh->tkgh", (D, K, G + 2, H), ("embed", "heads", "qkv", "head"), config.dtype, bias=config.attention_bias
        )
        self.q_norm = RMSNorm(H, "head", config.dtype, eps=config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(H, "head", config.dtype, eps=config.rms_norm_eps) if config.qk_norm else None
        self.out = Linear(
            "tkgh,kghd->td", (K, G, H, D), ("heads", "group", "head", "embed"), config.dtype, bias=config.attention_out_bias
        )
        self.kv_scale = abstract_param((2,), ("kv",), "float32") if config.has_kv_scales else None

    def __call__(
        self, runs: Sequence[Array], angles: tuple[Array, Array], attend: Attend, shards: Shards = ONE_DEVICE
    ) -> list[Array]:
        """Of runs of tokens [T, D], one after the other, the output of each; of several devices, this one's part of the sum."""
        projection = Projection(
            qkv_TKGH=_joined([self.qkv(x_TD) for x_TD in runs]),
            cos_TH=angles[0],
            sin_TH=angles[1],
            q_norm_H=None if self.q_norm is None else self.q_norm.weight[...],
            k_norm_H=None if self.k_norm is None else self.k_norm.weight[...],
            eps=self.eps,
            kv_scale_2=None if self.kv_scale is None else self.kv_scale[...],
        )
        out_TKGH = attend(self.layer, projection, scale=self.scale, window=self.window, soft_cap=None)
        ends = np.cumsum([len(x_TD) for x_TD in runs])
        return [self.out(out_TKGH[end - len(x_TD) : end], shards) for x_TD, end in zip(runs, ends, strict=True)]


def _joined(runs: Sequence[Array]) -> Array:
    return runs[0] if len(runs) == 1 else jnp.concatenate(runs)
