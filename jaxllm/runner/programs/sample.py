"""`sample`: tokens for the rows of a step whose hidden states another program has computed."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from jaxllm.runner.programs.key import ProgramKey
from jaxllm.runner.programs.kind import ProgramKind, Wanted, first_sizes
from jaxllm.runner.rows import LogprobsKind
from jaxllm.runner.split_program import CompiledProgram, Lowered
from jaxllm.sampling.mask import num_words
from jaxllm.sampling.variants import Variant
from jaxllm.sampling_params import MAX_LOGPROB_TOKEN_IDS

if TYPE_CHECKING:
    from jaxllm.runner.step_programs import StepPrograms

FIRST_SIZES = (8,)


class Sample(ProgramKind):
    """See `StepFunctions.sample`. Greedy and random draws without logprobs are common."""

    name = "sample"
    draws = True

    def common(self, programs: "StepPrograms") -> Iterable[ProgramKey]:
        return [
            ProgramKey(self.name, size, variant, width=width, features=names)
            for size in reversed(programs.buckets.sample_rows)
            for variant in (Variant.GREEDY, Variant.RANDOM)
            for width in programs.buckets.widths_without_masks(size)
            for names in programs.inputs.logits_sets
        ]

    def rare(self, programs: "StepPrograms") -> Iterable[ProgramKey]:
        reported = (LogprobsKind.TOP, LogprobsKind.NAMED)
        scored = () if programs.full_logprobs else (Variant.RANDOM, Variant.MASKED)
        return [
            *self._of_each_size(programs, [(Variant.MASKED, LogprobsKind.NONE)]),
            *self._of_each_size(programs, [(variant, kind) for variant in scored for kind in reported]),
            *self._of_each_size(programs, [(Variant.FULL, kind) for kind in LogprobsKind]),
        ]

    def _of_each_size(self, programs: "StepPrograms", variants: Iterable[tuple[Variant, LogprobsKind]]) -> Iterable[ProgramKey]:
        return [
            ProgramKey(self.name, size, variant, kind, width, names)
            for size in programs.buckets.sample_rows
            for variant, kind in variants
            for width in programs.buckets.widths_of(size)
            for names in programs.inputs.logits_sets
        ]

    def rank(self, key: ProgramKey) -> int:
        return int(key.variant == Variant.FULL)

    def is_first(self, programs: "StepPrograms", key: ProgramKey) -> bool:
        return key.variant > Variant.GREEDY and key.size in first_sizes(programs.buckets.sample_rows, FIRST_SIZES)

    def is_needed(self, key: ProgramKey, wanted: Wanted) -> bool:
        return (key.variant, key.logprobs) == (wanted.variant, wanted.logprobs)

    def awaited(self, programs: "StepPrograms", wanted: Wanted) -> Iterable[Sequence[ProgramKey]]:
        """The largest, which stands in for the others: a step may sample any number of rows."""
        largest = programs.buckets.sample_rows[-1]
        return [(key,) for key in self.rare(programs) if key.size == largest and self.is_needed(key, wanted)]

    def is_storable(self, programs: "StepPrograms", key: ProgramKey) -> bool:
        """Not if a custom logits processor is compiled into it."""
        return key.variant != Variant.FULL or not programs.functions.processors

    def uses_peers(self, key: ProgramKey) -> bool:
        return key.variant < Variant.MASKED and key.logprobs == LogprobsKind.NONE

    def lower(self, programs: "StepPrograms", key: ProgramKey) -> Lowered:
        max_rows, words = programs.buckets.max_rows, num_words(programs.model.padded_vocab_size)
        state = programs.sampling_state if key.variant == Variant.FULL else None
        named_ids = programs.ints(key.size, MAX_LOGPROB_TOKEN_IDS) if key.logprobs == LogprobsKind.NAMED else None
        mask = programs.ints(key.size * key.width, words) if key.variant >= Variant.MASKED else None
        function = partial(programs.functions.sample, key.size, key.variant, key.logprobs, key.width, key.features)
        hidden_NWD = programs.shape(programs.sampled_shape, programs.model.dtype)
        columns_NC = programs.ints(max_rows, programs.inputs.num_columns)
        arguments = (programs.params, programs.rows, hidden_NWD, columns_NC, state, named_ids, mask, programs.workspace)
        return programs.lower_on_each(function, arguments, programs.replicated, donate=(1, 4))

    def run_on_nothing(self, runner: Any, key: ProgramKey, program: CompiledProgram) -> None:
        if key.variant < Variant.MASKED:
            hidden_NWD, columns_NC = runner.put(runner.shapes.nothing_to_sample())
            runner.row_arrays, *_ = program(
                runner.params, runner.row_arrays, hidden_NWD, columns_NC, None, None, None, runner.workspace
            )
