"""Drafts as a feature of the step: rows sample as many tokens as their drafts foresee, and the drafter proposes new ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxllm.cache_spec import CacheLayout
from jaxllm.kernel_policy import KernelPolicy
from jaxllm.layers.step import Step
from jaxllm.parallel.exchange import RankExchange
from jaxllm.parallel.shards import Shards
from jaxllm.runner.buckets import Buckets
from jaxllm.runner.drafter import NO_DRAFT, Drafter, Drafting, kept_logits
from jaxllm.runner.features.drafts.host import DraftsOnHost
from jaxllm.runner.features.drafts.programs import CopyDrafts, Propose, SetDrafts, Show
from jaxllm.runner.features.drafts.rows import (
    DraftRows,
    accept,
    continues,
    drafts_of,
    drafts_of_draws,
    forget_drafts,
    latest_and_drafts,
    note_computed,
    resolve_starts,
)
from jaxllm.runner.heads import Device
from jaxllm.runner.kernels import Kernels
from jaxllm.runner.latest_tokens import Draw, LatestTokens, with_latest
from jaxllm.runner.layout import SAMPLING_COLUMNS, Column
from jaxllm.runner.paged_context import PagedContext
from jaxllm.runner.places import Places, at_positions, lagging, latest_or_known, locate, make_step, next_position, runs_at
from jaxllm.runner.programs.kind import ProgramKind
from jaxllm.runner.row_arrays import Caches, Params, RowArrays
from jaxllm.runner.step_feature import StepRun
from jaxllm.sampling.columns import unpack_columns
from jaxllm.sampling.rejection import as_kept, sample_verified
from jaxllm.sampling.sampler import logit_of, mark_not_finite
from jaxllm.sampling.variants import Variant
from pallas_kernels.span_attention import Later


class Engine(Protocol):
    """The part of `StepFunctions` that drafting uses."""

    @property
    def merge(self) -> Callable[[Any], Any]: ...

    @property
    def cache(self) -> CacheLayout: ...

    @property
    def kernels(self) -> Kernels: ...

    @property
    def max_rows(self) -> int: ...

    @property
    def exchange(self) -> RankExchange | None: ...
    @property
    def policy(self) -> KernelPolicy: ...

    @property
    def shards(self) -> Shards: ...

    def draw_shared(self, variant: Variant, logits_RV: jax.Array, columns_RC: jax.Array, shards: Shards) -> jax.Array: ...

    def draw_draft(self, logits_RV: jax.Array, columns_RC: jax.Array) -> jax.Array: ...


@dataclass(frozen=True)
class Drafts(LatestTokens):
    """A drafter in the programs of an engine. Each row also keeps drafts, which its next step computes and verifies."""

    drafter: Drafter
    policy: KernelPolicy
    merge: Callable[[Params], Any] | None
    """Weights -> the drafter's model; None for one without weights."""
    num_target_layers: int

    max_len: int
    """Positions of a row."""
    vocab_size: int
    """Number of logits."""

    num_shown = 1

    @property
    def width(self) -> int:  # type: ignore[override]
        return 1 + self.drafter.num_drafts

    @property
    def proposes(self) -> bool:  # type: ignore[override]
        return self.drafter.proposes

    @property
    def num_lookahead(self) -> int:  # type: ignore[override]
        return self.drafter.num_lookahead

    def programs(self) -> Sequence[ProgramKind]:
        source = Propose(self) if self.drafter.proposes else SetDrafts(self.drafter.num_drafts)
        return [source, *([Show(self)] if self.drafter.needs_history else []), CopyDrafts()]

    def on_host(self, device: Device) -> DraftsOnHost:
        return DraftsOnHost(device, self.drafter)

    def row_arrays(self, buckets: Buckets) -> dict[str, Any]:
        num_rows = buckets.num_rows

        def ints(*shape: int) -> Any:
            return jax.ShapeDtypeStruct(shape, jnp.int32)

        state = jax.eval_shape(partial(self.drafter.new_state, num_rows, self.max_len))
        logits = kept_logits(self.drafter, num_rows, self.vocab_size)
        numbers = ints(num_rows), ints(num_rows, self.drafter.num_drafts), ints(num_rows, self.width)
        return {"drafts": DraftRows(*numbers, state, logits)}  # type: ignore[arg-type]

    def resolved(self, rows: RowArrays, columns_RC: jax.Array) -> jax.Array:
        return resolve_starts(drafts_of(rows), columns_RC)

    def token_ids(self, rows: RowArrays, known_T: jax.Array, places: Places) -> jax.Array:
        return latest_or_known(latest_and_drafts(drafts_of(rows), rows.last_token_N, places), known_T)

    def before(self, run: StepRun) -> None:
        run.step.wanted_features = self.drafter.feature_layers

    def noted(self, rows: RowArrays, columns_RC: jax.Array) -> RowArrays:
        return rows.replaced(drafts=note_computed(drafts_of(rows), columns_RC))

    def shown(self, run: StepRun) -> tuple[Any, ...]:
        """The arguments of `propose` from the step."""
        return ((run.token_ids_T, self.features(run.step)),)

    def draw(
        self,
        draw: Draw,
        variant: Variant,
        logits_TV: jax.Array,
        rows: RowArrays,
        columns_RC: jax.Array,
        columns_TC: jax.Array,
        width: int,
        shards: Shards,
        mask_TW: jax.Array | None = None,
    ) -> jax.Array:
        """Tokens in the places of each row's drafts. Where these are accepted by the ratio of probabilities, a token is the draft if that
        is accepted. The likeliest tokens need no ratio, nor do masked ones: any draft that equals the target's own draw may be accepted."""
        if not self.drafter.accepts_by_ratio or width == 1 or variant != Variant.RANDOM:
            return draw(variant, logits_TV, columns_TC, shards, mask_TW)
        logits_tV = shards.to_rows(logits_TV)
        columns_tC, draft_t, index_t = shards.own_rows((columns_TC, *drafts_of_draws(drafts_of(rows), columns_RC, width)))
        kept_NKV, sampling = drafts_of(rows).logits_NKV, unpack_columns(columns_tC[:, SAMPLING_COLUMNS])
        kept_tV = None if kept_NKV is None else kept_NKV.reshape(-1, kept_NKV.shape[-1])[index_t]
        token_t = sample_verified(logits_tV, sampling, next_position(columns_tC), draft_t, kept_tV)
        return shards.from_rows(mark_not_finite(token_t, logit_of(token_t, logits_tV)), len(columns_TC))

    def continues(
        self, rows: RowArrays, columns_RC: jax.Array, index: int, token_R: jax.Array, is_alive_R: jax.Array | None
    ) -> jax.Array:
        return continues(drafts_of(rows), columns_RC, index, token_R, is_alive_R)

    def stored(self, rows: RowArrays, columns_RC: jax.Array, token_T: jax.Array, width: int) -> tuple[RowArrays, jax.Array]:
        """Keep the drawn tokens up to the first that a draft did not foresee. The host reads what `accept` says."""
        token_RW, rates = token_T.reshape(-1, width), self.drafter.synthetic_rates
        drafts, last_R, drawn_RX = accept(drafts_of(rows), columns_RC, token_RW, rates)
        return with_latest(rows.replaced(drafts=drafts), columns_RC, last_R), drawn_RX

    def follow(self, functions: Any, variant: Variant, width: int, run: StepRun) -> None:
        """Show the step to the drafter, which proposes drafts for the next one if width > 1."""
        if not self.drafter.proposes:
            return
        if self.is_idle(len(run.columns_RC)):
            run.rows = run.rows.replaced(drafts=forget_drafts(drafts_of(run.rows), run.columns_RC))
            return
        run.rows, caches = self.propose(
            functions, variant, width, run.params, tuple(run.caches), run.rows, run.columns_RC, run.places, run.token_ids_T,
            run.hidden_TD, self.features(run.step), run.shards, functions.policy,
        )  # fmt: skip
        run.caches[:] = caches

    def is_idle(self, num_rows: int) -> bool:
        """Whether decodes of so many rows are not shown to the drafter: they never have drafts, and its model would cost time.

        Requests that were decoded so get fewer right drafts later, when fewer run.
        """
        return not self.policy.has_drafts(num_rows) and self.drafter.model is not None

    def propose_apart(
        self,
        engine: Engine,
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
        """The program behind `forward` and `sample` that does what `follow` does in `decode`."""
        shards = engine.shards.through(workspace)
        columns_RC = columns_NC[: min(num_tokens, engine.max_rows)]
        places = locate(rows.block_table_NB, columns_RC, num_tokens, engine.cache)
        rows, caches = self.propose(
            engine, variant, width, params, caches, rows, columns_RC, places, token_ids_T, hidden_TD, features, shards,
            engine.policy.in_program(num_tokens),
        )  # fmt: skip
        return caches, rows

    def features(self, step: Step) -> tuple[jax.Array, ...]:
        """Features of the target's layers that the drafter reads."""
        return tuple(step.features[layer] for layer in self.drafter.feature_layers)

    def show(self, rows: Any, row_and_position: jax.Array, token_ids_C: jax.Array) -> Any:
        """Show tokens that no step computes to the drafter."""
        row, position = row_and_position
        state = self.drafter.show(drafts_of(rows).state, row, position, token_ids_C)
        return rows.replaced(drafts=drafts_of(rows)._replace(state=state))

    def propose(
        self,
        engine: Engine,
        variant: Variant,
        width: int,
        params: Any,
        caches: tuple[jax.Array, ...],
        rows: Any,
        columns_RC: jax.Array,
        places: Places,
        token_ids_T: jax.Array,
        hidden_TD: jax.Array,
        features: tuple[jax.Array, ...],
        shards: Shards,
        policy: KernelPolicy,
    ) -> tuple[Any, tuple[jax.Array, ...]]:
        """Show a step to the drafter; with width 1 no drafts are wanted. Returns the rows and the caches.

        rows: after the tokens of the step were stored; columns_RC, with resolved starts, and places: of the step.
        """
        shared = list(caches)
        layers = engine.cache.places[self.num_target_layers :]
        row_R, start_R = columns_RC[:, Column.TOKEN_ROW], columns_RC[:, Column.START]
        count_R, limit_R = columns_RC[:, Column.NUM_TOKENS], columns_RC[:, Column.LIMIT]
        first_R = count_R - 1 - columns_RC[:, Column.NUM_DRAFTS]
        drawn_RW = drafts_of(rows).drawn_NW[row_R]
        num_drawn_R = jnp.maximum(jnp.sum(drawn_RW != NO_DRAFT, axis=1), 1)
        samples_R = row_R != engine.max_rows
        num_kept, logits_NKV = 0, drafts_of(rows).logits_NKV

        def drafters_step(ids: jax.Array, at: Places) -> Step:
            return make_step(shared, ids, at, layers, engine.kernels, shards, exchange=engine.exchange, policy=policy)

        def same_step(ids_T: jax.Array, lag: int = 0) -> Step:
            at = places if not lag else lagging(places, rows.block_table_NB, columns_RC, lag, engine.cache)
            return drafters_step(ids_T, at)

        def decode_step(token_R: jax.Array, position_R: jax.Array) -> Step:
            at = at_positions(rows.block_table_NB, row_R, position_R, jnp.where(samples_R, limit_R, 0), engine.cache)
            return drafters_step(token_R, at)

        def run_step(token_RW: jax.Array, position_R: jax.Array, *, sees_later: bool) -> Step:
            width, limit = token_RW.shape[1], jnp.where(samples_R, limit_R, 0)
            at = runs_at(rows.block_table_NB, row_R, position_R, limit, width, engine.cache)
            step = drafters_step(token_RW.reshape(-1), at._replace(num_queries=None) if sees_later else at)
            if sees_later:
                assert isinstance(step.attend, PagedContext)
                step.attend.later = Later(jnp.where(at.kv_length_R[at.owner_T] > 0, width - 1 - at.offset_T, 0), width - 1)
            return step

        def draw(logits_RV: jax.Array, position_R: jax.Array) -> jax.Array:
            nonlocal num_kept, logits_NKV
            drawn = columns_RC.at[:, Column.START].set(position_R - 1).at[:, Column.NUM_TOKENS].set(1)
            if variant == Variant.GREEDY or logits_NKV is None:
                return engine.draw_shared(min(variant, Variant.RANDOM), logits_RV, drawn, shards)
            kept_RV = as_kept(shards.all_columns(logits_RV))
            logits_NKV = logits_NKV.at[row_R, num_kept].set(kept_RV)
            num_kept += 1
            return engine.draw_draft(kept_RV.astype(logits_RV.dtype), drawn)

        drafting = Drafting(
            target=engine.merge(params),
            shards=shards,
            token_ids_T=token_ids_T,
            next_ids_T=_next_ids(columns_RC, places, token_ids_T, drawn_RW, samples_R, first_R),
            position_T=places.position_T,
            row_T=jnp.where(places.is_real_T, places.row_T, engine.max_rows),
            hidden_TD=hidden_TD,
            features=features,
            last_R=jnp.clip(places.query_start_R1[:-1] + first_R + num_drawn_R - 1, 0, len(token_ids_T) - 1),
            token_R=rows.last_token_N[row_R],
            position_R=start_R + first_R + num_drawn_R,
            row_R=row_R,
            draws_R=samples_R,
            offset_T=places.offset_T,
            query_start_R1=places.query_start_R1,
            same_step=same_step,
            decode_step=decode_step,
            run_step=run_step,
            num_wanted=width - 1,
            draw=draw,
        )
        model, kept = None if self.merge is None else self.merge(params), drafts_of(rows)
        if width == 1:
            state, draft_RK = self.drafter.follow(model, kept.state, drafting), jnp.zeros((len(row_R), 0), jnp.int32)
        else:
            state, draft_RK = self.drafter.propose(model, kept.state, drafting)
        missing = ((0, 0), (0, self.drafter.num_drafts - (width - 1)))
        draft_RK = jnp.pad(draft_RK, missing, constant_values=NO_DRAFT)
        assert num_kept in (0, width - 1), "a drafter that draws must draw each of its drafts"
        kept = kept._replace(state=state, draft_NK=kept.draft_NK.at[row_R].set(draft_RK), logits_NKV=logits_NKV)
        return rows.replaced(drafts=kept), tuple(shared)


def _next_ids(
    columns_RC: jax.Array,
    places: Places,
    token_ids_T: jax.Array,
    drawn_RW: jax.Array,
    samples_R: jax.Array,
    first_R: jax.Array,
) -> jax.Array:
    """The token behind each token of a step: drawn, or known to the host."""
    owner_T, index_T = places.owner_T, places.offset_T - first_R[places.owner_T]
    drawn_T = jnp.maximum(drawn_RW[owner_T, jnp.clip(index_T, 0, drawn_RW.shape[1] - 1)], 0)
    following_T = jnp.concatenate([token_ids_T[1:], token_ids_T[:1]])
    is_last_T = places.offset_T == columns_RC[owner_T, Column.NUM_TOKENS] - 1
    known_T = jnp.where(is_last_T, columns_RC[owner_T, Column.NEXT_TOKEN], following_T)
    return jnp.where(samples_R[owner_T] & (index_T >= 0), drawn_T, known_T)
