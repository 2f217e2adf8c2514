"""The attention layer around whatever computes attention itself."""

from typing import Protocol

from flax import nnx
from jax import Array

from jaxllm.layers.linear import Linear, abstract_param
from jaxllm.layers.norm import RMSNorm
from jaxllm.layers.rope import apply_rope
from jaxllm.model_config import ModelConfig


class Attend(Protocol):
    """Computes attention of a layer: over a paged cache when serving, over the sequence itself in training and tests."""

    def __call__(
        self,
        layer: int,
        q_TKGH: Array,
        k_TKH: Array,
        v_TKH: Array,
        /,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        kv_scale: Array | None = None,
    ) -> Array:
        """Outputs [T, K, G, H]; query head n is (n // G, n % G).

        kv_scale: float32 [2], what a cache of a narrow type divides keys and values by; None: by nothing.
        """
        ...


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
        self.qkv = Linear(
            "td,dkgh->tkgh", (D, K, G + 2, H), ("embed", "heads", "qkv", "head"), config.dtype, bias=config.attention_bias
        )
        self.q_norm = RMSNorm(H, "head", config.dtype, eps=config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(H, "head", config.dtype, eps=config.rms_norm_eps) if config.qk_norm else None
        self.out = Linear(
            "tkgh,kghd->td", (K, G, H, D), ("heads", "group", "head", "embed"), config.dtype, bias=config.attention_out_bias
        )

        self.kv_scale = abstract_param((2,), ("kv",), "float32") if config.has_kv_scales else None

    def __call__(self, x_TD: Array, angles: tuple[Array, Array], attend: Attend) -> Array:
        qkv_TKGH = self.qkv(x_TD)
        q_TKGH, k_TKH, v_TKH = qkv_TKGH[:, :, :-2], qkv_TKGH[:, :, -2], qkv_TKGH[:, :, -1]
        if self.q_norm is not None and self.k_norm is not None:
            q_TKGH, k_TKH = self.q_norm(q_TKGH), self.k_norm(k_TKH)
        q_TKGH, k_TKH = apply_rope(q_TKGH, angles), apply_rope(k_TKH, angles)
        kv_scale = None if self.kv_scale is None else self.kv_scale[...]
        out_TKGH = attend(
            self.layer, q_TKGH, k_TKH, v_TKH, scale=self.scale, window=self.window, soft_cap=None, kv_scale=kv_scale
        )
        return self.out(out_TKGH)
