"""A step whose model runs already and whose tokens are drawn once the masks of its rows are known."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from jaxllm.scheduler_output import ModelRunnerOutput


class Launched(Protocol):
    """A step on its way."""

    def result(self) -> ModelRunnerOutput: ...


class MaskedStep:
    """Between dispatch and draw. Row i of `mask_RW` belongs to sampled_ids[i]: bit b of word w allows token 32 w + b."""

    def __init__(self, sampled_ids: Sequence[str], mask_RW: np.ndarray, draw: Callable[[np.ndarray], Launched]):
        """`mask_RW` allows everything; `draw` starts the drawing with it."""
        self.sampled_ids = sampled_ids
        self.mask_RW = mask_RW
        self._draw = draw
        self._drawing: Launched | None = None

    def draw(self) -> None:
        """Start to draw, under the mask as it is now. Returns at once."""
        assert self._drawing is None, "drawn twice"
        self._drawing = self._draw(self.mask_RW)

    def result(self) -> ModelRunnerOutput:
        """What the step computed. Waits for the device. Raises RuntimeError before `draw`."""
        if self._drawing is None:
            raise RuntimeError("the step was never drawn")
        return self._drawing.result()
