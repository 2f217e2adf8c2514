"""A step whose forward pass is already dispatched and whose tokens are sampled once the masks of its rows are known."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from jaxllm.scheduler_output import ModelRunnerOutput


class Launched(Protocol):
    """A step in flight."""

    def result(self) -> ModelRunnerOutput: ...


class MaskedStep:
    """Between dispatch and draw. Row i of `mask_RW` belongs to sampled_ids[i]: bit b of word w allows token 32 w + b."""

    def __init__(self, sampled_ids: Sequence[str], mask_RW: np.ndarray, draw: Callable[[np.ndarray], Launched]):
        """`mask_RW` initially allows every token; `draw` starts sampling with it."""
        self.sampled_ids = sampled_ids
        self.mask_RW = mask_RW
        self._draw = draw
        self._drawing: Launched | None = None

    def draw(self) -> None:
        """Start sampling under the current mask. Returns at once."""
        assert self._drawing is None, "drawn twice"
        self._drawing = self._draw(self.mask_RW)

    def result(self) -> ModelRunnerOutput:
        """Wait for the device and return the results of the step. Raises RuntimeError before `draw`."""
        if self._drawing is None:
            raise RuntimeError("the step was never drawn")
        return self._drawing.result()
