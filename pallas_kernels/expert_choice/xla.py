"""The choice in plain JAX, by `lax.top_k`, which XLA turns into a sort of all experts."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.expert_choice.rule import Rule


def supports(**_: object) -> bool:
    return True


def choose_experts(
    logits_TE: Array, bias_E: Array | None = None, is_real_T: Array | None = None, *, rule: Rule, interpret: bool = False
) -> tuple[Array, Array]:
    expert_Tk, weight_Tk = _choose(logits_TE, bias_E, rule)
    return expert_Tk if is_real_T is None else jnp.where(is_real_T[:, None], expert_Tk, -1), weight_Tk


def _choose(logits_TE: Array, bias_E: Array | None, rule: Rule) -> tuple[Array, Array]:
    if rule.scoring == "sparsemixer":
        return _sparsemixer(logits_TE, rule.jitter)
    if rule.scoring == "softmax_of_chosen":
        chosen_Tk, expert_Tk = lax.top_k(logits_TE, rule.top_k)
        return expert_Tk, jax.nn.softmax(chosen_Tk, axis=-1) * rule.scale
    scores_TE = jax.nn.softmax(logits_TE, axis=-1) if rule.scoring == "softmax" else jax.nn.sigmoid(logits_TE)
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if rule.num_groups > 1:
        choice_TE = _within_groups(choice_TE, rule)
    _, expert_Tk = lax.top_k(choice_TE, rule.top_k)
    weight_Tk = jnp.take_along_axis(scores_TE, expert_Tk, axis=-1)
    if rule.renormalize:
        weight_Tk = weight_Tk / jnp.maximum(jnp.sum(weight_Tk, axis=-1, keepdims=True), 1e-20)
    return expert_Tk, weight_Tk * rule.scale


def _within_groups(choice_TE: Array, rule: Rule) -> Array:
    """The scores with -inf outside of the chosen groups."""
    num_tokens, num_experts = choice_TE.shape
    choice_TGe = choice_TE.reshape(num_tokens, rule.num_groups, -1)
    if rule.sums_two:
        group_TG = jnp.sum(lax.top_k(choice_TGe, 2)[0], axis=-1)
    else:
        group_TG = jnp.max(choice_TGe, axis=-1)
    _, chosen_Tg = lax.top_k(group_TG, rule.top_groups)
    is_chosen_TG = jnp.any(chosen_Tg[:, :, None] == jnp.arange(rule.num_groups), axis=1)
    return jnp.where(is_chosen_TG[:, :, None], choice_TGe, -jnp.inf).reshape(num_tokens, num_experts)


def _sparsemixer(logits_TE: Array, jitter: float) -> tuple[Array, Array]:
    """Two experts, each the likeliest of those left, weighted by its share among those close to it."""
    experts, weights = [], []
    left_TE = logits_TE
    for _ in range(2):
        largest_T1 = jnp.max(left_TE, axis=-1, keepdims=True)
        expert_T = jnp.argmax(left_TE, axis=-1).astype(jnp.int32)
        distance_TE = (largest_T1 - logits_TE) / jnp.maximum(jnp.abs(logits_TE), largest_T1)
        close_TE = jnp.where(distance_TE > 2 * jitter, -jnp.inf, left_TE)
        share_TE = jax.nn.softmax(close_TE, axis=-1)
        weights.append(jnp.take_along_axis(share_TE, expert_T[:, None], axis=-1)[:, 0])
        experts.append(expert_T)
        left_TE = jnp.where(jnp.arange(logits_TE.shape[1]) == expert_T[:, None], -jnp.inf, left_TE)
    return jnp.stack(experts, axis=1), jnp.stack(weights, axis=1)
