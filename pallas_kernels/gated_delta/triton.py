"""The gated delta rule in one Pallas-Triton kernel: a program per row, value head and block of values walks over the row's tokens.

    state [H, V] of a value head     [ b | b | b | b ]    a program holds H values of each of block_v columns in registers

Columns of a state do not depend on each other, so a program reads its part of the state once, changes it token by token as the
definition says, and writes it back. Each token's arrays are loaded while the one before is computed.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels._compat import load, store, triton_call
from pallas_kernels.sizes import next_power_of_two

MAX_WIDTH = 256
"""Of a key: what registers hold."""


@dataclass(frozen=True)
class Tiles:
    """Columns of a state in a program, and its warps."""

    block_v: int
    num_warps: int


DECODE, RAGGED = Tiles(64, 4), Tiles(8, 1)
"""Of the fastest on an H200 for heads of 128 values: one token gives a program little to do but to move the state, many give it a
chain of small steps."""


def supports(*, platform: str, key_dim: int, interpret: bool = False) -> bool:
    return (platform == "gpu" or interpret) and key_dim <= MAX_WIDTH


def gated_delta(
    q_TKH: jax.Array,
    k_TKH: jax.Array,
    v_TKGV: jax.Array,
    log_decay_TKG: jax.Array,
    beta_TKG: jax.Array,
    state_NKGHV: jax.Array,
    row_R: jax.Array,
    is_new_R: jax.Array,
    query_start_R1: jax.Array,
    *,
    interpret: bool = False,
    tiles: Tiles = RAGGED,
) -> tuple[jax.Array, jax.Array]:
    """See the package."""
    tokens = (q_TKH, k_TKH, v_TKGV, log_decay_TKG, beta_TKG)
    out_TKGV, state_NKGHV = _call(*tokens, state_NKGHV, row_R, is_new_R, query_start_R1, tiles=tiles, interpret=interpret)
    is_real_T = jnp.arange(len(v_TKGV)) < query_start_R1[-1]
    return jnp.where(is_real_T[:, None, None, None], out_TKGV, 0), state_NKGHV


def gated_delta_decode(
    q_RKH: jax.Array,
    k_RKH: jax.Array,
    v_RKGV: jax.Array,
    log_decay_RKG: jax.Array,
    beta_RKG: jax.Array,
    state_NKGHV: jax.Array,
    row_R: jax.Array,
    is_new_R: jax.Array,
    *,
    interpret: bool = False,
    tiles: Tiles = DECODE,
) -> tuple[jax.Array, jax.Array]:
    """See the package."""
    tokens = (q_RKH, k_RKH, v_RKGV, log_decay_RKG, beta_RKG)
    start_R1 = jnp.arange(len(row_R) + 1, dtype=jnp.int32)
    out_RKGV, state_NKGHV = _call(*tokens, state_NKGHV, row_R, is_new_R, start_R1, tiles=tiles, interpret=interpret)
    return out_RKGV, state_NKGHV


def _call(
    q_TKH: jax.Array,
    k_TKH: jax.Array,
    v_TKGV: jax.Array,
    log_decay_TKG: jax.Array,
    beta_TKG: jax.Array,
    state_NKGHV: jax.Array,
    row_R: jax.Array,
    is_new_R: jax.Array,
    query_start_R1: jax.Array,
    *,
    tiles: Tiles,
    interpret: bool,
) -> Any:
    _, K, G, V = v_TKGV.shape
    return triton_call(
        functools.partial(_kernel, block_v=tiles.block_v),
        name="gated_delta",
        grid=(-(-V // tiles.block_v), K * G, len(row_R)),
        out_shape=(jax.ShapeDtypeStruct(v_TKGV.shape, v_TKGV.dtype), jax.ShapeDtypeStruct(state_NKGHV.shape, jnp.float32)),
        num_warps=tiles.num_warps,
        num_stages=1,
        input_output_aliases={8: 1},
        interpret=interpret,
    )(
        row_R.astype(jnp.int32),
        is_new_R.astype(jnp.int32),
        query_start_R1,
        q_TKH,
        k_TKH,
        v_TKGV,
        log_decay_TKG,
        beta_TKG,
        state_NKGHV,
    )


def _kernel(
    row_ref: Any,  # [R]
    is_new_ref: Any,  # [R]
    start_ref: Any,  # [R + 1]
    q_ref: Any,  # [T, K, H]
    k_ref: Any,
    v_ref: Any,  # [T, K, G, V]
    log_decay_ref: Any,  # [T, K, G]
    beta_ref: Any,
    state_ref: Any,  # [N, K, G, H, V], as is the result's
    out_ref: Any,  # [T, K, G, V]
    new_state_ref: Any,
    *,
    block_v: int,
) -> None:
    num_rows, _, G, H, V = state_ref.shape
    head, r = pl.program_id(1), pl.program_id(2)
    kh, g = lax.div(head, G), lax.rem(head, G)
    h_H = lax.iota(jnp.int32, next_power_of_two(H))
    v_V = pl.program_id(0) * block_v + lax.iota(jnp.int32, block_v)
    is_h_H, is_v_V = h_H < H, v_V < V
    is_in_HV = is_h_H[:, None] & is_v_V[None, :]
    row, first, end = load(row_ref.at[r]), load(start_ref.at[r]), load(start_ref.at[r + 1])
    is_padding = row == num_rows - 1

    def token(t: jax.Array) -> tuple[jax.Array, ...]:
        """q, k, v, log_decay and beta of a token, zeros behind the row's last."""
        is_there = t < end
        keys, values = is_h_H & is_there, is_v_V & is_there
        return (
            load(q_ref.at[t, kh, h_H], mask=keys, other=0.0).astype(jnp.float32),
            load(k_ref.at[t, kh, h_H], mask=keys, other=0.0).astype(jnp.float32),
            load(v_ref.at[t, kh, g, v_V], mask=values, other=0.0).astype(jnp.float32),
            load(log_decay_ref.at[t, kh, g], mask=is_there, other=0.0),
            load(beta_ref.at[t, kh, g], mask=is_there, other=0.0),
        )

    def step(t: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        state_HV, q_H, k_H, v_V_, log_decay, beta = carry
        upcoming = token(t + 1)
        state_HV *= jnp.exp(log_decay)
        known_V = jnp.sum(k_H[:, None] * state_HV, axis=0)
        state_HV += k_H[:, None] * (beta * (v_V_ - known_V))[None, :]
        out_V = jnp.sum(q_H[:, None] * state_HV, axis=0)
        store(out_ref.at[t, kh, g, v_V], out_V.astype(out_ref.dtype), mask=is_v_V)
        return (state_HV, *upcoming)

    @pl.when(is_padding)
    def pad() -> None:
        """Padding of a decode has a token, whose output must be finite."""
        store(out_ref.at[first, kh, g, v_V], jnp.zeros(block_v, out_ref.dtype), mask=is_v_V & (first < end))

    @pl.when((first < end) & ~is_padding)
    def compute() -> None:
        place = (row, kh, g, h_H[:, None], v_V[None, :])
        is_kept = is_in_HV & (load(is_new_ref.at[r]) == 0)
        state_HV = load(state_ref.at[place], mask=is_kept, other=0.0)
        state_HV, *_ = lax.fori_loop(first, end, step, (state_HV, *token(first)))
        store(new_state_ref.at[place], state_HV, mask=is_in_HV)
