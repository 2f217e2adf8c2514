"""The recurrence of single tokens in one Pallas-Triton kernel: a program per row and head holds its state [P, S] in registers, reads it
once and writes it once. Longer rows are left to the chunks of `xla`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels._compat import load, store, triton_call
from pallas_kernels.sizes import next_power_of_two
from pallas_kernels.state_space import xla

MAX_VALUES = 2**14
"""Most values of a state: registers hold it."""
_NUM_WARPS = 8


def supports(*, platform: str, head_dim: int, state_size: int, interpret: bool = False) -> bool:
    return (platform == "gpu" or interpret) and next_power_of_two(head_dim) * next_power_of_two(state_size) <= MAX_VALUES


def state_space(*arrays: jax.Array, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """See the package."""
    return xla.state_space(*arrays, decode=functools.partial(state_space_decode, interpret=interpret))


def state_space_decode(
    x_RKGP: jax.Array,
    b_RKS: jax.Array,
    c_RKS: jax.Array,
    dt_RKG: jax.Array,
    log_decay_RKG: jax.Array,
    skip_KG: jax.Array,
    state_NKGPS: jax.Array,
    row_R: jax.Array,
    is_new_R: jax.Array,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See the package."""
    num_rows, K, G, _ = x_RKGP.shape
    out_RKGP, state_NKGPS = triton_call(
        _kernel,
        name="state_space",
        grid=(K * G, num_rows),
        out_shape=(jax.ShapeDtypeStruct(x_RKGP.shape, x_RKGP.dtype), jax.ShapeDtypeStruct(state_NKGPS.shape, jnp.float32)),
        num_warps=_NUM_WARPS,
        num_stages=1,
        input_output_aliases={8: 1},
        interpret=interpret,
    )(
        row_R.astype(jnp.int32),
        is_new_R.astype(jnp.int32),
        x_RKGP,
        b_RKS,
        c_RKS,
        dt_RKG,
        log_decay_RKG,
        skip_KG,
        state_NKGPS,
    )
    return out_RKGP, state_NKGPS


def _kernel(
    row_ref: Any,  # [R]
    is_new_ref: Any,
    x_ref: Any,  # [R, K, G, P]
    b_ref: Any,  # [R, K, S]
    c_ref: Any,
    dt_ref: Any,  # [R, K, G]
    log_decay_ref: Any,
    skip_ref: Any,  # [K, G]
    state_ref: Any,  # [N, K, G, P, S], as is the result's
    out_ref: Any,  # [R, K, G, P]
    new_state_ref: Any,
) -> None:
    num_rows, _, G, P, S = state_ref.shape
    head, r = pl.program_id(0), pl.program_id(1)
    k, g = lax.div(head, G), lax.rem(head, G)
    p_P, s_S = lax.iota(jnp.int32, next_power_of_two(P)), lax.iota(jnp.int32, next_power_of_two(S))
    is_p_P, is_s_S = p_P < P, s_S < S
    row = load(row_ref.at[r])
    is_padding = row == num_rows - 1

    @pl.when(is_padding)
    def pad() -> None:
        """Its output must be finite."""
        store(out_ref.at[r, k, g, p_P], jnp.zeros(p_P.shape, out_ref.dtype), mask=is_p_P)

    @pl.when(~is_padding)
    def compute() -> None:
        x_P = load(x_ref.at[r, k, g, p_P], mask=is_p_P, other=0.0).astype(jnp.float32)
        b_S, c_S = (load(ref.at[r, k, s_S], mask=is_s_S, other=0.0).astype(jnp.float32) for ref in (b_ref, c_ref))
        place, is_in_PS = (row, k, g, p_P[:, None], s_S[None, :]), is_p_P[:, None] & is_s_S[None, :]
        state_PS = load(state_ref.at[place], mask=is_in_PS & (load(is_new_ref.at[r]) == 0), other=0.0)
        state_PS *= jnp.exp(load(log_decay_ref.at[r, k, g]))
        state_PS += (load(dt_ref.at[r, k, g]) * x_P)[:, None] * b_S[None, :]
        out_P = jnp.sum(state_PS * c_S[None, :], axis=1) + load(skip_ref.at[k, g]) * x_P
        store(out_ref.at[r, k, g, p_P], out_P.astype(out_ref.dtype), mask=is_p_P)
        store(new_state_ref.at[place], state_PS, mask=is_in_PS)
