"""`write_blocks`: block tables of long cached prefixes, which do not fit into a step's buffer."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import jax

from jaxllm.runner.programs.key import ProgramKey
from jaxllm.runner.programs.kind import ProgramKind
from jaxllm.runner.split_program import Lowered

if TYPE_CHECKING:
    from jaxllm.runner.step_programs import StepPrograms

UPDATES_PER_WRITE = 1024
"""Block-table entries that one run sets."""


class WriteBlocks(ProgramKind):
    """See `Body.write_blocks`."""

    name = "write_blocks"

    def common(self, programs: "StepPrograms") -> Iterable[ProgramKey]:
        return [ProgramKey(self.name)]

    def lower(self, programs: "StepPrograms", key: ProgramKey) -> Lowered:
        program = jax.jit(programs.functions.write_blocks, donate_argnums=0, out_shardings=programs.replicated)
        return program.lower(programs.rows, programs.ints(2, UPDATES_PER_WRITE))
