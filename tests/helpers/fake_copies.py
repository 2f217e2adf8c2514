"""Copies between the memory of a FakeRunner and slots, during its steps: they take a random time, and may damage contents."""

import random
from collections import deque
from collections.abc import Iterable, Sequence, Set
from typing import Any

from jaxllm.device_ops import CopyBlocks, FinishedCopy, GatherBlocks, LoadBlocks

Block = list[Any]


class FakeCopies:
    """A copy reads and writes when it is over, so whatever is used too early or given away too soon has something else. Blocks that a load
    writes have nothing of use meanwhile."""

    block_bytes = 100

    def __init__(
        self, rng: random.Random, *, num_slots: int, num_staging: int = 4, max_blocks: int = 3, share_damaged: float = 0.0
    ):
        self.rng, self.num_slots, self.num_staging, self.max_blocks = rng, num_slots, num_staging, max_blocks
        self.share_damaged = share_damaged
        self.slots: list[tuple[Block, Block]] = [(["empty"], ["empty"])] * num_slots
        """The content of each slot, and what was stored."""
        self.staging: list[list[tuple[Block, Block]]] = [[]] * num_staging
        self.threads: tuple[deque[CopyBlocks], ...] = (deque(), deque())
        """Stores and loads under way, in order."""
        self.memory: list[Block] = []
        """That of the latest operation's runner."""
        self.num_written = 0
        self.is_stuck = False

    def run(self, op: CopyBlocks, memory: list[Block]) -> None:
        """Run the part that comes in the order of steps."""
        assert 0 < len(op.block_ids) == len(op.slots) <= self.max_blocks
        self.memory = memory
        if isinstance(op, GatherBlocks):
            in_use = {other.staging for other in self.threads[0] if isinstance(other, GatherBlocks)}
            assert op.staging not in in_use, "a staging buffer is in use"
            self.staging[op.staging] = [(list(memory[block]), list(memory[block])) for block in op.block_ids]
            self.threads[0].append(op)
        elif isinstance(op, LoadBlocks):
            for block in op.block_ids:
                memory[block] = ["partly written"] * len(memory[block])
            self.threads[1].append(op)

    def cancel(self, number: int) -> None:
        """See Copies."""
        kept = [op for op in self.threads[1] if op.number != number]
        self.threads[1].clear()
        self.threads[1].extend(kept)

    def is_right(self, content: Block, stored: Block) -> bool:
        """Whether the device finds that a content is what was stored."""
        return content == stored

    def finished(self) -> list[FinishedCopy]:
        """See Copies."""
        done: list[FinishedCopy] = []
        for thread in () if self.is_stuck else self.threads:
            while thread and self.rng.random() < 0.5:
                done.append(self._end(thread.popleft()))
        return done

    def _end(self, op: CopyBlocks) -> FinishedCopy:
        verdict: Sequence[bool] = ()
        if isinstance(op, GatherBlocks):
            for slot, (content, stored) in zip(op.slots, self.staging[op.staging], strict=True):
                is_damaged = self.rng.random() < self.share_damaged
                self.slots[slot] = (["damaged"] if is_damaged else content, stored)
        else:
            found = [self.slots[slot] for slot in op.slots]
            verdict = [self.is_right(content, stored) for content, stored in found]
            for block, (content, _), right in zip(op.block_ids, found, verdict, strict=True):
                if right:
                    self.memory[block] = list(content)
            self.num_written += sum(verdict)
        return FinishedCopy(op.number, verdict, 0.001)

    def wait(self, seconds: float) -> None:
        """Nothing would happen meanwhile."""
        raise AssertionError("a plan waits for copies")

    def wake(self) -> None:
        """Nothing waits."""

    def damage(self, wrong: Set[int], damaged: Any) -> None:
        """The values with these ids were computed wrongly. The devices' checksums are of what was computed."""

        def as_it_is(content: tuple[Block, Block]) -> tuple[Block, Block]:
            if wrong.isdisjoint(map(id, content[1])):
                return content
            found, stored = ([damaged if id(value) in wrong else value for value in block] for block in content)
            return found, stored

        self.slots[:] = map(as_it_is, self.slots)
        self.staging = [[as_it_is(content) for content in found] for found in self.staging]

    def start_over(self, failed: Iterable[CopyBlocks] = ()) -> None:
        """The copies under way end, and the buffers are lost. What was gathered with steps that failed is right in no way."""
        for thread in self.threads:
            while thread:
                self._end(thread.popleft())
        for op in failed:
            for slot in op.slots if isinstance(op, GatherBlocks) else ():
                self.slots[slot] = (["of a failed step"], ["of a failed step"])
        self.staging = [[]] * self.num_staging


class AlwaysWorth:
    """Any load is worth its time."""

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """See Rates."""

    def note_copy(self, num_blocks: int, seconds: float) -> None:
        """See Rates."""

    def step_seconds(self, num_tokens: int) -> float:
        return 0.0

    def is_worth_loading(self, num_blocks: int, num_tokens: int, seconds: float = 0.0) -> bool:
        return True
