"""The compiled step: stateless functions from weights, caches, rows and a step's buffer to new caches, rows and tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxllm.cache_spec import CacheLayout
from jaxllm.layers.row_states import StateRows
from jaxllm.layers.step import Step, choose_experts, compute_experts, gated_delta
from jaxllm.parallel.shards import PEERS_LOST, Shards
from jaxllm.runner.kernels import Kernels
from jaxllm.runner.layout import FROM_ROW, Column, StepLayout, StepViews
from jaxllm.runner.paged_context import GroupTable, PagedContext
from jaxllm.runner.rows import LogprobsKind
from jaxllm.sampling.columns import unpack_columns
from jaxllm.sampling.logprobs import named_logprobs, top_logprobs
from jaxllm.sampling.mask import apply_mask
from jaxllm.sampling.sampler import logit_of, mark_not_finite, sample_full, sample_greedy, sample_random
from jaxllm.sampling.state import SamplingState
from jaxllm.sampling.variants import Variant

Params = tuple[jax.Array, ...]
Caches = tuple[jax.Array, ...]


class RowArrays(NamedTuple):
    """The device's state of every running request, one per row. The last row is a trash row."""

    last_token_N: jax.Array
    block_table_NB: jax.Array
    """The block tables of all groups of layers, side by side."""


class Tokens(NamedTuple):
    """The tokens of a step with their rows, positions and places in the cache."""

    token_ids_T: jax.Array
    position_T: jax.Array
    is_real_T: jax.Array
    tables: tuple[GroupTable, ...]
    """By group of layers."""
    query_start_R1: jax.Array
    kv_length_R: jax.Array
    rows: StateRows


class Logprobs(NamedTuple):
    """Top logprobs of R tokens; column 0 is the token itself."""

    token_ids_R1k: jax.Array
    logprobs_R1k: jax.Array
    rank_R: jax.Array


class Scores(NamedTuple):
    """Logprobs of a step's sampled tokens, as far as requested."""

    top: Logprobs | None
    named: Logprobs | None


@dataclass(frozen=True)
class StepFunctions:
    """The programs of one engine, as functions to compile. Everything here is static.

    With several devices each function runs inside one `shard_map`: weights, caches and logits are this device's shards,
    everything else is replicated.
    """

    merge: Callable[[Params], Any]
    """Weights -> model."""
    shards: Shards
    cache: CacheLayout
    max_rows: int
    kernels: Kernels
    num_logprobs: int
    """Number of likeliest tokens reported beside the sampled one."""
    logprobs_mode: str
    processors: tuple[Any, ...] = ()

    def forward(
        self,
        layout: StepLayout,
        params: Params,
        caches: Caches,
        rows: RowArrays,
        buffer: jax.Array,
        workspace: jax.Array | None,
    ) -> tuple[Caches, RowArrays, jax.Array, jax.Array, jax.Array]:
        """Run the model over a mixed step. Returns caches, rows, hidden_TD, and for sampling hidden_ND and columns_NC (N = max_rows)."""
        shards = self.shards.through(workspace)
        views = layout.views(shards.of_first(buffer))
        rows = _update_block_table(rows, views)
        tokens = _locate_tokens(rows, views, self.cache)
        hidden_TD, caches = self._run_model(params, caches, tokens, shards, is_decode=False)
        hidden_TD = shards.check(hidden_TD, jnp.nan)
        last_R = jnp.maximum(tokens.query_start_R1[1:] - 1, 0)
        pad = self.max_rows - layout.num_rows
        hidden_ND = jnp.pad(hidden_TD[last_R], ((0, pad), (0, 0)))
        # Padding rows, including those beyond this layout, point to the trash row.
        columns_NC = jnp.pad(views.columns_RC, ((0, pad), (0, 0)))
        columns_NC = columns_NC.at[layout.num_rows :, Column.TOKEN_ROW].set(self.max_rows)
        return caches, rows, hidden_TD, hidden_ND, columns_NC

    def decode(
        self,
        layout: StepLayout,
        variant: Variant,
        params: Params,
        caches: Caches,
        rows: RowArrays,
        buffer: jax.Array,
        workspace: jax.Array | None,
    ) -> tuple[Caches, RowArrays, jax.Array]:
        """Run the model and sample one token for every row, in one program. Returns caches, rows and the tokens."""
        shards = self.shards.through(workspace)
        views = layout.views(shards.of_first(buffer))
        rows = _update_block_table(rows, views)
        tokens = _locate_decode_tokens(rows, views, self.cache)
        hidden_RD, caches = self._run_model(params, caches, tokens, shards, is_decode=True)
        logits_RV = self.merge(params).logits(hidden_RD, shards)
        token_R = shards.check(self._draw_shared(variant, logits_RV, views.columns_RC, shards), PEERS_LOST)
        return caches, _store_tokens(rows, views.columns_RC, token_R), token_R

    def sample(
        self,
        num_rows: int,
        variant: Variant,
        kind: LogprobsKind,
        params: Params,
        rows: RowArrays,
        hidden_ND: jax.Array,
        columns_NC: jax.Array,
        state: SamplingState | None,
        named_ids_RI: jax.Array | None,
        mask_RW: jax.Array | None,
        workspace: jax.Array | None,
    ) -> tuple[RowArrays, jax.Array, SamplingState | None, Scores]:
        """Sample the first `num_rows` rows after `forward`. Full sampling takes and returns its state, NAMED takes the named ids,
        MASKED and above the mask. Tokens may be NO_TOKEN or NOT_FINITE."""
        columns_RC = columns_NC[:num_rows]
        logits_RV = self.merge(params).logits(hidden_ND[:num_rows], self.shards)
        peers = self.shards.through(workspace)
        if variant < Variant.FULL and kind == LogprobsKind.NONE:
            # The masked variant is compiled late, when the devices may be busy: see `uses_peers`.
            shards = peers if variant < Variant.MASKED else self.shards
            token_R = peers.check(self._draw_shared(variant, logits_RV, columns_RC, shards, mask_RW), PEERS_LOST)
            return _store_tokens(rows, columns_RC, token_R), token_R, state, Scores(None, None)
        # Every device holds the state of all rows, so each needs all logits and samples all rows.
        logits_RV = raw_RV = scored_RV = self.shards.all_columns(logits_RV)
        if variant >= Variant.MASKED:
            assert mask_RW is not None, "masked sampling needs a mask"
            logits_RV = apply_mask(logits_RV, mask_RW)
        if variant == Variant.FULL:
            assert state is not None, "full sampling needs its state"
            sampling = unpack_columns(columns_RC[:, Column.SAMPLING :])
            token_R, state, processed_RV = sample_full(
                logits_RV,
                sampling,
                _next_position(columns_RC),
                state,
                columns_RC[:, Column.TOKEN_ROW],
                self.processors,
                **self._sampling_kernels,
            )
            if self.logprobs_mode.startswith("processed"):
                scored_RV = processed_RV
        else:
            token_R = self._draw(variant, logits_RV, columns_RC)
        token_R = peers.check(mark_not_finite(token_R, logit_of(token_R, raw_RV)), PEERS_LOST)
        top = named = None
        if kind >= LogprobsKind.TOP:
            top = self._top(scored_RV, token_R)
        if kind == LogprobsKind.NAMED:
            assert named_ids_RI is not None
            named = Logprobs(*named_logprobs(scored_RV, token_R, named_ids_RI, normalize=self._normalize))
        return _store_tokens(rows, columns_RC, token_R), token_R, state, Scores(top, named)

    def prompt_logprobs(self, params: Params, hidden_TD: jax.Array, chunk_2C: jax.Array) -> Logprobs:
        """Logprobs of prompt tokens (second row of the chunk) that follow tokens of the step (first row: their index)."""
        index_C, target_C = chunk_2C
        logits_CV = self.merge(params).logits(hidden_TD[index_C], self.shards)
        scores = self._top(self.shards.to_rows(logits_CV), self.shards.own_rows(target_C))
        return self.shards.from_rows(scores, len(target_C))

    def _top(self, logits_RV: jax.Array, token_R: jax.Array) -> Logprobs:
        options = self._sampling_kernels
        return Logprobs(*top_logprobs(logits_RV, token_R, self.num_logprobs, normalize=self._normalize, **options))

    @property
    def _normalize(self) -> bool:
        return self.logprobs_mode.endswith("logprobs")

    def write_blocks(self, rows: RowArrays, update_2U: jax.Array) -> RowArrays:
        """Set block-table entries: first row flat index (beyond the end: none), second row block id."""
        index_U, block_U = update_2U
        return rows._replace(block_table_NB=_set_flat(rows.block_table_NB, index_U, block_U))

    def _run_model(
        self, params: Params, caches: Caches, tokens: Tokens, shards: Shards, *, is_decode: bool
    ) -> tuple[jax.Array, Caches]:
        context = PagedContext(
            caches=list(caches),
            places=self.cache.places,
            tables=tokens.tables,
            query_start_R1=tokens.query_start_R1,
            kv_length_R=tokens.kv_length_R,
            rows=tokens.rows,
            is_decode=is_decode,
            kernels=self.kernels,
        )
        kernels = self.kernels
        step = Step(
            tokens.token_ids_T,
            tokens.position_T,
            context,
            shards,
            tokens.is_real_T,
            choose_experts=partial(choose_experts, implementation=kernels.expert_choice, interpret=kernels.interpret),
            experts=partial(compute_experts, implementation=kernels.grouped_matmul, interpret=kernels.interpret),
            attend_to_latents=context.attend_to_latents,
            states=context,
            gated_delta=partial(gated_delta, implementation=kernels.gated_delta, interpret=kernels.interpret),
        )
        hidden_TD = self.merge(params)(step)
        return hidden_TD, tuple(context.caches)

    def _draw_shared(
        self,
        variant: Variant,
        logits_RV: jax.Array,
        columns_RC: jax.Array,
        shards: Shards,
        mask_RW: jax.Array | None = None,
    ) -> jax.Array:
        """A token for each row, from this device's columns of the logits: the likeliest by comparing the devices' own,
        a random one by the device that has the row's share of the work, with the row's whole logits."""
        if variant == Variant.GREEDY:
            own_R = self._draw(variant, logits_RV, columns_RC)
            return mark_not_finite(*shards.likeliest(own_R, logit_of(own_R, logits_RV), logits_RV.shape[1]))
        logits_rV = raw_rV = shards.to_rows(logits_RV)
        if variant == Variant.MASKED:
            assert mask_RW is not None, "masked sampling needs a mask"
            logits_rV = apply_mask(logits_rV, shards.own_rows(mask_RW))
        token_r = self._draw(variant, logits_rV, shards.own_rows(columns_RC))
        token_r = mark_not_finite(token_r, logit_of(token_r, raw_rV))
        return shards.from_rows(token_r, len(columns_RC))

    def _draw(self, variant: Variant, logits_RV: jax.Array, columns_RC: jax.Array) -> jax.Array:
        if variant == Variant.GREEDY:
            return sample_greedy(logits_RV, **self._sampling_kernels)
        sampling = unpack_columns(columns_RC[:, Column.SAMPLING :])
        return sample_random(logits_RV, sampling, _next_position(columns_RC), **self._sampling_kernels)

    @property
    def _sampling_kernels(self) -> dict[str, Any]:
        return {"implementation": self.kernels.sampling, "interpret": self.kernels.interpret}


def _next_position(columns_RC: jax.Array) -> jax.Array:
    return columns_RC[:, Column.START] + columns_RC[:, Column.NUM_TOKENS]


def _set_flat(table: jax.Array, index: jax.Array, value: jax.Array) -> jax.Array:
    num_columns = table.shape[1]
    return table.at[index // num_columns, index % num_columns].set(value, mode="drop")


def _update_block_table(rows: RowArrays, views: StepViews[jax.Array]) -> RowArrays:
    table = _set_flat(rows.block_table_NB, views.update_index_U, views.update_block_U)
    return rows._replace(block_table_NB=table)


def _store_tokens(rows: RowArrays, columns_RC: jax.Array, token_R: jax.Array) -> RowArrays:
    return rows._replace(last_token_N=rows.last_token_N.at[columns_RC[:, Column.TOKEN_ROW]].set(jnp.maximum(token_R, 0)))


def _locate_tokens(rows: RowArrays, views: StepViews[jax.Array], cache: CacheLayout) -> Tokens:
    """Compute the row, position and slot of each token of a ragged step."""
    columns_RC = views.columns_RC
    num_tokens = views.token_ids_T.shape[0]
    start_R, count_R = columns_RC[:, Column.START], columns_RC[:, Column.NUM_TOKENS]
    query_start_R1 = jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(count_R, dtype=jnp.int32)])
    index_T = jnp.arange(num_tokens, dtype=jnp.int32)
    # Comparing with every row is one kernel; a binary search would be a loop, which a CUDA graph cannot contain.
    owner_T = jnp.searchsorted(query_start_R1, index_T, side="right", method="compare_all").astype(jnp.int32) - 1
    is_real_T = index_T < query_start_R1[-1]
    owner_T = jnp.where(is_real_T, owner_T, 0)
    position_T = jnp.where(is_real_T, start_R[owner_T] + index_T - query_start_R1[owner_T], 0)
    page_tables = _by_group(rows.block_table_NB[columns_RC[:, Column.ROW]], cache)
    pages = [page_table_RB[owner_T, position_T // cache.block_size] for page_table_RB in page_tables]
    is_written_T = is_real_T & (position_T >= columns_RC[owner_T, Column.WRITE_FROM])
    token_T = jnp.where(views.token_ids_T == FROM_ROW, rows.last_token_N[columns_RC[owner_T, Column.ROW]], views.token_ids_T)
    return Tokens(
        token_ids_T=token_T,
        position_T=position_T,
        is_real_T=is_real_T,
        tables=_group_tables(page_tables, pages, position_T, is_written_T, cache),
        query_start_R1=query_start_R1,
        kv_length_R=jnp.where(count_R > 0, start_R + count_R, 0),
        rows=StateRows(columns_RC[:, Column.ROW], start_R == 0, query_start_R1),
    )


def _locate_decode_tokens(rows: RowArrays, views: StepViews[jax.Array], cache: CacheLayout) -> Tokens:
    """The same for a decode step, in which row i has exactly token i."""
    columns_RC = views.columns_RC
    num_rows = columns_RC.shape[0]
    position_R, is_real_R = columns_RC[:, Column.START], columns_RC[:, Column.NUM_TOKENS] > 0
    row_R = columns_RC[:, Column.ROW]
    page_tables = _by_group(rows.block_table_NB[row_R], cache)
    pages = [page_table_RB[jnp.arange(num_rows), position_R // cache.block_size] for page_table_RB in page_tables]
    is_written_R = is_real_R & (position_R >= columns_RC[:, Column.WRITE_FROM])
    return Tokens(
        token_ids_T=jnp.where(views.token_ids_T == FROM_ROW, rows.last_token_N[row_R], views.token_ids_T),
        position_T=position_R,
        is_real_T=is_real_R,
        tables=_group_tables(page_tables, pages, position_R, is_written_R, cache),
        query_start_R1=jnp.arange(num_rows + 1, dtype=jnp.int32),
        kv_length_R=jnp.where(is_real_R, position_R + 1, 0),
        rows=StateRows(row_R, position_R == 0, None),
    )


def _by_group(block_table_RB: jax.Array, cache: CacheLayout) -> list[jax.Array]:
    """Cut block tables into those of the groups.

    One may begin with blocks that the request has freed meanwhile, and end with those of an earlier request of its row: attention
    reads neither.
    """
    num_groups = len(cache.groups)
    return jnp.split(block_table_RB, num_groups, axis=1) if num_groups > 1 else [block_table_RB]


def _group_tables(
    page_tables: list[jax.Array], pages: list[jax.Array], position_T: jax.Array, is_written_T: jax.Array, cache: CacheLayout
) -> tuple[GroupTable, ...]:
    """The page tables of the groups, with the slots of tokens that lie in these pages."""
    slots = (jnp.where(is_written_T, page_T * cache.block_size + position_T % cache.block_size, -1) for page_T in pages)
    return tuple(map(GroupTable, page_tables, slots))
