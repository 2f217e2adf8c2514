"""Attention over a paged cache of latents where each query sees only the keys that score highest. Source: arXiv:2512.02556, section 2.1.

`choose_tokens` scores the earlier tokens of each query and returns the slots of the best; `attend_to_slots` attends to these. So a
layer may use the choice of another. Both are plain JAX, for every platform.

Shapes, besides those of `mla_attention`:
    q_TXI, weight_TX  queries of X heads that score, and the heads' weights
    pages_P1SI        the pool of pages of their keys, one vector per token
    slot_TK           int32: slots of the chosen tokens, page * S + offset; -1: none, where a query sees fewer than K

A query's score of a token is the sum over heads of weight * relu(q . key), in float32. Equal scores: the earlier token is chosen. Up to K
tokens that a query may see, itself included, are all chosen, without being scored.
"""

from pallas_kernels.sparse_attention.attention import BLOCK_BYTES, attend_to_slots
from pallas_kernels.sparse_attention.choice import WORK_BYTES, choose_tokens, write_keys

__all__ = ["attend_to_slots", "choose_tokens", "work_bytes", "write_keys"]


def work_bytes(num_tokens: int, top_k: int) -> int:
    """Temporary memory of both, a little too much: the slots of a layer and of the one before, and what blocks of queries need."""
    return 2 * 4 * num_tokens * top_k + WORK_BYTES + BLOCK_BYTES
