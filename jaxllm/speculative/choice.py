"""Chooses drafts from a drafter's logits."""

import jax
import jax.numpy as jnp
from jax import Array

from jaxllm.model_config import ModelConfig
from jaxllm.parallel.shards import Shards
from jaxllm.runner.drafter import Drafting


def choose(
    logits_RV: Array,
    position_R: Array,
    drafting: Drafting,
    target: ModelConfig,
    *,
    vocab_size: int,
    token_ids_V: Array | None = None,
    is_drawn: bool,
) -> Array:
    """A token of the target's vocabulary for each row, int32[R].

    logits_RV: of this device's columns of the drafter's vocabulary, -inf in those that pad it. position_R: of the tokens chosen.
    vocab_size, token_ids_V: the size of that vocabulary, and the target's id of each of its tokens; None: they have the same ids.
    is_drawn: draw as the target will, instead of taking the likeliest.
    """
    shards = drafting.shards
    if is_drawn:
        return drafting.draw(_in_targets_columns(logits_RV, shards, target, vocab_size, token_ids_V), position_R)
    if vocab_size > target.vocab_size and token_ids_V is None:
        id_V = shards.index * logits_RV.shape[1] + jnp.arange(logits_RV.shape[1])
        logits_RV = jnp.where(id_V < target.vocab_size, logits_RV, -jnp.inf)
    own_R = jnp.argmax(logits_RV, axis=-1).astype(jnp.int32)
    value_R = jnp.take_along_axis(logits_RV, own_R[:, None], axis=-1)[:, 0]
    chosen_R, _ = shards.likeliest(own_R, value_R, logits_RV.shape[1])
    return chosen_R if token_ids_V is None else token_ids_V[chosen_R]


def _in_targets_columns(
    logits_RV: Array, shards: Shards, target: ModelConfig, vocab_size: int, token_ids_V: Array | None
) -> Array:
    """The logits in this device's columns of the target's vocabulary, -inf for tokens that the drafter lacks."""
    num_own = target.padded_vocab_size // shards.size
    if token_ids_V is None and vocab_size == target.vocab_size and logits_RV.shape[1] == num_own:
        return logits_RV
    ids_V = jnp.arange(vocab_size, dtype=jnp.int32) if token_ids_V is None else token_ids_V
    # Ids behind the target's vocabulary are dropped.
    ids_V = jnp.where(ids_V < target.vocab_size, ids_V, target.padded_vocab_size)
    whole_RV = jnp.full((len(logits_RV), target.padded_vocab_size), -jnp.inf, logits_RV.dtype)
    whole_RV = whole_RV.at[:, ids_V].set(shards.all_columns(logits_RV)[:, :vocab_size], mode="drop")
    return jax.lax.dynamic_slice_in_dim(whole_RV, shards.index * num_own, num_own, axis=1)
