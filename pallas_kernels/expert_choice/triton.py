"""One Pallas-Triton kernel: a warp per token holds all of its scores in registers and takes the largest k times."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels._compat import load, store, triton_call
from pallas_kernels.expert_choice.rule import Rule
from pallas_kernels.sizes import next_power_of_two

MAX_EXPERTS = 512
"""16 scores in each thread of a warp."""
_LOWEST = float(jnp.finfo(jnp.float32).min)
"""What was not chosen yet is no lower: -inf marks what was, and what fills the tile."""


def supports(*, platform: str, num_experts: int, rule: Rule, interpret: bool = False) -> bool:
    return (platform == "gpu" or interpret) and num_experts <= MAX_EXPERTS and rule.scoring != "sparsemixer"


def choose_experts(
    logits_TE: jax.Array,
    bias_E: jax.Array | None = None,
    is_real_T: jax.Array | None = None,
    *,
    rule: Rule,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    num_tokens = logits_TE.shape[0]
    biases = [] if bias_E is None or rule.scoring == "softmax_of_chosen" else [bias_E]
    are_real = [] if is_real_T is None else [is_real_T.astype(jnp.int32)]
    shape = (num_tokens, rule.top_k)
    expert_Tk, weight_Tk = triton_call(
        functools.partial(_kernel, rule=rule, has_bias=bool(biases)),
        name="expert_choice",
        grid=(num_tokens,),
        out_shape=(jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32)),
        num_warps=1,
        num_stages=1,
        interpret=interpret,
    )(logits_TE, *biases, *are_real)
    return expert_Tk, weight_Tk


def _kernel(
    logits_ref: Any,  # [T, E]
    *refs: Any,  # bias [E] if there is one; is_real [T] if there is padding; expert [T, k], weight [T, k]
    rule: Rule,
    has_bias: bool,
) -> None:
    *inputs, expert_ref, weight_ref = refs
    bias_ref, is_real_ref = inputs[:has_bias], inputs[has_bias:]
    row, num_experts = pl.program_id(0), logits_ref.shape[1]
    id_E = _range(num_experts)
    is_expert_E = id_E < num_experts
    logit_E = load(logits_ref.at[row, id_E], mask=is_expert_E, other=-jnp.inf)
    if rule.scoring == "softmax":
        highest = jnp.max(logit_E, axis=0)
        total = jnp.sum(jnp.exp(logit_E - highest), axis=0)

    def score(logit: jax.Array) -> jax.Array:
        if rule.scoring == "softmax":
            return jnp.exp(logit - highest) / total
        return logit if rule.scoring == "softmax_of_chosen" else jax.nn.sigmoid(logit)

    def left(logit: jax.Array, id: jax.Array, is_expert: jax.Array) -> jax.Array:
        """What the largest are taken of; NaN is the largest, as it is to `lax.top_k`."""
        choice = score(logit)
        if bias_ref:
            choice += load(bias_ref[0].at[id], mask=is_expert, other=0.0)
        return jnp.where(is_expert, jnp.maximum(jnp.where(jnp.isnan(choice), jnp.inf, choice), _LOWEST), -jnp.inf)

    left_E = left(logit_E, id_E, is_expert_E)
    if rule.num_groups > 1:
        size = num_experts // rule.num_groups
        group_G, member_1e = _range(rule.num_groups), _range(size)[None, :]
        id_Ge = group_G[:, None] * size + member_1e
        is_expert_Ge = (group_G < rule.num_groups)[:, None] & (member_1e < size)
        left_Ge = left(load(logits_ref.at[row, id_Ge], mask=is_expert_Ge, other=-jnp.inf), id_Ge, is_expert_Ge)
        is_chosen_E = _is_in_chosen_group(left_Ge, group_G, member_1e, lax.div(id_E, size), rule)
        left_E = jnp.where(is_expert_E & ~is_chosen_E, _LOWEST, left_E)

    choice_K = _range(rule.top_k)

    def take(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        left_E, expert_K = carry
        expert = jnp.argmax(left_E, axis=0).astype(jnp.int32)  # of equals the first
        return jnp.where(id_E == expert, -jnp.inf, left_E), jnp.where(choice_K == i, expert, expert_K)

    _, expert_K = lax.fori_loop(0, rule.top_k, take, (left_E, jnp.zeros_like(choice_K)))
    is_choice_K = choice_K < rule.top_k
    # Read again: that is quicker than to find each choice among the registers of all threads.
    weight_K = score(load(logits_ref.at[row, expert_K]))
    if rule.scoring == "softmax_of_chosen":
        exp_K = jnp.where(is_choice_K, jnp.exp(weight_K - jnp.max(weight_K, axis=0)), 0.0)
        weight_K = exp_K / jnp.sum(exp_K, axis=0)
    elif rule.renormalize:
        weight_K = weight_K / jnp.maximum(jnp.sum(jnp.where(is_choice_K, weight_K, 0.0), axis=0), 1e-20)
    if is_real_ref:
        expert_K = jnp.where(is_real_ref[0][row] != 0, expert_K, -1)
    store(expert_ref.at[row, choice_K], expert_K, mask=is_choice_K)
    store(weight_ref.at[row, choice_K], weight_K * rule.scale, mask=is_choice_K)


def _is_in_chosen_group(
    left_Ge: jax.Array, group_G: jax.Array, member_1e: jax.Array, group_E: jax.Array, rule: Rule
) -> jax.Array:
    """Bool [E]: whether the group of each expert, group_E, is one of the best."""
    value_G = jnp.max(left_Ge, axis=1)
    if rule.sums_two:
        is_first_Ge = member_1e == jnp.argmax(left_Ge, axis=1)[:, None]
        value_G = jnp.maximum(value_G + jnp.max(jnp.where(is_first_Ge, -jnp.inf, left_Ge), axis=1), _LOWEST)
    value_G = jnp.where(group_G < rule.num_groups, value_G, -jnp.inf)
    is_chosen_E = group_E < 0
    for _ in range(rule.top_groups):
        group = jnp.argmax(value_G, axis=0).astype(jnp.int32)
        is_chosen_E |= group_E == group
        value_G = jnp.where(group_G == group, -jnp.inf, value_G)
    return is_chosen_E


def _range(size: int) -> jax.Array:
    """Of so many numbers, and more up to a power of two."""
    return jnp.arange(max(2, next_power_of_two(size)))
