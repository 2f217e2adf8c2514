"""The compiled part of pooling: vectors of requests from hidden states or from sums of them. Pure functions, no state."""

import jax
import jax.numpy as jnp

POOL_COLUMNS = 4
"""Parameters of `pool` for each request: index, divisor, width, normalize."""
_SHORTEST = 1e-12
"""Vectors are divided by no less, so that a vector of zeros stays one."""


def pool(source_XD: jax.Array, request_RC: jax.Array) -> jax.Array:
    """Float32 [R, D]: row `index` of the source, divided by `divisor`; zero from column `width` on; of length 1 if `normalize`.

    The source may also be [X, W, D], as hidden_NWD: the last token of a row without drafts comes first.
    """
    index_R, divisor_R, width_R, normalize_R = request_RC.T
    source_XD = source_XD[:, 0] if source_XD.ndim == 3 else source_XD  # the last token of each row comes first
    vector_RD = source_XD[index_R].astype(jnp.float32) / jnp.maximum(divisor_R, 1)[:, None].astype(jnp.float32)
    vector_RD = jnp.where(jnp.arange(vector_RD.shape[1]) < width_R[:, None], vector_RD, 0.0)
    length_R1 = jnp.sqrt(jnp.sum(vector_RD * vector_RD, axis=1, keepdims=True))
    return jnp.where(normalize_R[:, None] > 0, vector_RD / jnp.maximum(length_R1, _SHORTEST), vector_RD)


def add_up(sums_ND: jax.Array, hidden_TD: jax.Array, owner_T_first_N: jax.Array) -> jax.Array:
    """Float32 [N, D]: the sums with the hidden states of a step added, each to its row.

    `owner_T_first_N`: int32[T + N], for each token the row that it is added to (N: none), then for each row whether its sum
    begins with this step. Added one by one and not by a product with zeros and ones: what is not finite must stay in its row.
    """
    num_tokens = hidden_TD.shape[0]
    owner_T, first_N = owner_T_first_N[:num_tokens], owner_T_first_N[num_tokens:]
    sums_ND = jnp.where(first_N[:, None] > 0, 0.0, sums_ND)
    return sums_ND.at[owner_T].add(hidden_TD.astype(jnp.float32), mode="drop")
