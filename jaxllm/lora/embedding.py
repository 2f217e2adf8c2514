"""Adapters of a model's embedding."""

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from jaxllm.layers.embedding import Embedding
from jaxllm.layers.linear import abstract_param, precision_of
from jaxllm.layers.source import Source, Tensor
from jaxllm.parallel.shards import Shards


class EmbeddingTarget(nnx.Module):
    """The adapters in all slots: down [S, V, R] has a row for each token, up [S, R, D] takes it to the model's width."""

    def __init__(self, name: str, embedding: Embedding, num_slots: int, rank: int, dtype: str):
        self.name = name
        (V, D), stored = embedding.shape, embedding.vocab_size
        lora_a = Tensor(f"{name}.lora_A.weight", (rank, stored), (stored, rank), transposed=True)
        lora_b = Tensor(f"{name}.lora_B.weight", (D, rank), (D, rank))
        self.down = abstract_param((num_slots, V, rank), ("slot", "vocab", "rank"), dtype, source=Source((lora_a,), 0, (0, 1)))
        self.up = abstract_param((num_slots, rank, D), ("slot", "rank", "embed"), dtype, source=Source((lora_b,), 0, (1, 0)))


def add(target: EmbeddingTarget, token_ids_T: Array, x_TD: Array, slot_T: Array, shards: Shards) -> Array:
    """The embeddings x with what the adapters in the tokens' slots add; tokens with slot -1 and those whose rows are on another device
    keep theirs."""
    down_SVR, up_SRD = target.down[...], target.up[...]
    num_slots, num_rows, rank = down_SVR.shape
    ids_T = token_ids_T - shards.index * num_rows
    is_changed_T = (ids_T >= 0) & (ids_T < num_rows) & (slot_T >= 0)
    row_TR = down_SVR.at[jnp.maximum(slot_T, 0), ids_T].get(mode="clip").astype(x_TD.dtype)
    # Beside the rows for its own slot, each token has zeros for all others.
    is_own_TS = (slot_T[:, None] == jnp.arange(num_slots)) & is_changed_T[:, None]
    row_TQ = jnp.where(is_own_TS[:, :, None], row_TR[:, None, :], 0).reshape(len(row_TR), num_slots * rank)
    up_QD = up_SRD.astype(x_TD.dtype).reshape(num_slots * rank, -1)
    change_TD = lax.dot(row_TQ, up_QD, precision=precision_of(x_TD.dtype), preferred_element_type=jnp.float32)
    return jnp.where(is_changed_T[:, None], (x_TD + change_TD).astype(x_TD.dtype), x_TD)
