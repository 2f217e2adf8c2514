"""The body of a step, the same in every program that computes layers: from the step's buffer to the hidden states of its tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxllm.cache_spec import CacheLayout
from jaxllm.kernel_policy import ALIKE, KernelPolicy
from jaxllm.parallel.exchange import RankExchange
from jaxllm.parallel.shards import Shards
from jaxllm.runner.feature_inputs import FeatureInputs, Names
from jaxllm.runner.kernels import Kernels
from jaxllm.runner.latest_tokens import LatestTokens
from jaxllm.runner.layout import StepLayout, StepViews
from jaxllm.runner.places import first_of_each, locate, locate_decode, make_step
from jaxllm.runner.row_arrays import Caches, Params, RowArrays
from jaxllm.runner.step_feature import StepFeature, StepRun

F = TypeVar("F", bound=StepFeature)


@dataclass(frozen=True)
class Body:
    """The common part of the steps of an engine, or of a stage of a pipeline. All of it is static.

    With several devices each program runs inside one `shard_map`: weights, caches and logits are this device's shards, everything else
    is replicated.
    """

    merge: Callable[[Params], Any]
    """Weights -> model."""
    shards: Shards
    cache: CacheLayout
    max_rows: int
    kernels: Kernels
    policy: KernelPolicy = ALIKE
    features: tuple[StepFeature, ...] = ()
    exchange: RankExchange | None = None
    """Between data-parallel ranks, which share experts; None: there is one rank, or the program has no mixture."""
    share_layers: bool = False
    """Whether layers that are alike are traced as calls of one function: see `SharedLayers`."""

    @cached_property
    def inputs(self) -> FeatureInputs:
        """The needs of the features."""
        return FeatureInputs(self.features)

    @property
    def latest(self) -> LatestTokens:
        """How rows keep their latest tokens, and how steps continue from them."""
        return self.find(LatestTokens) or LatestTokens()

    def run(
        self,
        layout: StepLayout,
        width: int | None,
        names: Names,
        params: Params,
        caches: Caches,
        rows: RowArrays,
        buffer: jax.Array,
        workspace: jax.Array | None,
        entering_TD: jax.Array | None = None,
    ) -> StepRun:
        """Run the model over a step, with the optional features of these names.

        width: tokens of each row; None: any mix. entering_TD: in a later stage of a pipeline, what the one before has computed of the step.
        """
        shards = self.shards.through(workspace)
        views = layout.views(shards.of_first(buffer))
        rows = update_block_table(rows, views)
        columns_RC, known_T = self.latest.resolved(rows, views.columns_RC), views.token_ids_T
        if width is None:
            places = locate(rows.block_table_NB, columns_RC, layout.num_tokens, self.cache)
        else:
            places = locate_decode(rows.block_table_NB, columns_RC, width, self.cache)
            known_T = known_T if width == 1 else first_of_each(known_T, width)
        token_ids_T = self.latest.token_ids(rows, known_T, places)
        kept = list(caches)
        step = make_step(
            kept,
            token_ids_T,
            places,
            self.cache.places,
            self.kernels,
            shards,
            entering_TD=entering_TD,
            exchange=self.exchange,
            share_layers=self.share_layers,
            policy=self.policy,
        )
        own_columns = {name: columns_RC[:, part] for name, part in self.inputs.columns.items()}
        token_inputs = {name: views.inputs_IT[part] for name, part in self.inputs.token_inputs(names).items()}
        run = StepRun(params, rows, kept, shards, columns_RC, places, token_ids_T, step, own_columns, token_inputs)
        features = [feature for feature in self.features if feature.name in names or not feature.is_optional]
        for feature in features:
            feature.before(run)
        run.hidden_TD = self.merge(params)(run.step)
        for feature in reversed(features):
            feature.after(run)
        return run

    def find(self, kind: type[F]) -> F | None:
        """The feature of this type; None: there is none."""
        return next((feature for feature in self.features if isinstance(feature, kind)), None)

    def get(self, kind: type[F]) -> F:
        """The feature of this type, which is there."""
        found = self.find(kind)
        assert found is not None, f"the engine has no {kind.__name__}"
        return found

    def pass_on(self, layout: StepLayout, width: int | None, names: Names, *arrays: Any) -> tuple[Caches, RowArrays, jax.Array]:
        """The program of a stage that others follow. Returns caches, rows and what enters the next stage, [T, D]."""
        run = self.run(layout, width, names, *arrays)
        return tuple(run.caches), run.rows, run.shards.check(run.hidden_TD, jnp.nan)

    def write_blocks(self, rows: RowArrays, update_2U: jax.Array) -> RowArrays:
        """Set block-table entries: first row flat index (beyond the end: none), second row block id."""
        index_U, block_U = update_2U
        return rows._replace(block_table_NB=_set_flat(rows.block_table_NB, index_U, block_U))


def update_block_table(rows: RowArrays, views: StepViews[jax.Array]) -> RowArrays:
    """With the new blocks of a step."""
    table = _set_flat(rows.block_table_NB, views.update_index_U, views.update_block_U)
    return rows._replace(block_table_NB=table)


def _set_flat(table: jax.Array, index: jax.Array, value: jax.Array) -> jax.Array:
    num_columns = table.shape[1]
    return table.at[index // num_columns, index % num_columns].set(value, mode="drop")
