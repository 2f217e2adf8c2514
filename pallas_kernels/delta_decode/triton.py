"""A decode of linear attention in one Pallas-Triton kernel: a program per row and value head holds the head's state in registers.

A program convolves the query and the key of its key head, as do those of the other value heads of that key head, and its own value. So
none may write the convolution's state while another reads it: XLA moves it on after the kernel, while the product that follows runs.
Outputs do not wait for the new state: with s the state once it has decayed, q @ (s + outer(k, u)) = q @ s + (q . k) u.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels._compat import load, store, triton_call
from pallas_kernels.delta_decode.window import moved_on, window_of
from pallas_kernels.sizes import next_power_of_two

MAX_STATE = 128 * 128
"""Values of a state: with more, registers of 16 warps spill."""
VALUES_OF_WARP = 2048
"""How many values of a state a warp holds: 64 in each thread."""


def supports(*, platform: str, key_dim: int, value_dim: int, interpret: bool = False) -> bool:
    return (platform == "gpu" or interpret) and next_power_of_two(key_dim) * next_power_of_two(value_dim) <= MAX_STATE


def delta_decode(
    qkvz_RKC: jax.Array,
    ba_RKC: jax.Array,
    conv_weight_KCJ: jax.Array,
    log_rate_KG: jax.Array,
    rate_bias_KG: jax.Array,
    norm_weight_V: jax.Array,
    conv_state_NKjC: jax.Array,
    state_NKGHV: jax.Array,
    row_R: jax.Array,
    is_new_R: jax.Array,
    *,
    gate: str,
    eps: float,
    interpret: bool = False,
    values_of_warp: int = VALUES_OF_WARP,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See the package."""
    (R, K, _), (_, _, G, H, V), C = qkvz_RKC.shape, state_NKGHV.shape, conv_weight_KCJ.shape[1]
    out_RKGV, state_after_NKGHV = triton_call(
        functools.partial(_kernel, gate=gate, eps=eps),
        name="delta_decode",
        grid=(K * G, R),
        out_shape=(
            jax.ShapeDtypeStruct((R, K, G, V), qkvz_RKC.dtype),
            jax.ShapeDtypeStruct(state_NKGHV.shape, state_NKGHV.dtype),
        ),
        num_warps=max(1, next_power_of_two(H) * next_power_of_two(V) // values_of_warp),
        num_stages=1,
        input_output_aliases={9: 1},
        interpret=interpret,
    )(
        row_R.astype(jnp.int32),
        is_new_R.astype(jnp.int32),
        qkvz_RKC,
        ba_RKC,
        conv_weight_KCJ,
        log_rate_KG,
        rate_bias_KG,
        norm_weight_V,
        conv_state_NKjC,
        state_NKGHV,
    )
    window_RKJC = window_of(qkvz_RKC[..., :C], conv_state_NKjC, row_R, is_new_R)
    return out_RKGV, moved_on(window_RKJC, conv_state_NKjC, row_R), state_after_NKGHV


def _kernel(
    row_ref: Any,  # [R]
    is_new_ref: Any,  # [R]
    qkvz_ref: Any,  # [R, K, C]
    ba_ref: Any,  # [R, K, 2 * G]
    conv_weight_ref: Any,  # [K, C, J]
    log_rate_ref: Any,  # [K, G]
    rate_bias_ref: Any,  # [K, G]
    norm_weight_ref: Any,  # [V]
    conv_state_ref: Any,  # [N, K, j, C]
    state_ref: Any,  # [N, K, G, H, V], as is the result's
    out_ref: Any,  # [R, K, G, V]
    new_state_ref: Any,
    *,
    gate: str,
    eps: float,
) -> None:
    N, _, G, H, V = state_ref.shape
    _, C, J = conv_weight_ref.shape
    head, r = pl.program_id(0), pl.program_id(1)
    kh, g = lax.div(head, G), lax.rem(head, G)
    h_H, v_V = lax.iota(jnp.int32, next_power_of_two(H)), lax.iota(jnp.int32, next_power_of_two(V))
    is_h_H, is_v_V = h_H < H, v_V < V
    is_in_HV = is_h_H[:, None] & is_v_V[None, :]
    row = load(row_ref.at[r])
    is_padding = row == N - 1

    def number(ref: Any, *place: Any, **options: Any) -> jax.Array:
        return load(ref.at[place], **options).astype(jnp.float32)

    def convolved(channel: jax.Array, is_there: jax.Array, is_kept: jax.Array) -> jax.Array:
        """The activated results of the convolution for these channels of the key head."""
        total = number(qkvz_ref, r, kh, channel, mask=is_there, other=0.0)
        total *= number(conv_weight_ref, kh, channel, J - 1, mask=is_there, other=0.0)
        for j in range(J - 1):
            before = number(conv_state_ref, row, kh, j, channel, mask=is_there & is_kept, other=0.0)
            total += before * number(conv_weight_ref, kh, channel, j, mask=is_there, other=0.0)
        return total * jax.nn.sigmoid(total)

    @pl.when(is_padding)
    def pad() -> None:
        store(out_ref.at[r, kh, g, v_V], jnp.zeros(v_V.shape, out_ref.dtype), mask=is_v_V)

    @pl.when(~is_padding)
    def compute() -> None:
        place = (row, kh, g, h_H[:, None], v_V[None, :])
        is_kept = load(is_new_ref.at[r]) == 0
        state_HV = load(state_ref.at[place], mask=is_in_HV & is_kept, other=0.0)  # first: it is the longest to wait for
        q_H, k_H = convolved(h_H, is_h_H, is_kept), convolved(H + h_H, is_h_H, is_kept)
        value_V = convolved(2 * H + g * V + v_V, is_v_V, is_kept)
        z_V = number(qkvz_ref, r, kh, C + g * V + v_V, mask=is_v_V, other=0.0)
        factor_V = number(norm_weight_ref, v_V, mask=is_v_V, other=0.0)
        beta = jax.nn.sigmoid(number(ba_ref, r, kh, g))
        rate = number(ba_ref, r, kh, G + g) + number(rate_bias_ref, kh, g)
        softplus = jnp.maximum(rate, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(rate)))
        decay = jnp.exp(-jnp.exp(number(log_rate_ref, kh, g)) * softplus)

        q_H *= lax.rsqrt(jnp.sum(q_H * q_H, axis=0) + 1e-6) * H**-0.5
        k_H *= lax.rsqrt(jnp.sum(k_H * k_H, axis=0) + 1e-6)
        state_HV *= decay
        known_V = jnp.sum(k_H[:, None] * state_HV, axis=0)
        read_V = jnp.sum(q_H[:, None] * state_HV, axis=0)
        added_V = beta * (value_V - known_V)
        store(new_state_ref.at[place], state_HV + k_H[:, None] * added_V[None, :], mask=is_in_HV)

        sum_V = read_V + jnp.sum(q_H * k_H, axis=0) * added_V
        scale = lax.rsqrt(jnp.sum(sum_V * sum_V, axis=0) / V + eps)
        sigmoid_V = jax.nn.sigmoid(z_V)
        gate_V = sigmoid_V if gate == "sigmoid" else z_V * sigmoid_V
        store(out_ref.at[r, kh, g, v_V], (sum_V * scale * factor_V * gate_V).astype(out_ref.dtype), mask=is_v_V)
