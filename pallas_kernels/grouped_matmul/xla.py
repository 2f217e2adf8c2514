"""A loop over tiles of pairs, in plain JAX: reads each needed expert once and computes no other.

`lax.ragged_dot` multiplies all tokens by all experts on a CPU and on NVIDIA GPUs (XLA of JAX 0.10 to 0.11), and gathering the
experts of each pair copies their weights: both were measured 3 to 100 times slower than this loop on a CPU.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouped_matmul.activation import ACTIVATIONS
from pallas_kernels.grouped_matmul.mxfp4 import Mxfp4
from pallas_kernels.grouped_matmul.plan import local_experts, make_plan, weighted_sum


def supports(**_: object) -> bool:
    return True


def experts(
    x_TD: jax.Array,
    expert_Tk: jax.Array,
    weight_Tk: jax.Array,
    gate_up_E2FD: jax.Array | Mxfp4,
    down_EDF: jax.Array | Mxfp4,
    *,
    is_real_T: jax.Array | None = None,
    gate_up_bias_E2F: jax.Array | None = None,
    down_bias_ED: jax.Array | None = None,
    activation: str = "silu",
    first_expert: int | jax.Array = 0,
    interpret: bool = False,
) -> jax.Array:
    num_experts, _, hidden, width = gate_up_E2FD.shape
    num_choices = expert_Tk.shape[1]
    expert_P = local_experts(expert_Tk, is_real_T, first_expert, num_experts)
    num_pairs = expert_P.shape[0]
    tile_rows = min(num_pairs, max(8, min(128, num_pairs // num_experts)))
    plan = make_plan(expert_P, num_experts, tile_rows)
    x_PD = x_TD.at[plan.pair_P // num_choices].get(mode="clip")

    def compute_tile(tile: jax.Array, out_PD: jax.Array) -> jax.Array:
        # A tile at the end begins earlier and computes rows of another expert too, which are not kept.
        start = jnp.minimum(plan.start_N[tile], num_pairs - tile_rows)
        row_M = start + jnp.arange(tile_rows)
        is_own_M = (row_M >= plan.start_N[tile]) & (row_M < plan.start_N[tile] + plan.count_N[tile])
        expert = plan.expert_N[tile]
        gate_up_2FD, down_DF = (weight[expert].astype(x_TD.dtype) for weight in (gate_up_E2FD, down_EDF))
        tile_MD = lax.dynamic_slice_in_dim(x_PD, start, tile_rows)
        gate_up_M2F = _product(tile_MD, gate_up_2FD.reshape(2 * hidden, width)).reshape(tile_rows, 2, hidden)
        if gate_up_bias_E2F is not None:
            gate_up_M2F += gate_up_bias_E2F[expert].astype(jnp.float32)
        hidden_MF = ACTIVATIONS[activation](gate_up_M2F[:, 0], gate_up_M2F[:, 1]).astype(x_TD.dtype)
        out_MD = _product(hidden_MF, down_DF)
        if down_bias_ED is not None:
            out_MD += down_bias_ED[expert].astype(jnp.float32)
        kept_MD = lax.dynamic_slice_in_dim(out_PD, start, tile_rows)
        out_MD = jnp.where(is_own_M[:, None], out_MD.astype(x_TD.dtype), kept_MD)
        return lax.dynamic_update_slice_in_dim(out_PD, out_MD, start, 0)

    sorted_PD = lax.fori_loop(0, plan.num_tiles, compute_tile, jnp.zeros((num_pairs, width), x_TD.dtype))
    return weighted_sum(sorted_PD.at[plan.row_P].get(mode="clip"), expert_P, weight_Tk, num_experts)


def _product(a_MK: jax.Array, b_NK: jax.Array) -> jax.Array:
    """a @ b.T accumulated in float32."""
    precision = lax.Precision.HIGHEST if a_MK.dtype == jnp.float32 else None
    return lax.dot_general(a_MK, b_NK, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)
