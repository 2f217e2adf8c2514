"""Where the tokens of a step are: their rows, positions and slots in the cache."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxllm.cache_spec import CacheLayout, LayerPlace
from jaxllm.kernel_policy import ALIKE, KernelPolicy
from jaxllm.layers.mlp import multiply_gated
from jaxllm.layers.row_states import Spans, StateRows
from jaxllm.layers.step import (
    Step,
    call_layer,
    choose_experts,
    compute_experts,
    delta_decode,
    gated_delta,
    router_scores,
    state_space,
)
from jaxllm.parallel.exchange import RankExchange
from jaxllm.parallel.shards import Shards
from jaxllm.runner.kernels import Kernels
from jaxllm.runner.layout import FROM_ROW, Column
from jaxllm.runner.paged_context import GroupTable, PagedContext
from jaxllm.runner.shared_layers import SharedLayers


class Places(NamedTuple):
    """The tokens of a step, each in a row; the tokens of a row are consecutive."""

    row_T: jax.Array
    """Each token's row in the arrays of all rows; that of padding may be any."""
    owner_T: jax.Array
    """Its row among those of the step."""
    offset_T: jax.Array
    """Its index in that row's part of the step."""
    position_T: jax.Array
    is_real_T: jax.Array
    tables: tuple[GroupTable, ...]
    """By group of layers."""
    query_start_R1: jax.Array
    kv_length_R: jax.Array
    rows: StateRows
    num_queries: int | None
    """Tokens of each row, in a step where every row has as many; None: any mix."""


def locate(block_table_NB: jax.Array, columns_RC: jax.Array, num_tokens: int, cache: CacheLayout) -> Places:
    """The places of a ragged step's tokens."""
    start_R, count_R = columns_RC[:, Column.START], columns_RC[:, Column.NUM_TOKENS]
    query_start_R1 = jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(count_R, dtype=jnp.int32)])
    index_T = jnp.arange(num_tokens, dtype=jnp.int32)
    # Comparing with every row is one kernel; a binary search would be a loop, which a CUDA graph cannot contain.
    owner_T = jnp.searchsorted(query_start_R1, index_T, side="right", method="compare_all").astype(jnp.int32) - 1
    is_real_T = index_T < query_start_R1[-1]
    owner_T = jnp.where(is_real_T, owner_T, 0)
    offset_T = index_T - query_start_R1[owner_T]
    position_T = jnp.where(is_real_T, start_R[owner_T] + offset_T, 0)
    page_tables = _by_group(block_table_NB[columns_RC[:, Column.ROW]], cache)
    pages = [page_table_RB[owner_T, position_T // cache.block_size] for page_table_RB in page_tables]
    is_written_T = is_real_T & (position_T >= columns_RC[owner_T, Column.WRITE_FROM])
    return Places(
        row_T=columns_RC[owner_T, Column.ROW],
        owner_T=owner_T,
        offset_T=offset_T,
        position_T=position_T,
        is_real_T=is_real_T,
        tables=_group_tables(page_tables, pages, position_T, is_written_T, cache),
        query_start_R1=query_start_R1,
        kv_length_R=jnp.where(count_R > 0, start_R + count_R, 0),
        rows=StateRows(columns_RC[:, Column.ROW], start_R == 0, query_start_R1, _spans(columns_RC, cache)),
        num_queries=None,
    )


def locate_decode(block_table_NB: jax.Array, columns_RC: jax.Array, width: int, cache: CacheLayout) -> Places:
    """`Places` of a step in which row i has the tokens width * i … width * i + width - 1, of which the first NUM_TOKENS are real.

    Those that are not real are written as far as the row's last page reaches, and attention reads that page in place of later ones: it
    reads the keys of W tokens, some with a weight of 0, which makes NaN of NaN that another request may have left.
    """
    num_rows = columns_RC.shape[0]
    index_T = jnp.arange(num_rows * width, dtype=jnp.int32)
    owner_T, offset_T = index_T // width, index_T % width
    start_R, count_R, row_R = columns_RC[:, Column.START], columns_RC[:, Column.NUM_TOKENS], columns_RC[:, Column.ROW]
    columns_TC = columns_RC if width == 1 else columns_RC[owner_T]
    position_T = columns_TC[:, Column.START] + offset_T
    is_real_T = offset_T < columns_TC[:, Column.NUM_TOKENS]
    page_tables, is_in_page_T = _by_group(block_table_NB[row_R], cache), is_real_T
    if width > 1:
        last_R = jnp.maximum(start_R + count_R - 1, 0) // cache.block_size
        page_tables = _up_to(last_R, page_tables, width, cache)
        is_in_page_T = (position_T // cache.block_size <= last_R[owner_T]) & (count_R > 0)[owner_T]
    pages = [page_table_RB[owner_T, position_T // cache.block_size] for page_table_RB in page_tables]
    is_written_T = is_in_page_T & (position_T >= columns_TC[:, Column.WRITE_FROM])
    places = Places(
        row_T=columns_TC[:, Column.ROW],
        owner_T=owner_T,
        offset_T=offset_T,
        position_T=position_T,
        is_real_T=is_real_T,
        tables=_group_tables(page_tables, pages, position_T, is_written_T, cache),
        query_start_R1=jnp.arange(num_rows + 1, dtype=jnp.int32) * width,
        kv_length_R=jnp.where(count_R > 0, start_R + width, 0),
        rows=StateRows(row_R, start_R == 0, None, _spans(columns_RC, cache)),
        num_queries=width,
    )
    if width == 1 or places.rows.spans is None:
        return places
    spans = places.rows.spans._replace(has_drafts_R=None)
    return places._replace(rows=places.rows._replace(query_start_R1=places.query_start_R1, spans=spans))


def _spans(columns_RC: jax.Array, cache: CacheLayout) -> Spans | None:
    """The tokens of each row, for states that take back drafts; None: there are none."""
    if not cache.keeps_inputs:
        return None
    start_R = columns_RC[:, Column.START]
    return Spans(start_R, start_R + columns_RC[:, Column.NUM_TOKENS], columns_RC[:, Column.NUM_DRAFTS] > 0)


def at_positions(
    block_table_NB: jax.Array, row_R: jax.Array, position_R: jax.Array, limit_R: jax.Array, cache: CacheLayout
) -> Places:
    """One token for each row at any position; those from `limit_R` on, behind the blocks of the row, are not written."""
    num_rows = row_R.shape[0]
    is_real_R = position_R < limit_R
    page_tables = _by_group(block_table_NB[row_R], cache)
    index_R = jnp.arange(num_rows, dtype=jnp.int32)
    pages = [page_table_RB[index_R, position_R // cache.block_size] for page_table_RB in page_tables]
    return Places(
        row_T=row_R,
        owner_T=index_R,
        offset_T=jnp.zeros(num_rows, jnp.int32),
        position_T=position_R,
        is_real_T=is_real_R,
        tables=_group_tables(page_tables, pages, position_R, is_real_R, cache),
        query_start_R1=jnp.arange(num_rows + 1, dtype=jnp.int32),
        kv_length_R=jnp.where(is_real_R, position_R + 1, 0),
        rows=StateRows(row_R, position_R == 0, None),
        num_queries=1,
    )


def runs_at(
    block_table_NB: jax.Array, row_R: jax.Array, position_R: jax.Array, limit_R: jax.Array, width: int, cache: CacheLayout
) -> Places:
    """A run of `width` tokens for each row from any position on; those from `limit_R` on, behind the blocks of the row, are not written,
    and attention reads the last of these blocks in place of others."""
    num_rows = row_R.shape[0]
    index_T = jnp.arange(num_rows * width, dtype=jnp.int32)
    owner_T, offset_T = index_T // width, index_T % width
    position_T = position_R[owner_T] + offset_T
    is_real_T = position_T < limit_R[owner_T]
    last_R = jnp.maximum(limit_R - 1, 0) // cache.block_size
    page_tables = _up_to(last_R, _by_group(block_table_NB[row_R], cache), width, cache)
    pages = [page_table_RB[owner_T, position_T // cache.block_size] for page_table_RB in page_tables]
    return Places(
        row_T=row_R[owner_T],
        owner_T=owner_T,
        offset_T=offset_T,
        position_T=position_T,
        is_real_T=is_real_T,
        tables=_group_tables(page_tables, pages, position_T, is_real_T, cache),
        query_start_R1=jnp.arange(num_rows + 1, dtype=jnp.int32) * width,
        kv_length_R=jnp.where(position_R < limit_R, position_R + width, 0),
        rows=StateRows(row_R, position_R == 0, None),
        num_queries=width,
    )


def lagging(places: Places, block_table_NB: jax.Array, columns_RC: jax.Array, lag: int, cache: CacheLayout) -> Places:
    """The places of a step's tokens at positions less by `lag`, of rows that begin at a lower one from 0 on."""
    columns_RC = columns_RC.at[:, Column.START].add(-jnp.minimum(columns_RC[:, Column.START], lag))
    if places.num_queries is None:
        return locate(block_table_NB, columns_RC, len(places.position_T), cache)
    return locate_decode(block_table_NB, columns_RC, places.num_queries, cache)


def latest_or_known(latest_T: jax.Array, known_T: jax.Array) -> jax.Array:
    """The ids of a step's tokens: those that the host knows, and in place of FROM_ROW what rows have."""
    return jnp.where(known_T == FROM_ROW, latest_T, known_T)


def first_of_each(known_R: jax.Array, width: int) -> jax.Array:
    """Ids that the host knows, of the first token of each row, for all tokens: FROM_ROW for the others."""
    others_RW = jnp.full((known_R.shape[0], width - 1), FROM_ROW, known_R.dtype)
    return jnp.concatenate([known_R[:, None], others_RW], axis=1).reshape(-1)


def next_position(columns_RC: jax.Array) -> jax.Array:
    """int32[R]: the position behind the tokens of each row."""
    return columns_RC[:, Column.START] + columns_RC[:, Column.NUM_TOKENS]


def each_draw(columns_RC: jax.Array, width: int) -> jax.Array:
    """The columns of each draw of each row, as of rows that compute one token; with width 1 the columns as they are."""
    if width == 1:
        return columns_RC
    num_rows = columns_RC.shape[0]
    count_R, drafts_R = columns_RC[:, Column.NUM_TOKENS], columns_RC[:, Column.NUM_DRAFTS]
    first_R = columns_RC[:, Column.START] + count_R - 1 - drafts_R
    start_T = (first_R[:, None] + jnp.arange(width)).reshape(-1)
    columns_TC = jnp.repeat(columns_RC, width, axis=0, total_repeat_length=num_rows * width)
    return columns_TC.at[:, Column.START].set(start_T).at[:, Column.NUM_TOKENS].set(1)


def make_step(
    caches: list[jax.Array],
    token_ids_T: jax.Array,
    places: Places,
    layers: Sequence[LayerPlace],
    kernels: Kernels,
    shards: Shards,
    entering_TD: jax.Array | None = None,
    exchange: RankExchange | None = None,
    share_layers: bool = False,
    policy: KernelPolicy = ALIKE,
) -> Step:
    """The `Step` that a model with these layers runs on. It replaces the arrays in `caches`.

    exchange: between data-parallel ranks. share_layers: whether layers that are alike become calls of one function."""
    context = PagedContext(
        caches=caches,
        places=layers,
        tables=places.tables,
        query_start_R1=places.query_start_R1,
        kv_length_R=places.kv_length_R,
        rows=places.rows,
        num_queries=places.num_queries,
        kernels=kernels,
    )
    return Step(
        token_ids_T,
        places.position_T,
        context,
        shards,
        places.is_real_T,
        router_scores=None
        if kernels.router_scores == "xla"
        else partial(router_scores, implementation=kernels.router_scores, interpret=kernels.interpret),
        choose_experts=partial(choose_experts, implementation=kernels.expert_choice, interpret=kernels.interpret),
        experts=partial(compute_experts, implementation=kernels.grouped_matmul, interpret=kernels.interpret),
        attend_to_latents=context.attend_to_latents,
        states=context,
        gated_delta=partial(gated_delta, implementation=kernels.gated_delta, interpret=kernels.interpret),
        delta_decode=None
        if kernels.delta_decode == "xla"
        else partial(delta_decode, implementation=kernels.delta_decode, interpret=kernels.interpret),
        state_space=partial(state_space, implementation=kernels.state_space, interpret=kernels.interpret),
        multiply=kernels.multiply,
        multiply_gated=None
        if kernels.gated_matmul == "xla"
        else partial(multiply_gated, implementation=kernels.gated_matmul, interpret=kernels.interpret),
        entering_TD=entering_TD,
        exchange=exchange,
        call_layer=SharedLayers(context) if share_layers else call_layer,
        policy=policy,
        quantization=None
        if kernels.quantize in ("", "xla")
        else {"implementation": kernels.quantize, "interpret": kernels.interpret},
    )


def _by_group(block_table_RB: jax.Array, cache: CacheLayout) -> list[jax.Array]:
    """Cut block tables into those of the groups.

    One may begin with blocks that the request has freed meanwhile, and end with those of an earlier request of its row: attention
    reads neither.
    """
    num_groups = len(cache.groups)
    return jnp.split(block_table_RB, num_groups, axis=1) if num_groups > 1 else [block_table_RB]


def _up_to(last_R: jax.Array, page_tables: list[jax.Array], width: int, cache: CacheLayout) -> list[jax.Array]:
    """Block tables with the last page that each row may read in place of later ones, and of those behind the table that a run of `width`
    tokens may reach."""
    extra = -(-(width - 1) // cache.block_size)
    index_RB = jnp.minimum(jnp.arange(page_tables[0].shape[1] + extra), last_R[:, None])
    return [jnp.take_along_axis(page_table_RB, index_RB, axis=1) for page_table_RB in page_tables]


def _group_tables(
    page_tables: list[jax.Array], pages: list[jax.Array], position_T: jax.Array, is_written_T: jax.Array, cache: CacheLayout
) -> tuple[GroupTable, ...]:
    """The page tables of the groups, with the slots of tokens that lie in these pages."""
    slots = (jnp.where(is_written_T, page_T * cache.block_size + position_T % cache.block_size, -1) for page_T in pages)
    return tuple(map(GroupTable, page_tables, slots))
