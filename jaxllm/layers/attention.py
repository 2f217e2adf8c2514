"""The attention layer around whatever computes attention itself."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jaxllm.layers.attend import Projection
from jaxllm.layers.linear import Linear, abstract_param
from jaxllm.layers.norm import RMSNorm
from jaxllm.layers.source import Source, Tensor
from jaxllm.layers.step import Step
from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import Attention


class GroupedQueryAttention(nnx.Module):
    """Attention with rotary positions; q, k and v of all heads are one product.

    The weight [D, K, G+2, H] holds per KV head its G query heads, then its key, then its value, so that splitting K over
    devices gives each what belongs together.
    """

    def __init__(self, config: ModelConfig, part: Attention, layer: int, prefix: str):
        D, K, G, H = config.hidden_size, part.num_kv_heads, part.group_size, part.head_dim
        stored_K, stored_G = K // part.kv_head_replicas, G * part.kv_head_replicas
        self.layer = layer
        self.part = part
        names = [f"{prefix}{name}" for name in part.linears["qkv"]]
        self.qkv = Linear(
            "td,dkgh->tkgh",
            (D, K, G + 2, H),
            ("embed", "heads", "qkv", "head"),
            config.dtype,
            modules=[(name, (stored_K, n, H)) for name, n in zip(names, (stored_G, 1, 1), strict=True)],
            joined=1,
            bias=part.bias,
        )
        q_norm, k_norm = part.head_norms or (None, None)
        self.q_norm = None if q_norm is None else RMSNorm(q_norm, H, "head", config.dtype, prefix=prefix)
        self.k_norm = None if k_norm is None else RMSNorm(k_norm, H, "head", config.dtype, prefix=prefix)
        self.out = Linear(
            "tkgh,kghd->td",
            (K, G, H, D),
            ("heads", "group", "head", "embed"),
            config.dtype,
            modules=[(f"{prefix}{name}", (D,)) for name in part.linears["out"]],
            inputs=(stored_K, stored_G, H),
            bias=part.out_bias,
        )
        scales = Source(tuple(Tensor(f"{prefix}{part.name}.{letter}_scale", (1,), (1,)) for letter in "kv"), 0, (0,))
        has_scales = config.has_kv_scales
        self.kv_scale = abstract_param((2,), ("kv",), "float32", source=scales, init="ones") if has_scales else None

    def __call__(self, runs: Sequence[Array], step: Step) -> list[Array]:
        """Of runs of tokens [T, D], one after the other, the output of each; of several devices, this one's part of the sum."""
        cos_TH, sin_TH = step.angles(self.part.rope, self.part.head_dim)
        projection = Projection(
            qkv_TKGH=_joined([self.qkv(x_TD) for x_TD in runs]),
            cos_TH=cos_TH,
            sin_TH=sin_TH,
            q_norm_H=None if self.q_norm is None else self.q_norm.weight[...],
            k_norm_H=None if self.k_norm is None else self.k_norm.weight[...],
            eps=1e-6 if self.q_norm is None else self.q_norm.eps,
            kv_scale_2=None if self.kv_scale is None else self.kv_scale[...],
        )
        part = self.part
        out_TKGH = step.attend(self.layer, projection, scale=part.scale, window=part.window, soft_cap=part.soft_cap)
        ends = np.cumsum([len(x_TD) for x_TD in runs])
        return [self.out(out_TKGH[end - len(x_TD) : end], step.shards) for x_TD, end in zip(runs, ends, strict=True)]


def _joined(runs: Sequence[Array]) -> Array:
    return runs[0] if len(runs) == 1 else jnp.concatenate(runs)
