"""Finds the value down to which top-k and top-p keep logits, without sorting: exact, ties included.

Both ask for the largest value t whose logits ≥ t together weigh enough (each 1 for top-k, its probability for top-p).
That weight only grows as t falls, and floats order like integers, so t is found digit by digit.
"""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.sampling.order import value_of_key


def top_k_threshold(logits_RV: jax.Array, k_R: jax.Array) -> jax.Array:
    """float32[R]: the k-th largest logit of each row; all logits ≥ it are kept, so ties may keep more than k. 1 ≤ k ≤ V."""
    return _largest_value_reaching(logits_RV, jnp.ones_like(logits_RV, dtype=jnp.int32), k_R)


def top_p_threshold(logits_RV: jax.Array, p_R: jax.Array, floor_R: jax.Array) -> jax.Array:
    """float32[R]: the lowest logit of the smallest set of likeliest tokens, out of those ≥ floor, whose probabilities reach the
    fraction p of their sum; ties with it are kept.
    """
    highest_R = jnp.max(logits_RV, axis=1)
    shift_R = jnp.where(jnp.isfinite(highest_R), highest_R, 0.0)  # a row without any finite logit must not become NaN
    weight_RV = jnp.where(logits_RV >= floor_R[:, None], jnp.exp(logits_RV - shift_R[:, None]), 0.0)
    target_R = p_R * jnp.sum(weight_RV, axis=1)
    # The likeliest token weighs 1, so with a target above 0 it stays however small p is.
    return _largest_value_reaching(logits_RV, weight_RV, jnp.maximum(target_R, jnp.finfo(jnp.float32).tiny))


def _largest_value_reaching(values_RV: jax.Array, weight_RV: jax.Array, target_R: jax.Array) -> jax.Array:
    # On a GPU a pass over V costs memory traffic and launches, so settle 4 bits in each; on a CPU comparisons cost.
    return jax.lax.platform_dependent(
        values_RV, weight_RV, target_R, cpu=partial(_search, bits_per_pass=1), default=partial(_search, bits_per_pass=4)
    )


def _search(values_RV: jax.Array, weight_RV: jax.Array, target_R: jax.Array, *, bits_per_pass: int) -> jax.Array:
    num_candidates = 2**bits_per_pass - 1
    digits = jnp.arange(1, num_candidates + 1, dtype=jnp.uint32)

    def settle_digit(i: jax.Array, key_R: jax.Array) -> jax.Array:
        candidate_digits = digits << (32 - bits_per_pass * (jnp.asarray(i, jnp.uint32) + 1))
        candidate_RN = value_of_key(key_R[:, None] | candidate_digits)
        # One reduction of many operands reads the logits once.
        kept = tuple(jnp.where(values_RV >= candidate_RN[:, n, None], weight_RV, 0) for n in range(num_candidates))
        zeros = (jnp.zeros((), weight_RV.dtype),) * num_candidates
        sums = jax.lax.reduce(kept, zeros, lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True)), (1,))
        enough_RN = jnp.stack(sums, axis=1) >= target_R[:, None]
        return key_R | jnp.max(jnp.where(enough_RN, candidate_digits, 0), axis=1)

    num_passes = 32 // bits_per_pass
    return value_of_key(jax.lax.fori_loop(0, num_passes, settle_digit, jnp.zeros(values_RV.shape[0], jnp.uint32)))
