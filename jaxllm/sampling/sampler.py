"""Draws the next token of each row from its logits: three programs, from the plainest to the fullest (`variants.Variant`).

All are pure. Logits are float32 [R, V]; columns of -inf (padding of the vocabulary) are never drawn.
`implementation` and `interpret` are as in `pallas_kernels.sampling`, with "xla" for plain JAX, which is the truth for the others.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxllm.sampling.columns import SamplingColumns
from jaxllm.sampling.noise import Stream, gumbel_RV, key_words
from jaxllm.sampling.processors import Processor, apply_processors
from jaxllm.sampling.stages import STAGES, factor, scale, threshold
from jaxllm.sampling.state import SamplingState, gather, record
from jaxllm.scheduler_output import NO_TOKEN, NOT_FINITE
from pallas_kernels import sampling as kernels


def mark_not_finite(token_R: jax.Array, logit_R: jax.Array) -> jax.Array:
    """The tokens, NOT_FINITE where the token's own logit is not a finite number.

    NaN counts as the highest logit in every draw, so a row with one anywhere is found without another pass over the logits.
    """
    return jnp.where((token_R < 0) | jnp.isfinite(logit_R), token_R, NOT_FINITE)


def logit_of(token_R: jax.Array, logits_RV: jax.Array) -> jax.Array:
    """Each row's logit of its token; of the first one where there is no token."""
    return jnp.take_along_axis(logits_RV, jnp.maximum(token_R, 0)[:, None], axis=1)[:, 0]


def sample_greedy(logits_RV: jax.Array, *, implementation: str = "xla", interpret: bool = False) -> jax.Array:
    """int32[R]: the likeliest token of each row, the lowest id among equals; NaN counts as the highest logit."""
    if implementation != "xla":
        return kernels.argmax(logits_RV, implementation=implementation, interpret=interpret)
    # One fused pass on a GPU. On a CPU that reduction is not vectorised, the two plain ones are.
    return jax.lax.platform_dependent(logits_RV, cpu=_argmax_in_two_passes, default=_argmax)


def sample_random(
    logits_RV: jax.Array,
    columns: SamplingColumns,
    position_R: jax.Array,
    *,
    stream: Stream = Stream.TARGET,
    implementation: str = "xla",
    interpret: bool = False,
) -> jax.Array:
    """int32[R]: a token of each row, drawn after temperature, min_p, top_k and top_p; the likeliest where temperature is 0.

    `position_R` is the index in its sequence of the token being drawn: draws depend on it, the seed and the stream only.
    """
    if implementation != "xla":
        return _draw_by_kernel(logits_RV, columns, position_R, implementation, interpret, stream)
    return _draw(scale(logits_RV, columns), threshold(logits_RV, columns), columns, position_R, stream)


def sample_full(
    logits_RV: jax.Array,
    columns: SamplingColumns,
    position_R: jax.Array,
    state: SamplingState,
    row_R: jax.Array,
    processors: Sequence[Processor] = (),
    *,
    implementation: str = "xla",
    interpret: bool = False,
) -> tuple[jax.Array, SamplingState, jax.Array]:
    """As `sample_random`, after all that the requests' rows of the state ask for.

    Returns the tokens int32[R] (NO_TOKEN where every logit is -inf), the state with them added, and the logits that were drawn
    from, -inf where dropped. Rows of the batch that draw nothing in this step must have neutral columns, else their state takes in a
    token.
    """
    rows = gather(state, row_R, columns.uses_state)
    for stage in STAGES:
        logits_RV = stage(logits_RV, columns, rows, position_R)
    logits_RV = apply_processors(logits_RV, rows, position_R, processors)
    scaled_RV, threshold_R = scale(logits_RV, columns), threshold(logits_RV, columns)
    if implementation == "xla":
        token_R = _draw(scaled_RV, threshold_R, columns, position_R)
    else:
        token_R = _draw_by_kernel(logits_RV, columns, position_R, implementation, interpret)
        # The two may differ by a rounding in what top_p keeps; a drawn token was kept.
        threshold_R = jnp.minimum(threshold_R, logit_of(token_R, scaled_RV))
    token_R = jnp.where(jnp.max(logits_RV, axis=1) == -jnp.inf, NO_TOKEN, token_R)
    processed_RV = jnp.where(scaled_RV >= threshold_R[:, None], scaled_RV, -jnp.inf)
    return token_R, record(state, row_R, columns.uses_state, token_R), processed_RV


def _draw(
    logits_RV: jax.Array,
    threshold_R: jax.Array,
    columns: SamplingColumns,
    position_R: jax.Array,
    stream: Stream = Stream.TARGET,
) -> jax.Array:
    # The largest of logits plus Gumbel noise is a draw from their softmax.
    noise_RV = gumbel_RV(columns.seed_low, columns.seed_high, position_R, logits_RV.shape[1], stream)
    noisy_RV = jnp.where(columns.temperature[:, None] > 0, logits_RV + noise_RV, logits_RV)
    return sample_greedy(jnp.where(logits_RV < threshold_R[:, None], -jnp.inf, noisy_RV))  # a NaN is kept


def _draw_by_kernel(
    logits_RV: jax.Array,
    columns: SamplingColumns,
    position_R: jax.Array,
    implementation: str,
    interpret: bool,
    stream: Stream = Stream.TARGET,
) -> jax.Array:
    words_R2 = key_words(columns.seed_low, columns.seed_high, position_R, stream)
    params = kernels.DrawParams(
        is_greedy=columns.temperature == 0,
        scale=factor(columns),
        log_min_p=jnp.log(columns.min_p),
        top_k=columns.top_k,
        top_p=columns.top_p,
        word_0=words_R2[:, 0],
        word_1=words_R2[:, 1],
    )
    return kernels.draw(logits_RV, params, implementation=implementation, interpret=interpret)


def _argmax(logits_RV: jax.Array) -> jax.Array:
    return jnp.argmax(logits_RV, axis=1).astype(jnp.int32)


def _argmax_in_two_passes(logits_RV: jax.Array) -> jax.Array:
    # A CPU's maximum of many values passes over NaN.
    logits_RV = jnp.where(jnp.isnan(logits_RV), jnp.inf, logits_RV)
    highest_R1 = jnp.max(logits_RV, axis=1, keepdims=True)
    token_RV = jax.lax.broadcasted_iota(jnp.int32, logits_RV.shape, 1)
    return jnp.min(jnp.where(logits_RV == highest_R1, token_RV, logits_RV.shape[1]), axis=1)
