"""`forward` and `decode` of a stage of a pipeline that others follow: they pass on what its layers leave."""

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from jaxllm.runner.programs.key import ProgramKey
from jaxllm.runner.programs.layers import DecodeProgram, MixedProgram
from jaxllm.runner.split_program import Lowered

if TYPE_CHECKING:
    from jaxllm.runner.step_programs import StepPrograms


class PassOnMixed(MixedProgram):
    """See `Body.pass_on`."""

    name = "forward"

    def lower(self, programs: "StepPrograms", key: ProgramKey) -> Lowered:
        function = partial(programs.functions.pass_on, self.layout(programs, key), None, key.features)
        return self.lower_layers(programs, key, function, 2)


class PassOnDecode(DecodeProgram):
    """One program for each number of rows, whatever is sampled later."""

    name = "decode"

    def common(self, programs: "StepPrograms") -> Iterable[ProgramKey]:
        sizes = reversed(programs.buckets.decode_rows if programs.model.generates else ())
        return [ProgramKey(self.name, size, features=names) for size in sizes for names in programs.inputs.decode_sets]

    def lower(self, programs: "StepPrograms", key: ProgramKey) -> Lowered:
        function = partial(programs.functions.pass_on, self.layout(programs, key), 1, key.features)
        return self.lower_layers(programs, key, function, 2)
