"""Copies that the benchmark makes, in place of an engine's tier."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from jaxllm import LLM
from jaxllm.device_ops import CopyBlocks, FinishedCopy, GatherBlocks, LoadBlocks
from jaxllm.scheduler_output import SchedulerOutput
from scripts.tier_bench.engines import without_tiers


class Copies:
    """Copies of some blocks of an engine that is idle at first. They hold these, and the engine's tier does nothing, until `close`."""

    def __init__(self, llm: LLM):
        self.core: Any = llm.llm_engine.core
        self._without = ExitStack()
        self._without.enter_context(without_tiers(llm))
        self.copier = self.core.runner.op_runner(GatherBlocks)
        pool = self.core.scheduler.cache_manager.pool
        self.size = min(self.copier.max_blocks, self.copier.num_slots // 2, pool.num_free_blocks // 2)
        self._held = pool.allocate(self.size)
        self.blocks = [block.block_id for block in self._held]
        self._number = 0
        self._under_way: set[int] = set()
        self._buffer = 0

    def close(self) -> None:
        """Give blocks and tier back. What host memory had is overwritten: `empty` drops it."""
        self.forget()
        self.core.scheduler.cache_manager.pool.free(self._held)
        self._without.close()

    def _next(self) -> tuple[int, int, list[int]]:
        self._number += 1
        self._buffer = (self._buffer + 1) % self.copier.num_staging
        first = self._number * self.size % (self.copier.num_slots - self.size)
        return self._number, self._buffer, list(range(first, first + self.size))

    def gathers(self) -> CopyBlocks:
        number, buffer, slots = self._next()
        return GatherBlocks(number, self.blocks, slots, buffer)

    def loads(self) -> CopyBlocks:
        number, _, slots = self._next()
        return LoadBlocks(number, self.blocks, slots)

    def time(self, op: CopyBlocks) -> tuple[float, float]:
        """Seconds until it is over, and those of the transfer in it."""
        began = time.perf_counter()
        self._dispatch([op])
        while True:
            self.copier.wait(1.0)
            for copy in self._taken():
                if copy.number == op.number:
                    return time.perf_counter() - began, copy.seconds

    def _dispatch(self, ops: Sequence[CopyBlocks]) -> None:
        self.core.runner.dispatch(SchedulerOutput([], [], 0, [], [], ops=tuple(ops))).result()

    def _taken(self) -> list[FinishedCopy]:
        found: list[FinishedCopy] = self.copier.finished()
        for copy in found:
            if copy.error is not None:
                raise copy.error
        return found

    def pipelined_loads(self, count: int) -> int:
        """Load, all in one plan. Returns the number of batches."""
        self._dispatch([self.loads() for _ in range(count)])
        num_done = 0
        while num_done < count:
            self.copier.wait(1.0)
            num_done += len(self._taken())
        return num_done

    def pipelined_stores(self, count: int) -> int:
        """Gather and copy, with all buffers in use. Returns the number of batches."""
        buffers, buffer_of, num_done = list(range(self.copier.num_staging)), dict[int, int](), 0
        while num_done < count:
            over = [buffer_of.pop(copy.number) for copy in self._taken()]
            buffers += over
            num_done += len(over)
            if buffers and num_done + len(buffer_of) < count:
                number, _, slots = self._next()
                buffer_of[number] = buffers.pop()
                self._dispatch([GatherBlocks(number, self.blocks, slots, buffer_of[number])])
            elif num_done < count:
                self.copier.wait(1.0)
        return num_done

    def go_on(self, begin: Callable[[], CopyBlocks] | None, most: int | None = None) -> tuple[int, int]:
        """Have the next plan carry copies, as many as there are buffers for stores, at most so many. Returns how many were over, and how
        many begin."""
        over = {copy.number for copy in self._taken()}
        self._under_way -= over
        num_begun = 0
        while begin is not None and len(self._under_way) < self.copier.num_staging - 1 and (most is None or num_begun < most):
            op = begin()
            self._under_way.add(op.number)
            self.core.ops.add(op)
            num_begun += 1
        return len(over), num_begun

    def forget(self) -> None:
        """Wait for what is under way."""
        while self._under_way:
            self.copier.wait(1.0)
            self._under_way -= {copy.number for copy in self._taken()}
