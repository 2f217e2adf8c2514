"""Logprobs to report: of a token, and of the likeliest or of named tokens. Serves outputs and prompts alike.

Given the model's logits, masked where an output has a grammar, they are raw_logprobs, given `sample_full`'s processed logits
processed_logprobs; with `normalize=False` the same two as logits.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import sampling as kernels

TopLogprobs = tuple[jax.Array, jax.Array, jax.Array]
"""(token ids int32[R, 1 + k], logprobs float32[R, 1 + k], rank int32[R])"""


def top_logprobs(
    logits_RV: jax.Array,
    token_R: jax.Array,
    k: int,
    *,
    normalize: bool = True,
    implementation: str = "xla",
    interpret: bool = False,
) -> TopLogprobs:
    """Column 0 is the given token, the others the k likeliest (which may repeat it) in order; of equals the lower id first.

    Rank: how many tokens are at least as likely as the given one, itself included. 0 ≤ k ≤ V; padded columns come last.
    implementation, interpret: as in `sampler`; kernels take 1 ≤ k ≤ kernels.MAX_TOP_VALUES, beyond it is plain JAX.
    """
    if implementation == "xla" or not 1 <= k <= kernels.MAX_TOP_VALUES:
        # To lax.top_k, -0 is less than 0; here they are equals.
        likeliest_RK, ids_RK = jax.lax.top_k(jnp.where(logits_RV == 0, 0.0, logits_RV), k)
        return _report(logits_RV, token_R, ids_RK.astype(jnp.int32), likeliest_RK, normalize)
    token_R1 = token_R.astype(jnp.int32)[:, None]
    own_R1 = jnp.take_along_axis(logits_RV, token_R1, axis=1)
    top = kernels.top_values(logits_RV, own_R1[:, 0], k, implementation=implementation, interpret=interpret)
    values = jnp.concatenate([own_R1, top.values_RK], axis=1)
    if normalize:
        values = values - top.logsumexp_R[:, None]
    return jnp.concatenate([token_R1, top.ids_RK], axis=1), values, top.rank_R


def named_logprobs(logits_RV: jax.Array, token_R: jax.Array, ids_RI: jax.Array, *, normalize: bool = True) -> TopLogprobs:
    """As `top_logprobs`, with the tokens of logprob_token_ids in place of the likeliest; ids of -1 fill up, with -inf."""
    values_RI = jnp.take_along_axis(logits_RV, jnp.maximum(ids_RI, 0), axis=1)
    return _report(logits_RV, token_R, ids_RI, jnp.where(ids_RI >= 0, values_RI, -jnp.inf), normalize)


def _report(logits_RV: jax.Array, token_R: jax.Array, ids_RK: jax.Array, values_RK: jax.Array, normalize: bool) -> TopLogprobs:
    token_R1 = token_R.astype(jnp.int32)[:, None]
    own_R1 = jnp.take_along_axis(logits_RV, token_R1, axis=1)
    rank_R = jnp.sum(logits_RV >= own_R1, axis=1, dtype=jnp.int32)
    values = jnp.concatenate([own_R1, values_RK], axis=1)
    if normalize:
        values = values - jax.nn.logsumexp(logits_RV, axis=1, keepdims=True)
    return jnp.concatenate([token_R1, ids_RK], axis=1), values, rank_R
