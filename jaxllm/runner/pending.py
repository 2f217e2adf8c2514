"""Steps in flight: what the engine's loop holds between dispatching a step and reading its results."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import jax
import numpy as np

from jaxllm.runner.consumers import PendingPart
from jaxllm.scheduler_output import ModelRunnerOutput


@dataclass(frozen=True)
class PendingStep:
    """A step in flight."""

    done: jax.Array
    """A small result to wait for."""
    parts: Sequence[PendingPart]
    errors: dict[str, str]
    """Requests that failed alone, with the reason."""

    def start_copies(self) -> None:
        """Start copying the results to the host; each copy runs as soon as its result is ready."""
        for array in jax.tree.leaves([self.done, *(part.arrays for part in self.parts)]):
            array.copy_to_host_async()

    def result(self) -> ModelRunnerOutput:
        """Wait for the device and return the results of the step."""
        np.asarray(self.done)
        output = ModelRunnerOutput({}, errors=self.errors)
        for part in self.parts:
            part.collect(output)
        return output


@dataclass(frozen=True)
class LaunchingStep:
    """A step that a thread is launching."""

    launched: "Future[PendingStep]"

    def result(self) -> ModelRunnerOutput:
        """Wait for the launch and the device, and return the results of the step. Raises the launch's error, if any."""
        return self.launched.result().result()
