"""Sleep: an engine without requests gives the device's memory back, and takes it again when it wakes up.

Level 1 keeps the weights in host memory, level 2 reads them again from the checkpoint. Both drop the KV cache. Memory goes back
to JAX's pool, for other arrays of this process; what the pool has reserved of a GPU, other processes do not get.
"""

import time
from collections.abc import Callable

import numpy as np
from flax import nnx

from jaxllm.engine.failures import explain, is_out_of_memory
from jaxllm.errors import InvalidRequestError, OutOfMemoryError
from jaxllm.log import logger
from jaxllm.runner.runner import ModelRunner

LEVELS = (1, 2)


class Sleep:
    """Whether an engine sleeps, and how deep. `load_weights` reads them from the checkpoint."""

    def __init__(self, runner: ModelRunner, load_weights: Callable[[], nnx.State]):
        self._runner = runner
        self._load_weights = load_weights
        self._weights: list[np.ndarray] | None = None
        """On the host, at level 1."""
        self.level = 0
        """0: awake."""

    def fall_asleep(self, level: int) -> None:
        """Give the memory back. No step may be in flight, and a deeper level than the present one deepens the sleep."""
        check_level(level)
        if level <= self.level:
            return
        runner = self._runner
        if level == 1:
            # Copied whole before any is dropped: with too little memory nothing is lost.
            self._weights = [np.array(array) for array in runner.params]
        else:
            self._weights = None
        runner.drop_caches()
        runner.drop_weights()
        self.level = level
        logger.info("the engine sleeps at level %d", level)

    def wake_up(self) -> None:
        """Take the memory again. Raises OutOfMemoryError or ModelLoadError, and sleeps on, if that cannot be."""
        if not self.level:
            return
        start = time.perf_counter()
        try:
            if self._weights is None:
                self._runner.set_weights(self._load_weights())
            else:
                self._runner.put_weights(self._weights)
            self._runner.start_over()
        except Exception as error:
            self._runner.drop_caches()
            self._runner.drop_weights()
            if is_out_of_memory(error):
                raise OutOfMemoryError(f"the engine cannot wake up: {explain(error)}") from error
            raise
        self._weights, self.level = None, 0
        logger.info("the engine is awake again after %.1f s", time.perf_counter() - start)


def check_level(level: int) -> None:
    """Raise InvalidRequestError unless there is such a level."""
    if level not in LEVELS or isinstance(level, bool):
        raise InvalidRequestError(f"level is {level!r}, must be 1 (weights to the host) or 2 (weights dropped)", "level")
