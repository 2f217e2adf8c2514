"""A decoder whose layers also attend to what an encoder has computed for the row of each token. Source: arXiv:1706.03762."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxllm.cache_spec import encoded_layer
from jaxllm.layers.decoder import AnyNorm, CausalLM, DecoderBlock, Run
from jaxllm.layers.linear import Linear, precision_of
from jaxllm.layers.norm import NoNorm, make_norm
from jaxllm.layers.row_states import StateRows
from jaxllm.layers.runs import products, products_by_run
from jaxllm.layers.source import Module
from jaxllm.layers.step import Step
from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import Attention, CrossAttentionLayer
from pallas_kernels.quantize import Sums

TILE = 32
"""Tokens of a step whose keys and values are gathered at a time, where rows may have several tokens."""


class CrossAttention(nnx.Module):
    """Attention of tokens to F positions that an encoder has computed for their row."""

    def __init__(self, config: ModelConfig, part: Attention, layer: int, prefix: str):
        D, K, H, dtype = config.hidden_size, part.num_kv_heads, part.head_dim, config.dtype
        assert part.group_size == 1, "each query head has keys of its own"
        self.part, self.layer = part, layer

        def projection(name: str, *, bias: bool) -> Linear:
            modules = [Module(f"{prefix}{name}", (K, H))]
            return Linear("td,dkh->tkh", (D, K, H), ("embed", "heads", "head"), dtype, modules=modules, bias=bias)

        q, k, v = part.linears["qkv"]
        self.q, self.v = projection(q, bias=part.bias), projection(v, bias=part.bias)
        self.k = projection(k, bias=part.bias and part.key_bias)
        (out,) = part.linears["out"]
        modules = [Module(f"{prefix}{out}", (D,))]
        axes = ("heads", "head", "embed")
        self.out = Linear("tkh,khd->td", (K, H, D), axes, dtype, modules=modules, bias=part.out_bias)

    def encoded(self, x_FD: Array) -> tuple[Array, Array]:
        """Keys and values [K, F, H] of the encoder's positions, which rows keep; of several devices, those of this one's heads."""
        return self.k(x_FD).swapaxes(0, 1), self.v(x_FD).swapaxes(0, 1)

    def __call__(self, runs: Sequence[Array], step: Step) -> list[Array | Sums]:
        """The output of each of these consecutive runs of tokens [T, D]; of several devices, this one's part of the sum."""
        assert step.states is not None, "the step has no states by row"
        kept = step.states.read(self.layer)
        assert kept is not None, "nothing is encoded"
        k_NKFH, v_NKFH = kept
        out_TKH = attend_to_rows(products(self.q, runs, step), k_NKFH, v_NKFH, step.states.rows, self.part.scale)
        return products_by_run(self.out, out_TKH, runs, step)


def attend_to_rows(q_TKH: Array, k_NKFH: Array, v_NKFH: Array, rows: StateRows, scale: float) -> Array:
    """Attention outputs [T, K, H] of queries to all keys of their row; of padding anything finite."""

    def attend(q_tKH: Array, row_t: Array) -> Array:
        options = {"precision": precision_of(q_tKH.dtype), "preferred_element_type": jnp.float32}
        scores_tKF = jnp.einsum("tkh,tkfh->tkf", q_tKH, k_NKFH[row_t], **options) * scale  # type: ignore[arg-type]
        weight_tKF = jax.nn.softmax(scores_tKF).astype(v_NKFH.dtype)
        out_tKH = jnp.einsum("tkf,tkfh->tkh", weight_tKF, v_NKFH[row_t], **options)  # type: ignore[arg-type]
        return out_tKH.astype(q_tKH.dtype)

    if rows.query_start_R1 is None:
        return attend(q_TKH, rows.row_R)
    num_tokens = len(q_TKH)
    owner_T = jnp.searchsorted(rows.query_start_R1, jnp.arange(num_tokens), side="right", method="compare_all") - 1
    row_T = rows.row_R.at[owner_T].get(mode="clip")
    if num_tokens <= TILE:
        return attend(q_TKH, row_T)
    padding = -num_tokens % TILE
    q_TKH, row_T = jnp.pad(q_TKH, ((0, padding), (0, 0), (0, 0))), jnp.pad(row_T, (0, padding))

    def add_tile(tile: Array, out_TKH: Array) -> Array:
        q_tKH, row_t = (jax.lax.dynamic_slice_in_dim(x, tile * TILE, TILE) for x in (q_TKH, row_T))
        return jax.lax.dynamic_update_slice_in_dim(out_TKH, attend(q_tKH, row_t), tile * TILE, 0)

    num_tiles = (rows.query_start_R1[-1] + TILE - 1) // TILE
    return jax.lax.fori_loop(0, num_tiles, add_tile, jnp.zeros_like(q_TKH))[:num_tokens]


class CrossAttentionBlock(DecoderBlock):
    """x + attention(norm(x)), then x + cross(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        parts, prefix = self.parts, f"{config.layer_name(layer)}."
        assert isinstance(parts, CrossAttentionLayer) and parts.cross is not None
        self.cross_norm = make_norm(parts.cross_norm, config.hidden_size, config.dtype, prefix)
        self.cross = CrossAttention(config, parts.cross, encoded_layer(config, layer), prefix)

    @property
    def kept_layers(self) -> tuple[int, ...]:
        return (*super().kept_layers, self.cross.layer)

    def __call__(self, runs: Sequence[Run], next_norm: AnyNorm, step: Step, kept_R: Array | None = None) -> list[Run]:
        """See DecoderBlock."""
        assert kept_R is None, "no drafter has such layers"
        assert self.attention is not None, "all have it"
        nothing = NoNorm()
        attended = self.attention([normed_TD for _, normed_TD in runs], step)
        runs = self._joined(attended, runs, nothing, self.cross_norm, step)
        crossed = self.cross([normed_TD for _, normed_TD in runs], step)
        runs = self._joined(crossed, runs, nothing, self.mlp_norm, step)
        return self._joined(self._fed_forward(runs, step), runs, nothing, next_norm, step)


class CrossAttentionLM(CausalLM):
    """A decoder of such layers."""

    make_block = CrossAttentionBlock
