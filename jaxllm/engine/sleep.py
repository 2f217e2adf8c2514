"""Sleep: an engine without requests releases its device memory, and allocates it again on wake-up.

Level 1 keeps the weights in host memory, level 2 reads them again from the checkpoint. Both drop the KV cache. The memory
returns to JAX's pool, for other arrays of this process. Other processes cannot use memory that the pool has reserved on a GPU.
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxllm.device_errors import is_out_of_memory
from jaxllm.engine.failures import explain
from jaxllm.errors import InvalidRequestError, OutOfMemoryError
from jaxllm.log import logger

if TYPE_CHECKING:
    from jaxllm.engine.executor import Executor, MemoryPart

LEVELS = (1, 2)
TAGS: "tuple[MemoryPart, ...]" = ("weights", "kv_cache")
"""Parts that can be woken up separately, in this order."""


class Sleep:
    """The sleep state of an engine."""

    def __init__(self, executor: "Executor"):
        self._executor = executor
        self.level = 0
        """0: awake. At level 1 the executor keeps copies of the weights on the host."""
        self._awake = set(TAGS)
        """Tags whose memory is allocated."""

    def fall_asleep(self, level: int) -> None:
        """Release the memory. No step may be in flight. A deeper level than the current one releases more."""
        check_level(level)
        if level <= self.level and not self._awake:
            return
        executor = self._executor
        if level == 2:
            executor.memory("drop", "copies")
            self.level = 2
        elif "weights" in self._awake:
            # Copy all weights before dropping any, so that none is lost if memory runs out.
            executor.memory("keep", "weights")
            self.level = 1
        for part in reversed(TAGS):
            executor.memory("drop", part)
        self._awake = set()
        logger.info("the engine sleeps at level %d", self.level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the memory again, or that of some TAGS only. The engine sleeps until all tags have their memory.

        Raises InvalidRequestError for an unknown tag. Raises OutOfMemoryError or ModelLoadError if that fails; the engine then
        stays asleep.
        """
        check_tags(tags)
        if not self.level:
            return
        start = time.perf_counter()
        wanted = [tag for tag in TAGS if tag not in self._awake and (not tags or tag in tags)]
        try:
            for tag in wanted:
                self._executor.memory("restore", tag)
        except Exception as error:
            for tag in wanted:
                self._executor.memory("drop", tag)
            if is_out_of_memory(error):
                raise OutOfMemoryError(f"the engine cannot wake up: {explain(error)}") from error
            raise
        self._awake.update(wanted)
        if "weights" in self._awake:
            self._executor.memory("drop", "copies")
        if len(self._awake) == len(TAGS):
            self.level = 0
            logger.info("the engine is awake again after %.1f s", time.perf_counter() - start)


def check_tags(tags: Sequence[str] | None) -> None:
    """Raise InvalidRequestError unless all of these are TAGS."""
    if unknown := [tag for tag in tags or () if tag not in TAGS]:
        raise InvalidRequestError(f"tags has {unknown[0]!r}, known are {' and '.join(TAGS)}", "tags")


def check_level(level: int) -> None:
    """Raise InvalidRequestError unless there is such a level."""
    if level not in LEVELS or isinstance(level, bool):
        raise InvalidRequestError(f"level is {level!r}, must be 1 (weights to the host) or 2 (weights dropped)", "level")
