"""The programs of several parts of an engine, as one: see `jaxllm.engine.executor.ExecutorPrograms`."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxllm.runner.program_pool import ProgramPool


class AllPrograms:
    """Stages and the crossings between hosts have programs of their own, with keys of their own."""

    def __init__(self, parts: Sequence[ProgramPool[Any]]):
        self._parts = parts

    def __len__(self) -> int:
        return sum(len(part) for part in self._parts)

    @property
    def num_queued(self) -> int:
        return sum(part.num_queued for part in self._parts)

    @property
    def num_compiled(self) -> int:
        return sum(part.num_compiled for part in self._parts)

    @property
    def num_loaded(self) -> int:
        return sum(part.num_loaded for part in self._parts)

    @property
    def num_compiled_after_warmup(self) -> int:
        return sum(part.num_compiled_after_warmup for part in self._parts)

    @property
    def awaited(self) -> tuple[int, int]:
        ready, total = zip(*(part.awaited for part in self._parts), strict=True)
        return sum(ready), sum(total)

    def listen(self, on_made: Callable[[], None]) -> None:
        for part in self._parts:
            part.listen(on_made)

    def finish(self) -> None:
        for part in self._parts:
            part.finish()

    def shutdown(self) -> None:
        for part in self._parts:
            part.shutdown()
