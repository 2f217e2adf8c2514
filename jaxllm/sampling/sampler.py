"""Draws the next token of each row from its logits: three programs, from the plainest to the fullest (`variants.Variant`).

All are pure. Logits are float32 [R, V]; columns of -inf (padding of the vocabulary) are never drawn.
`implementation` and `interpret` are as in `pallas_kernels.sampling`, with "xla" for plain JAX, which is the truth for the others.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp

from jaxllm.sampling.columns import SamplingColumns
from jaxllm.sampling.mask import num_words
from jaxllm.sampling.noise import Stream, gumbel_RV, key_words
from jaxllm.sampling.processors import Processor, apply_processors
from jaxllm.sampling.stages import PENALTIES, STAGES, Stage, factor, run_stages, scale, threshold, wants_all_stages
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
    mask_RW: jax.Array | None = None,
    implementation: str = "xla",
    interpret: bool = False,
) -> tuple[jax.Array, SamplingState, jax.Array]:
    """As `sample_random`, of the tokens that the mask allows, after all that the requests' rows of the state ask for.

    Returns the tokens int32[R] (NO_TOKEN where every logit is -inf), the state with them added, and the logits that were drawn
    from, -inf where dropped. Rows of the batch that draw nothing in this step must have neutral columns, else a token is
    added to their state.
    """

    def after(stages: Sequence[Stage], processors: Sequence[Processor] = ()) -> jax.Array:
        rows = gather(state, row_R, columns.uses_state)  # here, so that it is done where it is needed
        staged_RV = run_stages(stages, logits_RV, mask_RW, columns, position_R, rows)
        return apply_processors(staged_RV, rows, position_R, processors)

    penalized, processed = partial(after, PENALTIES), partial(after, STAGES, processors)

    def penalized_draw() -> tuple[jax.Array, jax.Array]:
        adjustments = _penalties(logits_RV, mask_RW, columns, state, row_R)
        token_R = _draw_by_kernel(logits_RV, columns, position_R, implementation, interpret, adjustments=adjustments)
        return token_R, logit_of(token_R, penalized())

    def processed_draw() -> tuple[jax.Array, jax.Array]:
        logits_RV = processed()
        token_R = _draw_by_kernel(logits_RV, columns, position_R, implementation, interpret)
        return token_R, logit_of(token_R, logits_RV)

    wants_all = wants_all_stages(columns)
    # Beside a kernel these are not computed unless the caller uses them.
    processed_RV = jax.lax.cond(wants_all, processed, penalized)
    scaled_RV, threshold_R = scale(processed_RV, columns), threshold(processed_RV, columns)
    if implementation == "xla":
        token_R = _draw(scaled_RV, threshold_R, columns, position_R)
        logit_R = logit_of(token_R, processed_RV)
    else:
        token_R, logit_R = jax.lax.cond(wants_all, processed_draw, penalized_draw)
        # The two may differ by a rounding in what top_p keeps; a drawn token was kept.
        threshold_R = jnp.minimum(threshold_R, logit_of(token_R, scaled_RV))
    # The likeliest token is always kept, so one of -inf is drawn only where all are -inf.
    token_R = jnp.where(logit_R == -jnp.inf, NO_TOKEN, token_R)
    kept_RV = jnp.where(scaled_RV >= threshold_R[:, None], scaled_RV, -jnp.inf)
    return token_R, record(state, row_R, columns.uses_state, token_R), kept_RV


def _penalties(
    logits_RV: jax.Array, mask_RW: jax.Array | None, columns: SamplingColumns, state: SamplingState, row_R: jax.Array
) -> kernels.Adjustments:
    """The mask and `stages.PENALTIES` for a kernel that adds them as it reads the logits."""
    num_rows, vocab_size = logits_RV.shape
    return kernels.Adjustments(
        mask_RW=jnp.full((num_rows, num_words(vocab_size)), -1, jnp.int32) if mask_RW is None else mask_RW,
        words_NV=state.tokens,
        word_row=jnp.where(columns.uses_state != 0, row_R, -1).astype(jnp.int32),
        repetition=columns.repetition_penalty,
        frequency=columns.frequency_penalty,
        presence=columns.presence_penalty,
    )


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
    adjustments: kernels.Adjustments | None = None,
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
    return kernels.draw(logits_RV, params, adjustments, implementation=implementation, interpret=interpret)


def _argmax(logits_RV: jax.Array) -> jax.Array:
    return jnp.argmax(logits_RV, axis=1).astype(jnp.int32)


def _argmax_in_two_passes(logits_RV: jax.Array) -> jax.Array:
    # A CPU's maximum of many values passes over NaN.
    logits_RV = jnp.where(jnp.isnan(logits_RV), jnp.inf, logits_RV)
    highest_R1 = jnp.max(logits_RV, axis=1, keepdims=True)
    token_RV = jax.lax.broadcasted_iota(jnp.int32, logits_RV.shape, 1)
    return jnp.min(jnp.where(logits_RV == highest_R1, token_RV, logits_RV.shape[1]), axis=1)
