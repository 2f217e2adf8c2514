"""Draws tokens of which drafts exist, so that they have the target's distribution. Source: arXiv:2211.17192, arXiv:2302.01318.

A draft x of a distribution q is accepted with probability min(1, p(x) / q(x)), p being the target's; otherwise the token is drawn from
max(p - q, 0), normalised. Both are the distributions after temperature, min_p, top_k and top_p.

The three draws need independent noise: the draft's (`Stream.DRAFT`), that of acceptance, and the target's own for the token in its
place. The last is also that of a token without a draft, which is drawn from p: there q is 0.
"""

import jax
import jax.numpy as jnp

from jaxllm.sampling.columns import SamplingColumns
from jaxllm.sampling.noise import gumbel_RV, uniform_R
from jaxllm.sampling.sampler import logit_of, sample_greedy
from jaxllm.sampling.stages import scale, threshold

KEPT_DTYPE = jnp.float16
_LAST_RESORT = -200.0
"""Added to log p where p - q is nothing: less than any two draws of noise and any two float32 logarithms differ by."""


def as_kept(logits_RV: jax.Array) -> jax.Array:
    """A drafter's logits in the half precision that they are kept in. Drafts must be drawn from these, so that q is exact."""
    # Below the highest, so that the likely ones are near 0, where numbers are finest.
    return (logits_RV - jnp.max(logits_RV, axis=1, keepdims=True)).astype(KEPT_DTYPE)


def sample_verified(
    logits_RV: jax.Array,
    columns: SamplingColumns,
    position_R: jax.Array,
    draft_R: jax.Array,
    draft_logits_RV: jax.Array | None = None,
) -> jax.Array:
    """int32[R]: a token of each row, distributed as by `sample_random`: the draft, if it is accepted, else another one.

    draft_R: negative where there is no draft. draft_logits_RV: what drafts were drawn from, with the same columns; None: drafts are
    the only ones that the drafter could have proposed.
    """
    has_draft_R, draft_R1 = draft_R >= 0, jnp.maximum(draft_R, 0)[:, None]
    p_RV = _probabilities(logits_RV, columns, threshold(logits_RV, columns))
    if draft_logits_RV is None:
        q_RV = (jax.lax.broadcasted_iota(jnp.int32, p_RV.shape, 1) == draft_R1).astype(p_RV.dtype)
    else:
        draft_logits_RV = draft_logits_RV.astype(p_RV.dtype)
        # The kernel that drew may differ by a rounding in what top_p keeps; a draft was kept.
        drawn_R = logit_of(draft_R, scale(draft_logits_RV, columns))
        q_RV = _probabilities(draft_logits_RV, columns, jnp.minimum(threshold(draft_logits_RV, columns), drawn_R))
    q_RV = jnp.where(has_draft_R[:, None], q_RV, 0.0)
    share_R = uniform_R(columns.seed_low, columns.seed_high, position_R)
    is_accepted_R = has_draft_R & (share_R * logit_of(draft_R, q_RV) < logit_of(draft_R, p_RV))

    rest_RV, log_p_RV = p_RV - q_RV, jnp.log(p_RV)
    # Where p and q differ by roundings alone, nothing may be left of p - q.
    log_rest_RV = jnp.where(rest_RV > 0, jnp.log(rest_RV), log_p_RV + _LAST_RESORT)
    noise_RV = gumbel_RV(columns.seed_low, columns.seed_high, position_R, p_RV.shape[1])
    # A logit that is no finite number makes all probabilities NaN. As in the other draws its token is taken, and is found by that.
    is_greedy_R = (columns.temperature == 0) | jnp.isnan(p_RV[:, 0])
    token_R = sample_greedy(jnp.where(is_greedy_R[:, None], logits_RV, log_rest_RV + noise_RV))
    return jnp.where(is_accepted_R & ~is_greedy_R, draft_R, token_R)


def _probabilities(logits_RV: jax.Array, columns: SamplingColumns, threshold_R: jax.Array) -> jax.Array:
    scaled_RV = scale(logits_RV, columns)
    return jax.nn.softmax(jnp.where(scaled_RV < threshold_R[:, None], -jnp.inf, scaled_RV), axis=1)
