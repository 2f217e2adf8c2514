"""The compiled step: stateless functions from weights, caches, rows and a step's buffer to new caches, rows and tokens."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.layers.step import Adapt
from jaxllm.parallel.shards import PEERS_LOST, Shards
from jaxllm.runner.body import Body
from jaxllm.runner.feature_inputs import Names
from jaxllm.runner.layout import SAMPLING_COLUMNS, Column, StepLayout
from jaxllm.runner.places import each_draw, next_position
from jaxllm.runner.row_arrays import Caches, Logprobs, Params, RowArrays, Scores
from jaxllm.runner.rows import LogprobsKind
from jaxllm.sampling.columns import unpack_columns
from jaxllm.sampling.logprobs import named_logprobs, top_logprobs
from jaxllm.sampling.mask import apply_mask
from jaxllm.sampling.noise import Stream
from jaxllm.sampling.sampler import logit_of, mark_not_finite, sample_full, sample_greedy, sample_random
from jaxllm.sampling.state import SamplingState
from jaxllm.sampling.variants import Variant


@dataclass(frozen=True, kw_only=True)
class StepFunctions(Body):
    """The programs of an engine's steps, as functions to compile."""

    num_logprobs: int
    """Number of likeliest tokens reported in addition to the sampled one."""
    logprobs_mode: str
    processors: tuple[Any, ...] = ()

    def forward(self, layout: StepLayout, names: Names, *arrays: Any) -> tuple[Any, ...]:
        """Run the model over a mixed step. arrays, names: as in `run`.

        Returns caches, rows, hidden_TD, and for sampling hidden_NWD and columns_NC (N = max_rows, W the most tokens that a row may
        sample); then `LatestTokens.shown`."""
        run = self.run(layout, None, names, *arrays)
        hidden_TD, columns_RC = run.shards.check(run.hidden_TD, jnp.nan), run.columns_RC
        drafts_R1 = columns_RC[:, Column.NUM_DRAFTS, None]
        last_RW = run.places.query_start_R1[1:, None] - 1 - drafts_R1 + jnp.arange(self.latest.width)
        hidden_NWD, columns_NC = self._padded(hidden_TD[jnp.clip(last_RW, 0, layout.num_tokens - 1)], columns_RC)
        rows = self.latest.noted(run.rows, columns_RC)
        return tuple(run.caches), rows, hidden_TD, hidden_NWD, columns_NC, *self.latest.shown(run)

    def decode(
        self, layout: StepLayout, variant: Variant, width: int, names: Names, *arrays: Any
    ) -> tuple[Caches, RowArrays, jax.Array]:
        """Run the model over `width` tokens of each row and sample for every row, in one program. arrays, names: as in `run`.

        Returns caches, rows, and what the host reads of `LatestTokens.stored`."""
        run = self.run(layout, width, names, *arrays)
        logits_TV = self.logits(run.params, run.hidden_TD, run.shards, run.adapts())
        token_T = self._draw_each(variant, logits_TV, run.rows, run.columns_RC, width, run.shards)
        token_T = run.shards.check(token_T, PEERS_LOST)
        run.rows, drawn = self.latest.stored(run.rows, run.columns_RC, token_T, width)
        self.latest.follow(self, variant, width, run)
        return tuple(run.caches), run.rows, drawn

    def forward_rows(self, layout: StepLayout, names: Names, *arrays: Any) -> tuple[Any, ...]:
        """As `forward`, over one token of each row: what `decode` computes before it samples. Drafts are proposed of other steps."""
        run = self.run(layout, 1, names, *arrays)
        hidden_RD = run.shards.check(run.hidden_TD, jnp.nan)
        hidden_RWD = hidden_RD[:, None]
        if self.latest.width > 1:
            hidden_RWD = jnp.pad(hidden_RWD, ((0, 0), (0, self.latest.width - 1), (0, 0)))
        hidden_NWD, columns_NC = self._padded(hidden_RWD, run.columns_RC)
        return tuple(run.caches), run.rows, hidden_RD, hidden_NWD, columns_NC

    def _padded(self, hidden_RWD: jax.Array, columns_RC: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Hidden states and columns to sample from, padded to all rows, or cut to them. Rows beyond the step's point to the trash row."""
        hidden_RWD, columns_RC = hidden_RWD[: self.max_rows], columns_RC[: self.max_rows]
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
        names: Names,
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
        NAMED takes the named ids, MASKED and above a mask for each token. Tokens may be NO_TOKEN or NOT_FINITE. names:
        optional features that change the logits of the rows.

        Tokens are those of `LatestTokens.stored`; scores have `width` for each row, and are of the logits
        after the mask.
        """
        columns_RC = columns_NC[:num_rows]
        hidden_TD = hidden_NWD[:num_rows, :width].reshape(num_rows * width, -1)
        columns_TC = each_draw(columns_RC, width)
        if width > 1:  # a row with named ids has the same for each of its tokens
            named_ids_RI = None if named_ids_RI is None else jnp.repeat(named_ids_RI, width, axis=0)
        adapts = self.adapts(params, columns_TC[:, Column.ADAPTER], names)
        logits_TV = self.logits(params, hidden_TD, self.shards, adapts)
        peers = self.shards.through(workspace)
        if variant < Variant.FULL and kind == LogprobsKind.NONE:
            # The masked variant is compiled late, when the devices may be busy: see `uses_peers`.
            shards = peers if variant < Variant.MASKED else self.shards
            token_T = self._draw_each(variant, logits_TV, rows, columns_RC, width, shards, mask_TW)
            token_T = peers.check(token_T, PEERS_LOST)
            rows, token_T = self.latest.stored(rows, columns_RC, token_T, width)
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
            top = self.top(scored_TV, token_T)
        if kind == LogprobsKind.NAMED:
            assert named_ids_RI is not None
            named = Logprobs(*named_logprobs(scored_TV, token_T, named_ids_RI, normalize=self._normalize))
        rows, token_T = self.latest.stored(rows, columns_RC, token_T, width)
        return rows, token_T, state, Scores(top, named)

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
            sampling = unpack_columns(columns_TC[part, SAMPLING_COLUMNS])
            if is_alive_R is not None:
                sampling = replace(sampling, uses_state=jnp.where(is_alive_R, sampling.uses_state, 0))
            token_R, state, processed_RV = sample_full(
                logits_TV[part],
                sampling,
                next_position(columns_TC[part]),
                state,
                row_R,
                self.processors,
                mask_RW=mask_TW[part],
                **self._sampling_kernels,
            )
            tokens.append(token_R)
            processed.append(processed_RV)
            if index + 1 < width:
                is_alive_R = self.latest.continues(rows, columns_RC, index, token_R, is_alive_R)
        if width == 1:
            return tokens[0], state, processed[0]
        return jnp.stack(tokens, 1).reshape(-1), state, jnp.stack(processed, 1).reshape(logits_TV.shape)

    def top(self, logits_RV: jax.Array, token_R: jax.Array) -> Logprobs:
        """Logprobs of tokens and of the likeliest ones, of whole logits."""
        options = self._sampling_kernels
        return Logprobs(*top_logprobs(logits_RV, token_R, self.num_logprobs, normalize=self._normalize, **options))

    @property
    def _normalize(self) -> bool:
        return self.logprobs_mode.endswith("logprobs")

    def adapts(self, params: Params, slot_T: jax.Array, names: Names) -> tuple[Adapt, ...]:
        """The functions by which these optional features adapt the logits of tokens with adapters in these slots."""
        features = (feature for feature in self.features if feature.name in names)
        return tuple(adapt for feature in features for adapt in feature.of_logits(params, slot_T, self.shards))

    def logits(self, params: Params, hidden_TD: jax.Array, shards: Shards, adapts: tuple[Adapt, ...]) -> jax.Array:
        """Logits of this device's part of the vocabulary. adapts: what changes them."""
        return self.merge(params).logits(hidden_TD, shards, *adapts)  # type: ignore[no-any-return]

    def _draw_each(
        self,
        variant: Variant,
        logits_TV: jax.Array,
        rows: RowArrays,
        columns_RC: jax.Array,
        width: int,
        shards: Shards,
        mask_TW: jax.Array | None = None,
    ) -> jax.Array:
        """As `draw_shared`, `width` tokens for each row."""
        columns_TC = each_draw(columns_RC, width)
        return self.latest.draw(self.draw_shared, variant, logits_TV, rows, columns_RC, columns_TC, width, shards, mask_TW)

    def draw_draft(self, logits_RV: jax.Array, columns_RC: jax.Array) -> jax.Array:
        """int32[R]: a draft for each row, from whole logits, independent of the token that the target draws there."""
        sampling = unpack_columns(columns_RC[:, SAMPLING_COLUMNS])
        options: dict[str, Any] = {"stream": Stream.DRAFT, **self._sampling_kernels}
        token_R = sample_random(logits_RV, sampling, next_position(columns_RC), **options)
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
        sampling = unpack_columns(columns_RC[:, SAMPLING_COLUMNS])
        return sample_random(logits_RV, sampling, next_position(columns_RC), **self._sampling_kernels)

    @property
    def _sampling_kernels(self) -> dict[str, Any]:
        return {"implementation": self.kernels.sampling, "interpret": self.kernels.interpret}
