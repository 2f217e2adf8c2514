"""`write_blocks`: block tables of long cached prefixes, which do not fit into a step's buffer."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from jaxllm.runner.batch import Batch
from jaxllm.runner.layout import padded
from jaxllm.runner.programs.key import ProgramKey
from jaxllm.runner.programs.kind import ProgramKind
from jaxllm.runner.split_program import Lowered

if TYPE_CHECKING:
    from jaxllm.runner.step_programs import StepPrograms

UPDATES_PER_WRITE = 1024
"""Block-table entries that one run sets."""


NO_UPDATE = padded((), (), UPDATES_PER_WRITE, padding=np.iinfo(np.int32).max)


def updates_of(batch: Batch) -> Iterator[tuple[np.ndarray]]:
    """The new blocks that the buffer of a batch has no room for, as the program takes them."""
    index, block = batch.extra_updates or ((), ())
    for first in range(0, len(index), UPDATES_PER_WRITE):
        part = slice(first, first + UPDATES_PER_WRITE)
        yield (padded(index[part], block[part], UPDATES_PER_WRITE, padding=np.iinfo(np.int32).max),)


class WriteBlocks(ProgramKind):
    """See `Body.write_blocks`."""

    name = "write_blocks"
    only = "common"

    def lower(self, programs: "StepPrograms", key: ProgramKey) -> Lowered:
        arguments = (programs.rows, programs.ints(2, UPDATES_PER_WRITE))
        return programs.lower_on_ranks(programs.functions.write_blocks, arguments, donate=(0,))
