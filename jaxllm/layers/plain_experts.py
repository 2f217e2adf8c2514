"""Experts that the kernels of `pallas_kernels.grouped_matmul` do not compute, in plain JAX on every device: without a gate, each
down(activation(up(x))), and gated ones whose values have limits."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxllm.layers.linear import precision_of
from jaxllm.layers.mlp import ACTIVATIONS, multiplied
from jaxllm.model_parts import Activation
from pallas_kernels.grouped_matmul.plan import local_experts, make_plan, weighted_sum


@partial(jax.jit, static_argnames=("activation", "clamp"))
def plain_experts(
    x_TD: Array,
    expert_Tk: Array,
    weight_Tk: Array,
    up_ECFD: Any,
    down_EDF: Any,
    *,
    activation: Activation,
    clamp: float | None = None,
    first_expert: int | Array = 0,
) -> Array:
    """The weighted sum [T, D] of the chosen experts' results, as `pallas_kernels.grouped_matmul.experts`: a loop over tiles of pairs of
    token and choice (P), each of one expert. Weights are arrays, or what is one when an expert is taken (`packed.StoredExperts`); of
    experts with a gate C is 2, gate and up. clamp: as `MLP.clamp`."""
    num_experts, width, _ = down_EDF.shape
    expert_P = local_experts(expert_Tk, None, first_expert, num_experts)
    num_pairs = len(expert_P)
    tile_rows = min(num_pairs, max(8, min(128, num_pairs // num_experts)))
    plan = make_plan(expert_P, num_experts, tile_rows)
    x_PD = x_TD.at[plan.pair_P // expert_Tk.shape[1]].get(mode="clip")

    def product(x_MK: Array, weight_NK: Array) -> Array:
        """Accumulated in float32."""
        dimensions = (((1,), (1,)), ((), ()))
        precision = precision_of(x_TD.dtype)
        return lax.dot_general(x_MK, weight_NK, dimensions, precision=precision, preferred_element_type=jnp.float32)

    def compute_tile(tile: Array, out_PD: Array) -> Array:
        # A tile at the end begins earlier and computes rows of another expert too, which are not kept.
        start = jnp.minimum(plan.start_N[tile], num_pairs - tile_rows)
        row_M = start + jnp.arange(tile_rows)
        is_own_M = (row_M >= plan.start_N[tile]) & (row_M < plan.start_N[tile] + plan.count_N[tile])
        expert = plan.expert_N[tile]
        up_CFD = up_ECFD[expert].astype(x_TD.dtype)
        first_FD, down_DF = up_CFD[0], down_EDF[expert].astype(x_TD.dtype)
        x_MD = lax.dynamic_slice_in_dim(x_PD, start, tile_rows)
        hidden_MF = ACTIVATIONS[activation](product(x_MD, first_FD))
        if len(up_CFD) == 2:
            hidden_MF = multiplied(hidden_MF, product(x_MD, up_CFD[1]), clamp)
        out_MD = product(hidden_MF.astype(x_TD.dtype), down_DF).astype(x_TD.dtype)
        kept_MD = lax.dynamic_slice_in_dim(out_PD, start, tile_rows)
        return lax.dynamic_update_slice_in_dim(out_PD, jnp.where(is_own_M[:, None], out_MD, kept_MD), start, 0)

    sorted_PD = lax.fori_loop(0, plan.num_tiles, compute_tile, jnp.zeros((num_pairs, width), x_TD.dtype))
    return weighted_sum(sorted_PD.at[plan.row_P].get(mode="clip"), expert_P, weight_Tk, num_experts)
