"""A Pallas-Triton kernel: a program per token and few experts norms the token again and multiplies without tensor cores.

A token's vector comes from the cache, and a program has little to multiply, so that to norm it in each program takes less time than to
wait for another kernel. All that is loaded is asked for before anything is computed.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels._compat import load, store, triton_call
from pallas_kernels.sizes import next_power_of_two

MAX_WIDTH = 8192
"""Values of a token that the registers of 16 warps hold, with as many of each expert."""
BLOCK_E = 2
"""Experts of a program: with 256 experts, one token gives all cores of an H100 something to read."""


def supports(*, platform: str, width: int, interpret: bool = False) -> bool:
    return (platform == "gpu" or interpret) and width <= MAX_WIDTH


def router_scores(
    x_TD: jax.Array,
    norm_weight_D: jax.Array,
    router_ED: jax.Array,
    is_real_T: jax.Array | None,
    bias_E: jax.Array | None,
    *,
    eps: float,
    weight_offset: float,
    interpret: bool = False,
    block_e: int = BLOCK_E,
) -> jax.Array:
    """See the package."""
    (num_tokens, width), num_experts = x_TD.shape, len(router_ED)
    biases = [] if bias_E is None else [bias_E]
    are_real = [] if is_real_T is None else [is_real_T.astype(jnp.int32)]
    return triton_call(
        functools.partial(_kernel, eps=eps, weight_offset=weight_offset, block_e=block_e, has_bias=bool(biases)),
        name="router_scores",
        grid=(pl.cdiv(num_experts, block_e), num_tokens),
        out_shape=jax.ShapeDtypeStruct((num_tokens, num_experts), jnp.float32),
        num_warps=max(1, next_power_of_two(width) // 512),
        num_stages=1,
        interpret=interpret,
    )(x_TD, norm_weight_D, router_ED, *biases, *are_real)


def _kernel(
    x_ref: Any,  # [T, D]
    norm_weight_ref: Any,  # [D]
    router_ref: Any,  # [E, D]
    *refs: Any,  # bias [E] if there is one; is_real [T] if there is padding; scores [T, E]
    eps: float,
    weight_offset: float,
    block_e: int,
    has_bias: bool,
) -> None:
    *arguments, out_ref = refs
    biases, are_real = arguments[:has_bias], arguments[has_bias:]
    num_experts, width = router_ref.shape
    t, first = pl.program_id(1), pl.program_id(0) * block_e
    d_D = lax.iota(jnp.int32, next_power_of_two(width))
    is_d_D = d_D < width
    experts = [first + i for i in range(block_e)]

    def compute() -> None:
        weights = [load(router_ref.at[expert, d_D], mask=is_d_D & (expert < num_experts), other=0.0) for expert in experts]
        x_D = load(x_ref.at[t, d_D], mask=is_d_D, other=0.0).astype(jnp.float32)
        factor_D = load(norm_weight_ref.at[d_D], mask=is_d_D, other=0.0).astype(jnp.float32) + weight_offset
        x_D = x_D * lax.rsqrt(jnp.sum(x_D * x_D, axis=0) / width + eps) * factor_D
        x_D = x_D.astype(x_ref.dtype).astype(jnp.float32)
        scores = [jnp.sum(x_D * weight_D.astype(jnp.float32), axis=0) for weight_D in weights]
        for bias_ref in biases:
            own = [load(bias_ref.at[expert], mask=expert < num_experts, other=0.0) for expert in experts]
            scores = [score + bias for score, bias in zip(scores, own, strict=True)]
        write(scores)

    def write(scores: list[Any]) -> None:
        for expert, score in zip(experts, scores, strict=True):
            store(out_ref.at[t, expert], score, mask=expert < num_experts)

    if not are_real:
        compute()
        return
    is_real = are_real[0][t] != 0
    pl.when(is_real)(compute)
    pl.when(~is_real)(lambda: write([jnp.float32(0)] * block_e))
