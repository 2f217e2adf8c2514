"""One stage of a pipeline: its functions, its programs and its runner."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.runner.batch import Batch
from jaxllm.runner.layout import StepLayout
from jaxllm.runner.places import Places, device_tokens, locate, locate_decode
from jaxllm.runner.runner import ModelRunner
from jaxllm.runner.split_program import Lowered
from jaxllm.runner.step import Caches, Params, RowArrays, StepFunctions, slots_of, update_block_table
from jaxllm.runner.step_programs import ProgramKey, StepPrograms


class EarlierFunctions(StepFunctions):
    """Of a stage that others follow: it computes its layers and passes on the sum that they leave."""

    def pass_on(
        self,
        layout: StepLayout,
        is_decode: bool,
        adapted: bool,
        params: Params,
        caches: Caches,
        rows: RowArrays,
        buffer: jax.Array,
        workspace: jax.Array | None,
        entering_TD: jax.Array | None = None,
    ) -> tuple[Caches, RowArrays, jax.Array]:
        """Run the layers over a step, with the rows' adapters if `adapted`. Returns caches, rows and what enters the next stage, [T, D]."""
        shards = self.shards.through(workspace)
        views = layout.views(shards.of_first(buffer))
        rows = update_block_table(rows, views)
        places: Places
        if is_decode:
            places = locate_decode(rows.block_table_NB, views.columns_RC, 1, self.cache)
        else:
            places = locate(rows.block_table_NB, views.columns_RC, layout.num_tokens, self.cache)
        token_ids_T = device_tokens(rows.last_token_N, None, views.token_ids_T, places)
        kept = list(caches)
        step = self._step(kept, token_ids_T, places, shards, entering_TD)
        if adapted:
            step.adapt = self._adapt(params, slots_of(views.columns_RC, places), shards)
        rows, leaving_TD = self._run_model(params, rows, step)
        return tuple(kept), rows, shards.check(leaving_TD, jnp.nan)


@dataclass(frozen=True)
class LaterPrograms(StepPrograms):
    """Programs forward and decode that take what an earlier stage has computed."""

    def entering(self, layout: StepLayout) -> tuple[jax.ShapeDtypeStruct, ...]:
        """[T, D]: the sum of embedding and all earlier layers."""
        return (self._shape((layout.num_tokens, self.model.hidden_size), self.model.dtype),)


@dataclass(frozen=True)
class EarlierPrograms(StepPrograms):
    """The programs of a stage that others follow: forward and decode, whatever is sampled later."""

    def common_keys(self) -> list[ProgramKey]:
        decode_rows = self.buckets.decode_rows if self.model.generates else ()
        sizes = [("forward", size) for size in reversed(self.buckets.tokens)]
        sizes += [("decode", size) for size in reversed(decode_rows)]
        return [
            *(ProgramKey(kind, size, adapted=has) for kind, size in sizes for has in self.adapted_steps),
            ProgramKey("write_blocks"),
            *([ProgramKey("write_adapter")] if self.has_adapters else []),
            *self.experts_keys(),
        ]

    def rare_keys(self) -> list[ProgramKey]:
        return []

    def _lower_forward(self, key: ProgramKey) -> Lowered:
        return self._lower_pass_on(key)

    def _lower_decode(self, key: ProgramKey) -> Lowered:
        return self._lower_pass_on(key)

    def _lower_pass_on(self, key: ProgramKey) -> Lowered:
        assert isinstance(self.functions, EarlierFunctions)
        layout = self.layout(key)
        arguments = (*self.step_arguments(layout), *self.entering(layout))
        out = (self._cache_shardings, self.replicated, self.replicated)
        function = partial(self.functions.pass_on, layout, key.kind == "decode", key.adapted)
        return self._lower_on_each(function, arguments, out, donate=(1, 2))


@dataclass(frozen=True)
class MiddlePrograms(EarlierPrograms, LaterPrograms):
    """Of a stage between two others."""


class EarlierStage(ModelRunner):
    """A stage that others follow. It runs the batches that the last stage makes."""

    functions_type = EarlierFunctions
    programs_type = EarlierPrograms

    def pass_on(self, batch: Batch, entering: tuple[jax.Array, ...]) -> jax.Array:
        """Start a step. Returns what enters the next stage, on the devices of this one."""
        kind, size = ("decode", batch.layout.num_rows) if batch.is_decode else ("forward", batch.layout.num_tokens)
        if batch.extra_updates is not None:
            self._write_blocks(*batch.extra_updates)
        program = self.program(ProgramKey(kind, size, adapted=self.is_adapted(batch)))
        (leaving_TD,) = self.run_step(program, batch.layout, batch.buffer, entering)
        return leaving_TD  # type: ignore[no-any-return]

    def take_tokens(self, last_token_N: jax.Array) -> None:
        """Set the last token of each row, for the steps that follow."""
        self.row_arrays = self.row_arrays._replace(last_token_N=last_token_N)


class MiddleStage(EarlierStage):
    programs_type = MiddlePrograms


class LastStage(ModelRunner):
    """The last stage, which makes the batches of all, samples and pools."""

    programs_type = LaterPrograms
    run_earlier: Callable[[Batch], jax.Array]
    """Runs the stages before and returns what they leave, on the devices of this one."""
    on_drawn: Callable[[jax.Array], Any]
    """Called with the last token of each row, whenever a step has drawn some."""

    def entering(self, batch: Batch) -> tuple[jax.Array, ...]:
        return (self.run_earlier(batch),)

    def note_drawn(self) -> None:
        self.on_drawn(self.row_arrays.last_token_N)
