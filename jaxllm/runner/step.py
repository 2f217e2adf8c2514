"""The compiled step: stateless functions from weights, caches, rows and a step's buffer to new caches, rows and tokens."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxllm.cache_spec import CacheLayout
from jaxllm.layers.step import Adapt, Step
from jaxllm.parallel.exchange import LaneExchange
from jaxllm.parallel.shards import PEERS_LOST, Shards
from jaxllm.runner.adaptation import Adapting
from jaxllm.runner.draft_step import DraftFunctions
from jaxllm.runner.drafts import (
    DraftRows,
    accept,
    continues,
    drafts_of_draws,
    forget_drafts,
    note_computed,
    resolve_starts,
)
from jaxllm.runner.expert_counts import ExpertCounting
from jaxllm.runner.expert_placement import Placing
from jaxllm.runner.kernels import Kernels
from jaxllm.runner.layout import Column, StepLayout, StepViews
from jaxllm.runner.places import Places, device_tokens, each_draw, first_of_each, locate, locate_decode, make_step
from jaxllm.runner.rows import LogprobsKind
from jaxllm.runner.token_split import TokenSplit
from jaxllm.sampling.columns import unpack_columns
from jaxllm.sampling.logprobs import named_logprobs, top_logprobs
from jaxllm.sampling.mask import apply_mask
from jaxllm.sampling.noise import Stream
from jaxllm.sampling.rejection import sample_verified
from jaxllm.sampling.sampler import logit_of, mark_not_finite, sample_full, sample_greedy, sample_random
from jaxllm.sampling.state import SamplingState
from jaxllm.sampling.variants import Variant
from jaxllm.scheduler_output import NO_ADAPTER

Params = tuple[jax.Array, ...]
Caches = tuple[jax.Array, ...]


class RowArrays(NamedTuple):
    """The device's state of every running request, one per row. The last row is a trash row."""

    last_token_N: jax.Array
    block_table_NB: jax.Array
    """The block tables of all groups of layers, side by side."""
    drafts: DraftRows | None = None
    """None without a drafter."""
    expert_tokens_LE: jax.Array | None = None
    """Int32: tokens of each expert since they were last taken, see `ExpertCounting`. They are not of rows, but change in every step too.
    None if they are not counted."""


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
    drafting: DraftFunctions | None = None
    """What proposes drafts; None without."""
    adapting: Adapting | None = None
    """What adapts the model to requests; None without."""
    placing: Placing | None = None
    """Where experts are that move between devices; None: each is in the slot of its number."""
    counting: ExpertCounting | None = None
    """What counts the tokens of experts; None: they are not counted."""
    token_split: TokenSplit | None = None
    """Devices that split tokens; None: each computes all."""
    exchange: LaneExchange | None = None
    """Between lanes, which share the experts of mixtures; None: there is one, or the program has no mixture."""
    share_layers: bool = False
    """Whether layers that are alike are traced as calls of one function: see `SharedLayers`."""

    def forward(
        self,
        layout: StepLayout,
        adapted: bool,
        params: Params,
        caches: Caches,
        rows: RowArrays,
        buffer: jax.Array,
        workspace: jax.Array | None,
        entering_TD: jax.Array | None = None,
    ) -> tuple[Any, ...]:
        """Run the model over a mixed step, with the rows' adapters if `adapted`. entering_TD: in a later stage of a pipeline, what the
        one before has computed of the step.

        Returns caches, rows, hidden_TD, and for sampling hidden_NWD and columns_NC (N = max_rows, W the most tokens that a row may
        sample); with a drafter also what `propose` takes of the step."""
        shards = self.shards.through(workspace)
        views = layout.views(shards.of_first(buffer))
        rows = update_block_table(rows, views)
        columns_RC = resolve_starts(rows.drafts, views.columns_RC)
        places = locate(rows.block_table_NB, columns_RC, layout.num_tokens, self.cache)
        token_ids_T = device_tokens(rows.last_token_N, rows.drafts, views.token_ids_T, places)
        kept = list(caches)
        step = self._step(kept, token_ids_T, places, shards, entering_TD)
        if adapted:
            step.adapt = self._adapt(params, self._share(slots_of(columns_RC, places)), shards)
        rows, left_TD = self._run_model(params, rows, step)
        hidden_TD = self._whole(left_TD, layout.num_tokens)
        hidden_TD = shards.check(hidden_TD, jnp.nan)
        drafts_R1 = columns_RC[:, Column.NUM_DRAFTS, None]
        width = 1 if self.drafting is None else self.drafting.width
        last_RW = places.query_start_R1[1:, None] - 1 - drafts_R1 + jnp.arange(width)
        hidden_NWD, columns_NC = self._padded(hidden_TD[jnp.clip(last_RW, 0, layout.num_tokens - 1)], columns_RC)
        caches = tuple(kept)
        if self.drafting is None or rows.drafts is None:
            return caches, rows, hidden_TD, hidden_NWD, columns_NC
        rows = rows._replace(drafts=note_computed(rows.drafts, columns_RC))
        return caches, rows, hidden_TD, hidden_NWD, columns_NC, (token_ids_T, self.drafting.features(step))

    def decode(
        self,
        layout: StepLayout,
        variant: Variant,
        width: int,
        adapted: bool,
        params: Params,
        caches: Caches,
        rows: RowArrays,
        buffer: jax.Array,
        workspace: jax.Array | None,
        entering_TD: jax.Array | None = None,
    ) -> tuple[Caches, RowArrays, jax.Array]:
        """Run the model, with the rows' adapters if `adapted`, and sample for every row, in one program. entering_TD: as in `forward`.

        Returns caches, rows and the tokens [R], or with a drafter what the host reads of `drafts.accept`: a row has then up to `width`
        tokens, drafts included, and gets drafts for its next step if width > 1."""
        shards = self.shards.through(workspace)
        kept = list(caches)
        rows, columns_RC, places, step, hidden_TD = self._run_rows(
            layout, width, adapted, params, kept, rows, buffer, shards, entering_TD
        )
        adapt = step.adapt
        if adapted and self.token_split is not None:
            adapt = self._adapt(params, slots_of(columns_RC, places), shards)
        logits_TV = self._logits(params, hidden_TD, shards, adapt)
        token_T = self._draw_after_drafts(variant, logits_TV, rows, columns_RC, width, shards)
        token_T = shards.check(token_T, PEERS_LOST)
        caches = tuple(kept)
        if self.drafting is None:
            return caches, _store_tokens(rows, columns_RC, token_T), token_T
        rows, drawn_RW = self._accept(rows, columns_RC, token_T, width)
        if self.drafting.is_idle(layout.num_rows):
            assert rows.drafts is not None
            return caches, rows._replace(drafts=forget_drafts(rows.drafts, columns_RC)), drawn_RW
        rows, caches = self.drafting.propose(
            self, variant, width, params, caches, rows, columns_RC, places, step.token_ids_T, hidden_TD,
            self.drafting.features(step), shards,
        )  # fmt: skip
        return caches, rows, drawn_RW

    def forward_rows(
        self,
        layout: StepLayout,
        adapted: bool,
        params: Params,
        caches: Caches,
        rows: RowArrays,
        buffer: jax.Array,
        workspace: jax.Array | None,
        entering_TD: jax.Array | None = None,
    ) -> tuple[Any, ...]:
        """As `forward`, over one token of each row: what `decode` computes before it samples. Not with a drafter."""
        assert self.drafting is None, "drafts are proposed of a mixed step"
        shards = self.shards.through(workspace)
        kept = list(caches)
        rows, columns_RC, _, _, hidden_RD = self._run_rows(layout, 1, adapted, params, kept, rows, buffer, shards, entering_TD)
        hidden_RD = shards.check(hidden_RD, jnp.nan)
        hidden_NWD, columns_NC = self._padded(hidden_RD[:, None], columns_RC)
        return tuple(kept), rows, hidden_RD, hidden_NWD, columns_NC

    def _run_rows(
        self,
        layout: StepLayout,
        width: int,
        adapted: bool,
        params: Params,
        kept: list[jax.Array],
        rows: RowArrays,
        buffer: jax.Array,
        shards: Shards,
        entering_TD: jax.Array | None,
    ) -> tuple[RowArrays, jax.Array, Places, Step, jax.Array]:
        """Run the model over `width` tokens of each row. Replaces the caches in `kept`. Returns rows, columns_RC, places, the step and
        hidden_TD."""
        views = layout.views(shards.of_first(buffer))
        rows = update_block_table(rows, views)
        columns_RC = resolve_starts(rows.drafts, views.columns_RC)
        places = locate_decode(rows.block_table_NB, columns_RC, width, self.cache)
        known_T = views.token_ids_T if width == 1 else first_of_each(views.token_ids_T, width)
        token_ids_T = device_tokens(rows.last_token_N, rows.drafts, known_T, places)
        step = self._step(kept, token_ids_T, places, shards, entering_TD)
        if adapted:
            step.adapt = self._adapt(params, self._share(slots_of(columns_RC, places)), shards)
        rows, left_TD = self._run_model(params, rows, step)
        return rows, columns_RC, places, step, self._whole(left_TD, len(token_ids_T))

    def _padded(self, hidden_RWD: jax.Array, columns_RC: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What is sampled of a step, for as many rows as there are. Those beyond the step's point to the trash row."""
        num_rows = len(columns_RC)
        pad = self.max_rows - num_rows
        hidden_NWD = jnp.pad(hidden_RWD, ((0, pad), (0, 0), (0, 0)))
        columns_NC = jnp.pad(columns_RC, ((0, pad), (0, 0)))
        return hidden_NWD, columns_NC.at[num_rows:, Column.TOKEN_ROW].set(self.max_rows)

    def sample(
        self,
        num_rows: int,
        variant: Variant,
        kind: LogprobsKind,
        width: int,
        adapted: bool,
        params: Params,
        rows: RowArrays,
        hidden_NWD: jax.Array,
        columns_NC: jax.Array,
        state: SamplingState | None,
        named_ids_RI: jax.Array | None,
        mask_TW: jax.Array | None,
        workspace: jax.Array | None,
    ) -> tuple[RowArrays, jax.Array, SamplingState | None, Scores]:
        """Sample the first `num_rows` rows after `forward`, up to `width` tokens each. Full sampling takes and returns its state,
        NAMED takes the named ids, MASKED and above a mask for each token. Tokens may be NO_TOKEN or NOT_FINITE. adapted: whether
        the rows' adapters change the logits.

        Tokens are [R], or with a drafter [R, W + 1] as of `drafts.accept`; scores have `width` for each row, and are of the logits
        after the mask.
        """
        columns_RC = columns_NC[:num_rows]
        hidden_TD = hidden_NWD[:num_rows, :width].reshape(num_rows * width, -1)
        columns_TC = each_draw(columns_RC, width)
        if width > 1:  # a row with named ids has the same for each of its tokens
            named_ids_RI = None if named_ids_RI is None else jnp.repeat(named_ids_RI, width, axis=0)
        adapt = self._adapt(params, columns_TC[:, Column.ADAPTER], self.shards) if adapted else None
        logits_TV = self._logits(params, hidden_TD, self.shards, adapt)
        peers = self.shards.through(workspace)
        if variant < Variant.FULL and kind == LogprobsKind.NONE:
            # The masked variant is compiled late, when the devices may be busy: see `uses_peers`.
            shards = peers if variant < Variant.MASKED else self.shards
            token_T = self._draw_after_drafts(variant, logits_TV, rows, columns_RC, width, shards, mask_TW)
            token_T = peers.check(token_T, PEERS_LOST)
            rows, token_T = self._store(rows, columns_RC, token_T, width)
            return rows, token_T, state, Scores(None, None)
        # Every device holds the state of all rows, so each needs all logits and samples all rows.
        scored_TV = raw_TV = self.shards.all_columns(logits_TV)
        if variant >= Variant.MASKED:
            assert mask_TW is not None, "masked sampling needs a mask"
            scored_TV = apply_mask(raw_TV, mask_TW)  # in every mode, what a mask forbids is no alternative
        if variant == Variant.FULL:
            assert state is not None and mask_TW is not None, "full sampling needs its state"
            token_T, state, processed_TV = self._draw_full(raw_TV, mask_TW, rows, columns_RC, columns_TC, state, width)
            if self.logprobs_mode.startswith("processed"):
                scored_TV = processed_TV
        else:
            token_T = self._draw(variant, scored_TV, columns_TC)
        token_T = peers.check(mark_not_finite(token_T, logit_of(token_T, raw_TV)), PEERS_LOST)
        top = named = None
        if kind >= LogprobsKind.TOP:
            top = self._top(scored_TV, token_T)
        if kind == LogprobsKind.NAMED:
            assert named_ids_RI is not None
            named = Logprobs(*named_logprobs(scored_TV, token_T, named_ids_RI, normalize=self._normalize))
        rows, token_T = self._store(rows, columns_RC, token_T, width)
        return rows, token_T, state, Scores(top, named)

    def propose(
        self,
        num_tokens: int,
        variant: Variant,
        width: int,
        params: Params,
        caches: Caches,
        rows: RowArrays,
        hidden_TD: jax.Array,
        columns_NC: jax.Array,
        token_ids_T: jax.Array,
        features: tuple[jax.Array, ...],
        workspace: jax.Array | None,
    ) -> tuple[Caches, RowArrays]:
        """After `forward` and `sample`: show the step to the drafter, which proposes drafts for the next one if width > 1."""
        assert self.drafting is not None
        shards = self.shards.through(workspace)
        columns_RC = columns_NC[: min(num_tokens, self.max_rows)]
        places = locate(rows.block_table_NB, columns_RC, num_tokens, self.cache)
        rows, caches = self.drafting.propose(
            self, variant, width, params, caches, rows, columns_RC, places, token_ids_T, hidden_TD, features, shards
        )
        return caches, rows

    def _draw_full(
        self,
        logits_TV: jax.Array,
        mask_TW: jax.Array,
        rows: RowArrays,
        columns_RC: jax.Array,
        columns_TC: jax.Array,
        state: SamplingState,
        width: int,
    ) -> tuple[jax.Array, SamplingState, jax.Array]:
        """Full sampling, which depends on the tokens before: the tokens of a row are drawn one after the other, as long as the
        drafts are right."""
        row_R, is_alive_R = columns_RC[:, Column.TOKEN_ROW], None
        tokens, processed = [], []
        for index in range(width):
            part = slice(index, None, width)
            sampling = unpack_columns(columns_TC[part, Column.SAMPLING :])
            if is_alive_R is not None:
                sampling = replace(sampling, uses_state=jnp.where(is_alive_R, sampling.uses_state, 0))
            token_R, state, processed_RV = sample_full(
                logits_TV[part],
                sampling,
                _next_position(columns_TC[part]),
                state,
                row_R,
                self.processors,
                mask_RW=mask_TW[part],
                **self._sampling_kernels,
            )
            tokens.append(token_R)
            processed.append(processed_RV)
            if rows.drafts is not None and index + 1 < width:
                is_alive_R = continues(rows.drafts, columns_RC, index, token_R, is_alive_R)
        if width == 1:
            return tokens[0], state, processed[0]
        return jnp.stack(tokens, 1).reshape(-1), state, jnp.stack(processed, 1).reshape(logits_TV.shape)

    def _store(self, rows: RowArrays, columns_RC: jax.Array, token_T: jax.Array, width: int) -> tuple[RowArrays, jax.Array]:
        """Keep drawn tokens in their rows. Returns what the host reads."""
        if self.drafting is None:
            return _store_tokens(rows, columns_RC, token_T), token_T
        return self._accept(rows, columns_RC, token_T, width)

    def _accept(self, rows: RowArrays, columns_RC: jax.Array, token_T: jax.Array, width: int) -> tuple[RowArrays, jax.Array]:
        """Keep the drawn tokens up to the first that a draft did not foresee. Returns what the host reads: see `accept`."""
        assert rows.drafts is not None and self.drafting is not None
        token_RW, rates = token_T.reshape(-1, width), self.drafting.drafter.synthetic_rates
        drafts, last_R, drawn_RX = accept(rows.drafts, columns_RC, token_RW, rates)
        return _store_tokens(rows._replace(drafts=drafts), columns_RC, last_R), drawn_RX

    def prompt_logprobs(
        self, params: Params, hidden_TD: jax.Array, chunk_2C: jax.Array, adapter_slot: jax.Array | None
    ) -> Logprobs:
        """Logprobs of prompt tokens (second row of the chunk) that follow tokens of the step (first row: their index).

        adapter_slot: of the adapter that changes the logits; None: none does.
        """
        index_C, target_C = chunk_2C
        adapt = None
        if adapter_slot is not None:
            adapt = self._adapt(params, jnp.full(len(index_C), adapter_slot), self.shards)
        logits_CV = self._logits(params, hidden_TD[index_C], self.shards, adapt)
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

    def _step(
        self,
        caches: list[jax.Array],
        token_ids_T: jax.Array,
        places: Places,
        shards: Shards,
        entering_TD: jax.Array | None = None,
    ) -> Step:
        """What the model runs on. It replaces the arrays in `caches`."""
        wanted = () if self.drafting is None else self.drafting.drafter.feature_layers
        where = (self.cache.places, self.kernels, shards)
        step = make_step(
            caches, token_ids_T, places, *where, wanted, entering_TD, self.token_split, self.exchange, self.share_layers
        )
        step.chosen = None if self.counting is None else []
        return step

    def _run_model(self, params: Params, rows: RowArrays, step: Step) -> tuple[RowArrays, jax.Array]:
        """What the model leaves of a step, whose experts' tokens are counted."""
        if self.placing is not None:
            step.slots = self.placing.slots(params)
        left_TD = self.merge(params)(step)
        return self._count_experts(rows, step), left_TD

    def _count_experts(self, rows: RowArrays, step: Step) -> RowArrays:
        """Count the tokens of experts in a step that the model has run on."""
        if self.counting is None or rows.expert_tokens_LE is None or step.chosen is None:
            return rows
        if self.token_split is None:
            return rows._replace(expert_tokens_LE=self.counting.add(rows.expert_tokens_LE, step.chosen))
        assert step.attended_positions_T is not None
        own_LE = self.counting.add(jnp.zeros_like(rows.expert_tokens_LE), step.chosen)
        total_LE = self.token_split.total(own_LE, len(step.attended_positions_T))
        return rows._replace(expert_tokens_LE=rows.expert_tokens_LE + total_LE)

    def take_expert_tokens(self, rows: RowArrays) -> tuple[RowArrays, jax.Array]:
        """The rows' arrays with no tokens of experts, and those counted so far."""
        assert rows.expert_tokens_LE is not None, "tokens of experts are not counted"
        return rows._replace(expert_tokens_LE=jnp.zeros_like(rows.expert_tokens_LE)), rows.expert_tokens_LE

    def _share(self, x_T: jax.Array) -> jax.Array:
        """Of an array by token, the tokens that this device computes."""
        return x_T if self.token_split is None else self.token_split.share(x_T)

    def _whole(self, hidden_TD: jax.Array, num_tokens: int) -> jax.Array:
        """The hidden states of all tokens, from those that this device computed."""
        return hidden_TD if self.token_split is None else self.token_split.whole(hidden_TD, num_tokens)

    def _adapt(self, params: Params, slot_T: jax.Array, shards: Shards) -> Adapt:
        assert self.adapting is not None, "the engine has no adapters"
        return self.adapting.adaptation.adapt(self.adapting.merge(params), slot_T, shards, self.kernels)

    def _logits(self, params: Params, hidden_TD: jax.Array, shards: Shards, adapt: Adapt | None) -> jax.Array:
        model = self.merge(params)
        if adapt is None or self.adapting is None or not self.adapting.adaptation.changes_logits:
            return model.logits(hidden_TD, shards)  # type: ignore[no-any-return]
        return model.logits(hidden_TD, shards, adapt)  # type: ignore[no-any-return]

    def write_adapter(self, arrays: Params, packed_1P: jax.Array, slot: jax.Array) -> Params:
        """The arrays of all slots with an adapter in one of them."""
        assert self.adapting is not None
        return self.adapting.adaptation.write(arrays, packed_1P, slot)

    def _draw_after_drafts(
        self,
        variant: Variant,
        logits_TV: jax.Array,
        rows: RowArrays,
        columns_RC: jax.Array,
        width: int,
        shards: Shards,
        mask_TW: jax.Array | None = None,
    ) -> jax.Array:
        """As `draw_shared`, `width` tokens for each row, in the places of its drafts. Where these are accepted by the ratio of
        probabilities, a token is the draft if that is accepted. The likeliest tokens need no ratio, nor do masked ones: any draft that
        equals the target's own draw may be accepted."""
        columns_TC = each_draw(columns_RC, width)
        is_by_ratio = self.drafting is not None and self.drafting.drafter.accepts_by_ratio
        if not is_by_ratio or width == 1 or variant != Variant.RANDOM or rows.drafts is None:
            return self.draw_shared(variant, logits_TV, columns_TC, shards, mask_TW)
        logits_tV = shards.to_rows(logits_TV)
        columns_tC, draft_t, index_t = shards.own_rows((columns_TC, *drafts_of_draws(rows.drafts, columns_RC, width)))
        kept_NKV, sampling = rows.drafts.logits_NKV, unpack_columns(columns_tC[:, Column.SAMPLING :])
        kept_tV = None if kept_NKV is None else kept_NKV.reshape(-1, kept_NKV.shape[-1])[index_t]
        token_t = sample_verified(logits_tV, sampling, _next_position(columns_tC), draft_t, kept_tV)
        return shards.from_rows(mark_not_finite(token_t, logit_of(token_t, logits_tV)), len(columns_TC))

    def draw_draft(self, logits_RV: jax.Array, columns_RC: jax.Array) -> jax.Array:
        """int32[R]: a draft for each row, from whole logits, independent of the token that the target draws there."""
        sampling = unpack_columns(columns_RC[:, Column.SAMPLING :])
        options: dict[str, Any] = {"stream": Stream.DRAFT, **self._sampling_kernels}
        token_R = sample_random(logits_RV, sampling, _next_position(columns_RC), **options)
        return mark_not_finite(token_R, logit_of(token_R, logits_RV))

    def draw_shared(
        self,
        variant: Variant,
        logits_RV: jax.Array,
        columns_RC: jax.Array,
        shards: Shards,
        mask_RW: jax.Array | None = None,
    ) -> jax.Array:
        """int32[R]: a token for each row, from this device's columns of the logits: the likeliest by comparing the devices' own,
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


def slots_of(columns_RC: jax.Array, places: Places) -> jax.Array:
    """int32[T]: the slot of each token's adapter."""
    return jnp.where(places.is_real_T, columns_RC[places.owner_T, Column.ADAPTER], NO_ADAPTER)


def _set_flat(table: jax.Array, index: jax.Array, value: jax.Array) -> jax.Array:
    num_columns = table.shape[1]
    return table.at[index // num_columns, index % num_columns].set(value, mode="drop")


def update_block_table(rows: RowArrays, views: StepViews[jax.Array]) -> RowArrays:
    table = _set_flat(rows.block_table_NB, views.update_index_U, views.update_block_U)
    return rows._replace(block_table_NB=table)


def _store_tokens(rows: RowArrays, columns_RC: jax.Array, token_R: jax.Array) -> RowArrays:
    return rows._replace(last_token_N=rows.last_token_N.at[columns_RC[:, Column.TOKEN_ROW]].set(jnp.maximum(token_R, 0)))
