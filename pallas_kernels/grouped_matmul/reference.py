"""The plain truth: every expert computes every token in float32, and those that were not chosen count for nothing."""

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul.activation import ACTIVATIONS
from pallas_kernels.grouped_matmul.mxfp4 import Mxfp4


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
    """Nothing is rounded before the result."""

    def product(a: jax.Array, b: jax.Array | Mxfp4) -> jax.Array:
        return jnp.matmul(a, b.astype(jnp.float32).T, precision=jax.lax.Precision.HIGHEST)

    wide_TD = x_TD.astype(jnp.float32)
    sum_TD = jnp.zeros_like(wide_TD)
    for expert in range(down_EDF.shape[0]):
        is_chosen_Tk = expert_Tk == first_expert + expert
        if is_real_T is not None:
            is_chosen_Tk &= is_real_T[:, None]
        gate_TF, up_TF = (product(wide_TD, gate_up_E2FD[expert, i]) for i in range(2))
        if gate_up_bias_E2F is not None:
            gate_TF, up_TF = gate_TF + gate_up_bias_E2F[expert, 0], up_TF + gate_up_bias_E2F[expert, 1]
        out_TD = product(ACTIVATIONS[activation](gate_TF, up_TF), down_EDF[expert])
        if down_bias_ED is not None:
            out_TD = out_TD + down_bias_ED[expert]
        weight_T1 = jnp.sum(jnp.where(is_chosen_Tk, weight_Tk, 0.0), axis=1, keepdims=True)
        sum_TD += jnp.where(jnp.any(is_chosen_Tk, axis=1, keepdims=True), out_TD * weight_T1, 0.0)
    return sum_TD.astype(x_TD.dtype)
