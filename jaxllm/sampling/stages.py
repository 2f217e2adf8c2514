"""The stages of sampling, each a small pure function, and their order.

`STAGES` turn the model's logits into those that temperature applies to; custom processors follow them. `FILTERS` then
raise, row by row, the value below which tokens are dropped: a filter is a threshold, never a separate mask, so the
draw reads the logits once and nothing of size [R, V] is written for it.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp

from jaxllm.sampling.columns import SamplingColumns
from jaxllm.sampling.mask import apply_mask
from jaxllm.sampling.state import SamplingState
from jaxllm.sampling.threshold import top_k_threshold, top_p_threshold
from jaxllm.sampling.variants import StateUse

Stage = Callable[[jax.Array, SamplingColumns, SamplingState, jax.Array], jax.Array]
"""(logits_RV, columns, the batch's rows of the state, position_R) -> logits_RV"""
Filter = Callable[[jax.Array, SamplingColumns, jax.Array], jax.Array]
"""(logits_RV after temperature, columns, threshold_R) -> threshold_R; logits ≥ threshold are kept"""


def add_bias(logits_RV: jax.Array, columns: SamplingColumns, rows: SamplingState, position_R: jax.Array) -> jax.Array:
    """logit_bias and allowed_token_ids."""
    return logits_RV + rows.bias


def mask_early_stops(logits_RV: jax.Array, columns: SamplingColumns, rows: SamplingState, position_R: jax.Array) -> jax.Array:
    """Forbid EOS and stop tokens before min_tokens, unless that leaves a row nothing to draw."""
    early_R = position_R - rows.num_prompt_tokens < columns.min_tokens
    masked_RV = jnp.where(early_R[:, None] & rows.ends_request, -jnp.inf, logits_RV)
    nothing_left_R1 = jnp.max(masked_RV, axis=1, keepdims=True) == -jnp.inf
    return jnp.where(nothing_left_R1, logits_RV, masked_RV)


def penalize_repetition(
    logits_RV: jax.Array, columns: SamplingColumns, rows: SamplingState, position_R: jax.Array
) -> jax.Array:
    """Divide positive and multiply negative logits of tokens in the prompt or the output."""
    penalty_R1 = columns.repetition_penalty[:, None]
    weakened_RV = jnp.where(logits_RV > 0, logits_RV / penalty_R1, logits_RV * penalty_R1)
    return jnp.where(rows.in_prompt | (rows.output_count > 0), weakened_RV, logits_RV)


def penalize_frequency_and_presence(
    logits_RV: jax.Array, columns: SamplingColumns, rows: SamplingState, position_R: jax.Array
) -> jax.Array:
    """Subtract from the logits of tokens in the output: per occurrence, and once."""
    count_RV = rows.output_count
    by_frequency_RV = columns.frequency_penalty[:, None] * count_RV.astype(jnp.float32)
    return logits_RV - by_frequency_RV - jnp.where(count_RV > 0, columns.presence_penalty[:, None], 0.0)


def mask_bad_words(logits_RV: jax.Array, columns: SamplingColumns, rows: SamplingState, position_R: jax.Array) -> jax.Array:
    """Forbid the last token of each bad word whose other tokens are the end of the output."""
    beginning_RBM, last_RB = rows.bad_words[:, :, :-1], rows.bad_words[:, :, -1]
    matches_RBM = (beginning_RBM == -1) | (beginning_RBM == rows.recent[:, None, :])
    completes_RB = jnp.all(matches_RBM, axis=2) & (last_RB >= 0)

    def mask(logits_RV: jax.Array) -> jax.Array:
        num_rows, vocab_size = logits_RV.shape
        forbidden_RB = jnp.where(completes_RB, last_RB, vocab_size)  # out of range: dropped
        return logits_RV.at[jnp.arange(num_rows)[:, None], forbidden_RB].set(-jnp.inf, mode="drop")

    return jax.lax.cond(jnp.any(completes_RB), mask, lambda logits: logits, logits_RV)


def mask_below_sigmas(logits_RV: jax.Array, columns: SamplingColumns, rows: SamplingState, position_R: jax.Array) -> jax.Array:
    """Forbid tokens whose logit is more than top_n_sigma standard deviations below the highest.

    Forbidden tokens and the vocabulary's padding, which are -inf, count neither in the mean nor in the deviation.
    """

    def mask(logits_RV: jax.Array) -> jax.Array:
        counts_RV = logits_RV > -jnp.inf
        deviation_R1 = jnp.std(logits_RV, axis=1, keepdims=True, where=counts_RV)
        lowest_R1 = jnp.max(logits_RV, axis=1, keepdims=True) - columns.top_n_sigma[:, None] * deviation_R1
        # A NaN is kept, and so is the rest of its row: the row is reported as not finite.
        return jnp.where((columns.top_n_sigma[:, None] > 0) & (logits_RV < lowest_R1), -jnp.inf, logits_RV)

    return jax.lax.cond(jnp.any(columns.top_n_sigma > 0), mask, lambda logits: logits, logits_RV)


PENALTIES: tuple[Stage, ...] = (penalize_repetition, penalize_frequency_and_presence)
STAGES: tuple[Stage, ...] = (add_bias, mask_early_stops, *PENALTIES, mask_bad_words, mask_below_sigmas)


def wants_all_stages(columns: SamplingColumns) -> jax.Array:
    """bool: whether a row asks for more than penalties."""
    return jnp.any((columns.uses_state == StateUse.ALL) | (columns.top_n_sigma > 0))


def run_stages(
    stages: Sequence[Stage],
    logits_RV: jax.Array,
    mask_RW: jax.Array | None,
    columns: SamplingColumns,
    position_R: jax.Array,
    rows: SamplingState,
) -> jax.Array:
    """The model's logits after the mask and some stages."""
    if mask_RW is not None:
        logits_RV = apply_mask(logits_RV, mask_RW)
    for stage in stages:
        logits_RV = stage(logits_RV, columns, rows, position_R)
    return logits_RV


def scale(logits_RV: jax.Array, columns: SamplingColumns) -> jax.Array:
    """Divide by the temperature; greedy rows stay."""
    return logits_RV * factor(columns)[:, None]


def factor(columns: SamplingColumns) -> jax.Array:
    """float32[R]: what `scale` multiplies by."""
    return 1 / jnp.where(columns.temperature > 0, columns.temperature, 1.0)


def filter_min_p(logits_RV: jax.Array, columns: SamplingColumns, threshold_R: jax.Array) -> jax.Array:
    """Keep tokens at least min_p times as likely as the likeliest."""
    return jnp.maximum(threshold_R, jnp.max(logits_RV, axis=1) + jnp.log(columns.min_p))


def filter_top_k(logits_RV: jax.Array, columns: SamplingColumns, threshold_R: jax.Array) -> jax.Array:
    """Keep the top_k likeliest tokens and those tied with the last of them."""
    vocab_size = logits_RV.shape[1]
    wanted_R = (columns.top_k > 0) & (columns.top_k < vocab_size)
    found_R = top_k_threshold(logits_RV, jnp.where(wanted_R, columns.top_k, 1))
    return jnp.where(wanted_R, jnp.maximum(threshold_R, found_R), threshold_R)


def filter_top_p(logits_RV: jax.Array, columns: SamplingColumns, threshold_R: jax.Array) -> jax.Array:
    """Keep the likeliest tokens, among those kept so far, that together reach top_p, and those tied with the last of them."""
    found_R = top_p_threshold(logits_RV, columns.top_p, threshold_R)
    return jnp.where(columns.top_p < 1, jnp.maximum(threshold_R, found_R), threshold_R)


FILTERS: tuple[tuple[Callable[[SamplingColumns], jax.Array], Filter], ...] = (
    (lambda columns: columns.min_p > 0, filter_min_p),
    (lambda columns: columns.top_k > 0, filter_top_k),
    (lambda columns: columns.top_p < 1, filter_top_p),
)
"""Whether a row uses a filter, and the filter; a filter that no row uses is not computed."""


def threshold(logits_RV: jax.Array, columns: SamplingColumns) -> jax.Array:
    """float32[R]: the value that logits, scaled, must reach to pass all filters; -inf where there is none."""

    def search(threshold_R: jax.Array) -> jax.Array:
        scaled_RV = scale(logits_RV, columns)  # computed here, so that it is not written to memory if no row uses a filter
        for wants, filter_ in FILTERS:
            threshold_R = jax.lax.cond(
                jnp.any(wants(columns)), partial(filter_, scaled_RV, columns), lambda unchanged: unchanged, threshold_R
            )
        return threshold_R

    wanted = jnp.any(jnp.stack([wants(columns) for wants, _ in FILTERS]))
    return jax.lax.cond(wanted, search, lambda unchanged: unchanged, jnp.full(logits_RV.shape[0], -jnp.inf))
