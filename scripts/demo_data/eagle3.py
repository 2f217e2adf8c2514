"""An EAGLE-3 head (arXiv:2503.01840) over whole sequences, and its checkpoint in the published form.

At position t the head reads the token at t + 1 and what the target's layers knew at t, and predicts the token at t + 2. Its next
draft has its own output in place of the target's features. Parameters have their checkpoint's names and layouts.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from safetensors.numpy import save

from jaxllm.layers.linear import precision_of

Params = dict[str, Array]
MIDLAYER, ATTENTION, MLP = "midlayer", "midlayer.self_attn", "midlayer.mlp"


@dataclass(frozen=True)
class Eagle3Sizes:
    """A head's config.json."""

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    feature_layers: tuple[int, ...]
    """Layers of the target whose inputs are read."""
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0

    def config_json(self, dtype: str) -> dict[str, Any]:
        """As published heads have it."""
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "hidden_size": self.hidden_size,
            "target_hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "norm_before_residual": False,
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": list(self.feature_layers),
            },
            "torch_dtype": dtype,
        }

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all parameters, by name: [outputs, inputs] of a matrix."""
        D, F, heads, kv_heads = self.hidden_size, self.intermediate_size, self.num_heads, self.num_kv_heads
        return {
            "fc.weight": (D, len(self.feature_layers) * D),
            f"{MIDLAYER}.input_layernorm.weight": (D,),
            f"{MIDLAYER}.hidden_norm.weight": (D,),
            f"{ATTENTION}.q_proj.weight": (heads * self.head_dim, 2 * D),
            f"{ATTENTION}.k_proj.weight": (kv_heads * self.head_dim, 2 * D),
            f"{ATTENTION}.v_proj.weight": (kv_heads * self.head_dim, 2 * D),
            f"{ATTENTION}.o_proj.weight": (D, heads * self.head_dim),
            f"{MIDLAYER}.post_attention_layernorm.weight": (D,),
            f"{MLP}.gate_proj.weight": (F, D),
            f"{MLP}.up_proj.weight": (F, D),
            f"{MLP}.down_proj.weight": (D, F),
            "norm.weight": (D,),
            "lm_head.weight": (self.draft_vocab_size, D),
        }


def init_params(sizes: Eagle3Sizes, lm_head_VD: Array, key: Array) -> Params:
    """Float32: norms 1, matrices normal with variance 1 / inputs; logits begin as the target's rows for the draft vocabulary."""
    params: Params = {}
    for place, (name, shape) in enumerate(sizes.shapes.items()):
        if len(shape) == 1:
            params[name] = jnp.ones(shape, jnp.float32)
        else:
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            deviation = shape[1] ** -0.5 * (0.5 if residual else 1.0)
            params[name] = deviation * jax.random.normal(jax.random.fold_in(key, place), shape, jnp.float32)
    return params | {"lm_head.weight": lm_head_VD.astype(jnp.float32)}


def unrolled(
    params: Params,
    sizes: Eagle3Sizes,
    features_TF: Array,
    embedded_TD: Array,
    positions_T: Array,
    visible_TS: Array,
    depth: int,
) -> list[Array]:
    """The float32 logits [T, draft vocabulary] of `depth` drafts in a row that begin at each position.

    features_TF: of the target's layers, joined. embedded_TD: the target's embeddings of the tokens; draft j of position t reads
    that of t + 1 + j, whatever stands there at the end. visible_TS: whether t may see s. The first draft of a position leaves a
    key, which later positions see; those after it also see the keys of their own chain.
    """
    T, groups = len(positions_T), sizes.num_heads // sizes.num_kv_heads
    dtype = embedded_TD.dtype
    precision = precision_of(dtype)

    def linear(x: Array, name: str) -> Array:
        return jnp.einsum("td,fd->tf", x, params[f"{name}.weight"].astype(dtype), precision=precision)

    def norm(x: Array, name: str) -> Array:
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + sizes.rms_norm_eps)
        return (wide * scale * params[f"{name}.weight"]).astype(dtype)

    hidden_TD = linear(features_TF, "fc")
    keys: list[Array] = []
    values: list[Array] = []
    logits = []
    for draft in range(depth):
        token_TD = jnp.roll(embedded_TD, -1 - draft, axis=0)
        normed_TD = norm(token_TD, f"{MIDLAYER}.input_layernorm"), norm(hidden_TD, f"{MIDLAYER}.hidden_norm")
        x_TE = jnp.concatenate(normed_TD, axis=1)
        q, k, v = (linear(x_TE, f"{ATTENTION}.{name}_proj").reshape(T, -1, sizes.head_dim) for name in "qkv")
        q_TKGH = rotate(q, positions_T + draft, sizes.rope_theta).reshape(T, -1, groups, sizes.head_dim)
        keys.append(rotate(k, positions_T + draft, sizes.rope_theta))
        values.append(v)
        scores_KGTS = jnp.einsum("tkgh,skh->kgts", q_TKGH, keys[0], precision=precision, preferred_element_type=jnp.float32)
        scores = [jnp.where(visible_TS, scores_KGTS, -jnp.inf)]
        for own_TKH in keys[1:]:
            scores.append(jnp.einsum("tkgh,tkh->kgt", q_TKGH, own_TKH, precision=precision)[..., None].astype(jnp.float32))
        weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1) * sizes.head_dim**-0.5, axis=-1).astype(dtype)
        seen_TKGH = jnp.einsum("kgts,skh->tkgh", weights[..., :T], values[0], precision=precision)
        for own, own_TKH in enumerate(values[1:]):
            seen_TKGH += jnp.moveaxis(weights[..., T + own], 2, 0)[..., None] * own_TKH[:, :, None]
        hidden_TD = hidden_TD + linear(seen_TKGH.reshape(T, -1), f"{ATTENTION}.o_proj")
        normed = norm(hidden_TD, f"{MIDLAYER}.post_attention_layernorm")
        gated = jax.nn.silu(linear(normed, f"{MLP}.gate_proj")) * linear(normed, f"{MLP}.up_proj")
        hidden_TD = hidden_TD + linear(gated, f"{MLP}.down_proj")
        logits.append(linear(norm(hidden_TD, "norm"), "lm_head").astype(jnp.float32))
    return logits


def rotate(x_TNH: Array, positions_T: Array, theta: float) -> Array:
    """Rotary position embedding; value i turns with value i + H/2."""
    half = x_TNH.shape[-1] // 2
    angles = positions_T[:, None, None].astype(jnp.float32) * theta ** (-np.arange(half, dtype=np.float32) / half)
    cos, sin = jnp.cos(angles).astype(x_TNH.dtype), jnp.sin(angles).astype(x_TNH.dtype)
    first, second = x_TNH[..., :half], x_TNH[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def save_head(directory: Path, sizes: Eagle3Sizes, params: Params, token_ids: np.ndarray) -> None:
    """Write config.json and model.safetensors in bfloat16. token_ids: the target's ids of the draft vocabulary, rising."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: np.asarray(params[name].astype(jnp.bfloat16)) for name in sizes.shapes}
    tensors["d2t"] = token_ids.astype(np.int64) - np.arange(len(token_ids))
    tensors["t2d"] = np.isin(np.arange(sizes.vocab_size), token_ids)
    (directory / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
    text = json.dumps(sizes.config_json("bfloat16"), indent=2)
    (directory / "config.json").write_text(text + "\n", encoding="utf-8")
