"""`forward_rows`: the model over one token of each row, which another program samples."""

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from jaxllm.runner.programs.key import ProgramKey
from jaxllm.runner.programs.kind import Wanted
from jaxllm.runner.programs.layers import DecodeProgram
from jaxllm.runner.split_program import Lowered

if TYPE_CHECKING:
    from jaxllm.runner.step_programs import StepPrograms


class ForwardRows(DecodeProgram):
    """See `StepFunctions.forward_rows`."""

    name = "forward_rows"
    is_hurried = True

    def rare(self, programs: "StepPrograms") -> Iterable[ProgramKey]:
        sizes = programs.buckets.rows_apart
        return [ProgramKey(self.name, size, features=names) for size in sizes for names in programs.inputs.decode_sets]

    def is_needed(self, key: ProgramKey, wanted: Wanted) -> bool:
        return wanted.is_sampled_apart

    def lower(self, programs: "StepPrograms", key: ProgramKey) -> Lowered:
        function = partial(programs.functions.forward_rows, self.layout(programs, key), key.features)
        return self.lower_layers(programs, key, function, 4)
