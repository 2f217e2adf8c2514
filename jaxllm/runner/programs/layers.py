"""The common part of the kinds of programs that compute layers."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from jaxllm.runner.layout import StepLayout, decode_layout, mixed_layout
from jaxllm.runner.programs.key import ProgramKey
from jaxllm.runner.programs.kind import ProgramKind, Wanted
from jaxllm.runner.split_program import CompiledProgram, Lowered

if TYPE_CHECKING:
    from jaxllm.runner.step_programs import StepPrograms


class LayersProgram(ProgramKind):
    """Takes a step's buffer, weights, caches and the rows' arrays; in a later stage of a pipeline also what enters it."""

    def layout(self, programs: "StepPrograms", key: ProgramKey) -> StepLayout:
        """The step's buffer."""
        raise NotImplementedError

    def uses_peers(self, key: ProgramKey) -> bool:
        return True

    def lower_layers(
        self, programs: "StepPrograms", key: ProgramKey, function: Callable[..., Any], num_results: int
    ) -> Lowered:
        """Trace a function of `Body`. num_results: how many it returns behind the caches, whole on every device."""
        layout = self.layout(programs, key)
        arguments = (*programs.step_arguments(layout), *programs.entering(layout))
        out = (programs.cache_shardings, *[programs.replicated] * num_results)
        return programs.lower_on_each(function, arguments, out, donate=(1, 2))

    def run_on_nothing(self, runner: Any, key: ProgramKey, program: CompiledProgram) -> None:
        runner.run_empty(program, self.layout(runner.shapes, key))


class MixedProgram(LayersProgram):
    """Computes tokens of any mix of prompts and decodes; the key's size counts them."""

    def common(self, programs: "StepPrograms") -> Iterable[ProgramKey]:
        """All sizes, the largest first."""
        return [key for key in self._keys(programs) if programs.inputs.are_common(key.features, key.size)]

    def rare(self, programs: "StepPrograms") -> Iterable[ProgramKey]:
        return [key for key in reversed(self._keys(programs)) if not programs.inputs.are_common(key.features, key.size)]

    def is_needed(self, key: ProgramKey, wanted: Wanted) -> bool:
        return bool(wanted.features) and (key.size, key.features) == (wanted.num_tokens, wanted.features)

    def awaited(self, programs: "StepPrograms", wanted: Wanted) -> Iterable[Sequence[ProgramKey]]:
        """One that holds the prompt up to its last item, or as much of it as a step computes."""
        if not wanted.features:
            return ()
        sizes = [size for size in programs.buckets.tokens if size >= wanted.num_tokens]
        return [[ProgramKey(self.name, size, features=wanted.features) for size in sizes]]

    def _keys(self, programs: "StepPrograms") -> list[ProgramKey]:
        sizes = reversed(programs.buckets.tokens)
        return [ProgramKey(self.name, size, features=names) for size in sizes for names in programs.inputs.sets]

    def layout(self, programs: "StepPrograms", key: ProgramKey) -> StepLayout:
        num_rows = programs.buckets.rows_for_tokens(key.size)
        num_inputs = programs.inputs.num_token_inputs(key.features)
        sizes = (programs.cache.block_size, len(programs.cache.groups), programs.inputs.num_columns, num_inputs)
        return mixed_layout(key.size, num_rows, *sizes)

    def compiler_options(self, programs: "StepPrograms", key: ProgramKey) -> dict[str, str | bool]:
        # One run of tokens is multiplied while another is added up (`Shards.num_runs`): XLA must look for what it can compute meanwhile.
        return {"xla_gpu_enable_latency_hiding_scheduler": True} if programs.mesh.size > 1 else {}


class DecodeProgram(LayersProgram):
    """Computes the same number of tokens of each row; the key's size counts rows."""

    def layout(self, programs: "StepPrograms", key: ProgramKey) -> StepLayout:
        return decode_layout(key.size, programs.num_updates, programs.inputs.num_columns)

    def compiler_options(self, programs: "StepPrograms", key: ProgramKey) -> dict[str, str | bool]:
        routes = programs.functions.kernels.router_scores != "xla"
        is_told = programs.mesh.size == 1 and (programs.model.has_concurrent_branches or routes)
        branches = programs.buckets.policy.branch_options(key.size) if is_told else {}
        return super().compiler_options(programs, key) | branches
