"""`new_state` and `admit`: what full sampling keeps of requests, zeroed, and one request's part of it."""

from typing import TYPE_CHECKING

from jaxllm.runner.programs.key import ProgramKey
from jaxllm.runner.programs.kind import ProgramKind, Wanted
from jaxllm.runner.split_program import Lowered
from jaxllm.sampling.state import admit, num_words
from jaxllm.sampling.variants import needs_state

if TYPE_CHECKING:
    from jaxllm.runner.step_programs import StepPrograms


class _StateProgram(ProgramKind):
    only = "rare"

    def is_needed(self, key: ProgramKey, wanted: Wanted) -> bool:
        return needs_state(wanted.params)

    def is_storable(self, programs: "StepPrograms", key: ProgramKey) -> bool:
        """Not if a custom logits processor shapes the state."""
        return not programs.functions.processors


class NewState(_StateProgram):
    """Allocates the state of all rows."""

    name = "new_state"

    def lower(self, programs: "StepPrograms", key: ProgramKey) -> Lowered:
        return programs.lower_on_ranks(programs.make_state, ())


class Admit(_StateProgram):
    """See `sampling.state.admit`."""

    name = "admit"

    def lower(self, programs: "StepPrograms", key: ProgramKey) -> Lowered:
        state = programs.sampling_state
        arguments = (state, programs.ints(), programs.ints(num_words(state)))
        return programs.lower_on_ranks(admit, arguments, donate=(0,))
