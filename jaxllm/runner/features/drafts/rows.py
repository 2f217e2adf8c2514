"""Arrays of drafts by row on the device, and which of the drafts are right."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxllm.runner.drafter import NO_DRAFT
from jaxllm.runner.layout import FROM_ROW, Column
from jaxllm.runner.places import Places
from jaxllm.runner.row_arrays import RowArrays


class DraftRows(NamedTuple):
    """Arrays by row, as of `RowArrays`."""

    num_computed_N: jax.Array
    """Tokens of the row that are computed, all of them right."""
    draft_NK: jax.Array
    """The tokens expected behind the last one; NO_DRAFT where none is."""
    drawn_NW: jax.Array
    """The tokens that the latest step which sampled added to the row, NO_DRAFT behind them."""
    state: Any
    """The drafter's own arrays."""
    logits_NKV: jax.Array | None = None
    """Logits that each draft was sampled from, as of `rejection.as_kept`; whole on every device. See `kept_logits`."""


def drafts_of(rows: RowArrays) -> DraftRows:
    """The arrays of drafts among those of rows."""
    return rows.of_features["drafts"]  # type: ignore[no-any-return]


def drafts_of_draws(drafts: DraftRows, columns_RC: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
    """int32[R * width] each: the draft in the place of each draw of each row, NO_DRAFT where none is, and its index among the drafts
    of all rows."""
    most, index_W = drafts.draft_NK.shape[1], jnp.arange(width)
    row_R1, place_W = columns_RC[:, Column.ROW, None], jnp.minimum(index_W, most - 1)
    draft_RW = jnp.where(index_W < columns_RC[:, Column.NUM_DRAFTS, None], drafts.draft_NK[row_R1, place_W], NO_DRAFT)
    return draft_RW.reshape(-1), (row_R1 * most + place_W).reshape(-1)


def resolve_starts(drafts: DraftRows, columns_RC: jax.Array) -> jax.Array:
    """The rows' columns with the positions that only the device knows."""
    start_R = columns_RC[:, Column.START]
    known_R = drafts.num_computed_N[columns_RC[:, Column.ROW]]
    return columns_RC.at[:, Column.START].set(jnp.where(start_R == FROM_ROW, known_R, start_R))


def latest_and_drafts(drafts: DraftRows, last_token_N: jax.Array, places: Places) -> jax.Array:
    """int32[T]: the latest token of each token's row, then the row's drafts."""
    token_T = last_token_N[places.row_T]
    draft_T = drafts.draft_NK[places.row_T, jnp.clip(places.offset_T - 1, 0, drafts.draft_NK.shape[1] - 1)]
    return jnp.where(places.offset_T == 0, token_T, jnp.maximum(draft_T, 0))


def note_computed(drafts: DraftRows, columns_RC: jax.Array) -> DraftRows:
    """Count the tokens of a step as computed, for rows that sample nothing; `accept` corrects the others."""
    end_R = columns_RC[:, Column.START] + columns_RC[:, Column.NUM_TOKENS]
    return drafts._replace(num_computed_N=drafts.num_computed_N.at[columns_RC[:, Column.ROW]].set(end_R))


def continues(
    drafts: DraftRows, columns_RC: jax.Array, index: int, token_R: jax.Array, is_alive_R: jax.Array | None
) -> jax.Array:
    """Whether the draw behind this one, the row's `index`-th, counts: its input, the draft, equals the token drawn here."""
    draft_R = drafts.draft_NK[columns_RC[:, Column.ROW], index]
    equals_R = (draft_R == token_R) & (index < columns_RC[:, Column.NUM_DRAFTS])
    return equals_R if is_alive_R is None else equals_R & is_alive_R


def forget_drafts(drafts: DraftRows, columns_RC: jax.Array) -> DraftRows:
    """After a step that the drafter is not shown: its drafts were for other positions, or even for an earlier request in the row."""
    return drafts._replace(draft_NK=drafts.draft_NK.at[columns_RC[:, Column.TOKEN_ROW]].set(NO_DRAFT))


def set_drafts(rows: RowArrays, draft_RX: jax.Array) -> RowArrays:
    """Replace the drafts of some rows. draft_RX: row, the last token for which the drafts are, then the drafts, NO_DRAFT behind them. Rows
    whose last token is another have none afterwards; padding names the last row."""
    row_R, drafts = draft_RX[:, 0], drafts_of(rows)
    is_expected_R1 = (rows.last_token_N[row_R] == draft_RX[:, 1])[:, None]
    draft_NK = drafts.draft_NK.at[row_R].set(jnp.where(is_expected_R1, draft_RX[:, 2:], NO_DRAFT))
    return rows.replaced(drafts=drafts._replace(draft_NK=draft_NK))


def accept(
    drafts: DraftRows, columns_RC: jax.Array, token_RW: jax.Array, synthetic_rates: Sequence[float] = ()
) -> tuple[DraftRows, jax.Array, jax.Array]:
    """Compare drafts with the tokens that were drawn where they stand. Returns the new rows, the last token of each row that counts,
    and for the host int32[R, W + 1]: the tokens that count, NO_DRAFT behind them, then the number of drafts there were.

    synthetic_rates: if not empty, by place how often a draft counts whose predecessors do, whatever it is.
    """
    num_rows, width = token_RW.shape
    index_W = jnp.arange(width)
    row_R, target_R = columns_RC[:, Column.ROW], columns_RC[:, Column.TOKEN_ROW]
    num_drafts_R1 = columns_RC[:, Column.NUM_DRAFTS, None]
    draft_RK = jnp.where(index_W[:-1] < num_drafts_R1, drafts.draft_NK[row_R, : width - 1], NO_DRAFT)
    is_right_RK = draft_RK == token_RW[:, :-1]
    if synthetic_rates:
        position_RK = columns_RC[:, Column.START, None] + index_W[:-1]
        key_RK = jax.vmap(jax.vmap(jax.random.key))(position_RK * drafts.draft_NK.shape[0] + row_R[:, None])
        is_right_RK = jax.vmap(jax.vmap(jax.random.uniform))(key_RK) < jnp.asarray(synthetic_rates)[: width - 1]
        is_right_RK &= index_W[:-1] < num_drafts_R1
    num_right_R = jnp.sum(jnp.cumprod(is_right_RK.astype(jnp.int32), axis=1), axis=1)
    drawn_RW = jnp.where(index_W <= num_right_R[:, None], token_RW, NO_DRAFT)
    last_R = jnp.take_along_axis(token_RW, num_right_R[:, None], axis=1)[:, 0]
    num_computed_R = columns_RC[:, Column.START] + columns_RC[:, Column.NUM_TOKENS] - num_drafts_R1[:, 0] + num_right_R
    most = drafts.drawn_NW.shape[1]
    kept_RW = jnp.pad(drawn_RW, ((0, 0), (0, most - width)), constant_values=NO_DRAFT)
    new = drafts._replace(
        num_computed_N=drafts.num_computed_N.at[target_R].set(num_computed_R),
        drawn_NW=drafts.drawn_NW.at[target_R].set(kept_RW),
    )
    num_found_R1 = jnp.sum(draft_RK != NO_DRAFT, axis=1, keepdims=True, dtype=jnp.int32)
    if synthetic_rates:
        num_found_R1 = num_drafts_R1
    return new, last_R, jnp.concatenate([drawn_RW, num_found_R1], axis=1)
