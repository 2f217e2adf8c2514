"""`decode`: the model and sampling for every row, in one program."""

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from jaxllm.runner.programs.key import ProgramKey
from jaxllm.runner.programs.kind import first_sizes
from jaxllm.runner.programs.layers import DecodeProgram
from jaxllm.runner.split_program import Lowered
from jaxllm.sampling.variants import Variant

if TYPE_CHECKING:
    from jaxllm.runner.step_programs import StepPrograms

FIRST_SIZES = (8, 64)


class Decode(DecodeProgram):
    """See `StepFunctions.decode`."""

    name = "decode"
    draws = True

    def common(self, programs: "StepPrograms") -> Iterable[ProgramKey]:
        return [
            ProgramKey(self.name, size, variant, width=width, features=names)
            for size in reversed(programs.buckets.decode_rows)
            for variant in (Variant.GREEDY, Variant.RANDOM)
            for width in programs.buckets.widths_without_masks(size)
            for names in programs.inputs.decode_sets
        ]

    def is_first(self, programs: "StepPrograms", key: ProgramKey) -> bool:
        return key.variant > Variant.GREEDY and key.size in first_sizes(programs.buckets.decode_rows, FIRST_SIZES)

    def lower(self, programs: "StepPrograms", key: ProgramKey) -> Lowered:
        function = partial(programs.functions.decode, self.layout(programs, key), key.variant, key.width, key.features)
        return self.lower_layers(programs, key, function, 2)
