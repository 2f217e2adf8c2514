"""The choice of experts for each token."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxllm.model_parts import Routing


def route(logits_TE: Array, routing: Routing, bias_E: Array | None = None) -> tuple[Array, Array]:
    """The experts of each token, int32 [T, k], and their weights, float32 [T, k], from float32 logits.

    bias_E: the correction bias, where the routing has one. Sources: arXiv:2401.04088, arXiv:2412.19437 (groups and bias).
    """
    if routing.scoring == "sparsemixer":
        return _sparsemixer(logits_TE, routing.jitter)
    if routing.scoring == "softmax_of_chosen":
        chosen_Tk, expert_Tk = lax.top_k(logits_TE, routing.top_k)
        return expert_Tk, jax.nn.softmax(chosen_Tk, axis=-1) * routing.scale
    scores_TE = jax.nn.softmax(logits_TE, axis=-1) if routing.scoring == "softmax" else jax.nn.sigmoid(logits_TE)
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if routing.num_groups > 1:
        choice_TE = _within_groups(choice_TE, routing)
    _, expert_Tk = lax.top_k(choice_TE, routing.top_k)
    weight_Tk = jnp.take_along_axis(scores_TE, expert_Tk, axis=-1)
    if routing.renormalize:
        weight_Tk = weight_Tk / jnp.maximum(jnp.sum(weight_Tk, axis=-1, keepdims=True), 1e-20)
    return expert_Tk, weight_Tk * routing.scale


def _within_groups(choice_TE: Array, routing: Routing) -> Array:
    """The scores with -inf outside of the chosen groups."""
    num_tokens, num_experts = choice_TE.shape
    choice_TGe = choice_TE.reshape(num_tokens, routing.num_groups, -1)
    if routing.sums_two:
        group_TG = jnp.sum(lax.top_k(choice_TGe, 2)[0], axis=-1)
    else:
        group_TG = jnp.max(choice_TGe, axis=-1)
    _, chosen_Tg = lax.top_k(group_TG, routing.top_groups)
    is_chosen_TG = jnp.any(chosen_Tg[:, :, None] == jnp.arange(routing.num_groups), axis=1)
    return jnp.where(is_chosen_TG[:, :, None], choice_TGe, -jnp.inf).reshape(num_tokens, num_experts)


def _sparsemixer(logits_TE: Array, jitter: float) -> tuple[Array, Array]:
    """Two experts, each the likeliest of those left, weighted by its share among those close to it. Source: arXiv:2409.12136."""
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
