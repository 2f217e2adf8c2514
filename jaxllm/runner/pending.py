"""A step in flight: what the engine's loop holds between dispatching a step and reading its results."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import jax
import numpy as np

from jaxllm.runner.batch import Batch
from jaxllm.runner.consumers import Hidden, PendingPart
from jaxllm.scheduler_output import ModelRunnerOutput


@dataclass(slots=True)
class StepInFlight:
    """A dispatched step. Launches, which may run in a thread, fill in what they started on the device.

    A step with masked requests has two launches: `dispatch` starts the forward pass, `draw` samples under `mask_RW`.
    """

    batch: Batch
    launches: "list[Future[None]]" = field(default_factory=list)
    """Those in the thread, in order."""
    hidden: Hidden | None = None
    """Between the forward pass and sampling."""
    parts: Sequence[PendingPart] = ()
    errors: dict[str, str] = field(default_factory=dict)
    """Requests that failed alone, with the reason."""
    done: jax.Array | None = None
    """A small result to wait for, once all is launched."""
    mask_RW: np.ndarray | None = None
    """With masked requests: bit b of word w in row i allows token 32 w + b to request i of `sampled_ids`. Allows every token at
    first."""
    start_draw: "Callable[[StepInFlight], None] | None" = None
    """With masked requests, until `draw` is called."""

    @property
    def sampled_ids(self) -> list[str]:
        """The requests that get a token."""
        return [row.data.request_id for row in self.batch.sampled]

    def draw(self) -> None:
        """Start sampling under the current mask. Returns at once."""
        assert self.start_draw is not None, "drawn twice"
        start, self.start_draw = self.start_draw, None
        start(self)

    def take_hidden(self) -> Hidden:
        """The results of the forward pass, whose memory is released with the returned object."""
        hidden, self.hidden = self.hidden, None
        assert hidden is not None, "the forward pass was not launched"
        return hidden

    def start_copies(self) -> None:
        """Start copying the results to the host; each copy runs as soon as its result is ready."""
        for array in jax.tree.leaves([self.done, *(part.arrays for part in self.parts)]):
            array.copy_to_host_async()

    def result(self) -> ModelRunnerOutput:
        """Wait for the launches and the device, and return the results of the step.

        Raises the error of a launch, if any, and RuntimeError before `draw`.
        """
        for launched in self.launches:
            launched.result()
        if self.done is None:
            raise RuntimeError("the step was never drawn")
        np.asarray(self.done)
        output = ModelRunnerOutput({}, errors=self.errors)
        for part in self.parts:
            part.collect(output)
        return output
