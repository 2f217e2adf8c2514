"""`forward`: the model over a mixed step."""

from functools import partial
from typing import TYPE_CHECKING

from jaxllm.runner.programs.key import ProgramKey
from jaxllm.runner.programs.kind import first_sizes
from jaxllm.runner.programs.layers import MixedProgram
from jaxllm.runner.split_program import Lowered

if TYPE_CHECKING:
    from jaxllm.runner.step_programs import StepPrograms

FIRST_SIZES = (128, 1024)


class Forward(MixedProgram):
    """See `StepFunctions.forward`."""

    name = "forward"

    def is_first(self, programs: "StepPrograms", key: ProgramKey) -> bool:
        return key.size in first_sizes(programs.buckets.tokens, FIRST_SIZES)

    def lower(self, programs: "StepPrograms", key: ProgramKey) -> Lowered:
        function = partial(programs.functions.forward, self.layout(programs, key), key.features)
        return self.lower_layers(programs, key, function, 4 + programs.functions.latest.num_shown)
