"""A runner without a model: its KV cache holds, in each slot, a digest of all tokens up to that position, and the group it is of.

Whatever a request reads is compared with the digest of what it should read, so a block that was shared wrongly, reused
too early or never written shows itself in the step that reads it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxllm.cache_policy import CachePolicy, WindowPolicy
from jaxllm.outputs import EngineCoreOutput
from jaxllm.scheduler.scheduler import Scheduler
from jaxllm.scheduler_output import ModelRunnerOutput, NewRequestData, SchedulerOutput

_MASK = (1 << 61) - 1
NOTHING = (-1, -1)


def digest(previous: int, token_id: int) -> int:
    """The digest of a sequence from that of all but its last token."""
    return (previous * 6364136223846793005 + token_id * 1442695040888963407 + 12345) % _MASK


def next_token(last_digest: int, vocab_size: int) -> int:
    """The token that the fake model draws after a sequence."""
    return (last_digest >> 7) % vocab_size


def oracle_tokens(prompt: list[int], count: int, vocab_size: int, ends: frozenset[int] = frozenset()) -> list[int]:
    """The output of a request: `count` tokens, or fewer up to one of `ends`."""
    last, output = 0, []
    for token_id in prompt:
        last = digest(last, token_id)
    while len(output) < count and not (output and output[-1] in ends):
        output.append(next_token(last, vocab_size))
        last = digest(last, output[-1])
    return output


def digests(token_ids: list[int]) -> list[int]:
    """The digest of a sequence up to each of its tokens."""
    found = [0]
    for token_id in token_ids:
        found.append(digest(found[-1], token_id))
    return found[1:]


@dataclass
class _Row:
    token_ids: list[int]
    block_ids: list[list[int]]
    """By group."""
    num_computed: int
    num_cached: int
    pools: bool = False
    digests: list[int] = field(default_factory=list)

    def digest_at(self, position: int) -> int:
        while len(self.digests) <= position:
            previous = self.digests[-1] if self.digests else 0
            self.digests.append(digest(previous, self.token_ids[len(self.digests)]))
        return self.digests[position]


class FakeRunner:
    """Runs steps in the order of `dispatch`, as a device does. The vector of a pooling request is the digests of its prompt."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        max_num_seqs: int,
        max_tokens: int,
        policies: Sequence[CachePolicy],
    ):
        self.block_size, self.vocab_size, self.policies = block_size, vocab_size, policies
        self.max_num_seqs, self.max_tokens = max_num_seqs, max_tokens
        self.memory = [[NOTHING] * block_size for _ in range(num_blocks)]
        self.rows: dict[str, _Row] = {}
        self.num_computed_tokens = 0

    def dispatch(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run a step."""
        for request_id in (*plan.finished_request_ids, *plan.preempted_request_ids):
            self.rows.pop(request_id, None)
        for data in plan.new_requests:
            self._admit(data)
        num_known = len(plan.rows) - len(plan.new_requests)
        for planned in plan.rows[:num_known]:
            row = self.rows[planned.request_id]
            self._extend(row, planned.new_blocks)
            assert row.num_computed == planned.start
        assert [planned.request_id for planned in plan.rows[num_known:]] == [data.request_id for data in plan.new_requests]
        assert len(plan.num_scheduled_tokens) == len(plan.rows)
        assert 0 < plan.num_tokens == sum(planned.num_tokens for planned in plan.rows) <= self.max_tokens
        assert len(self.rows) <= self.max_num_seqs
        for request_id, count in plan.num_scheduled_tokens.items():
            self._write(self.rows[request_id], count)
        sampled, pooled = {}, {}
        for request_id, count in plan.num_scheduled_tokens.items():
            row = self.rows[request_id]
            self._check_reads(row, count)
            row.num_computed += count
            if row.num_computed == len(row.token_ids) and row.pools:
                pooled[request_id] = np.array(row.digests[: row.num_computed])
            elif row.num_computed == len(row.token_ids):
                sampled[request_id] = [next_token(row.digest_at(row.num_computed - 1), self.vocab_size)]
                row.token_ids += sampled[request_id]
        self.num_computed_tokens += plan.num_tokens
        return ModelRunnerOutput(sampled, pooled=pooled)

    def start_over(self) -> None:
        """Drop rows and memory."""
        self.rows.clear()
        self.memory = [[NOTHING] * self.block_size for _ in self.memory]

    def _admit(self, data: NewRequestData) -> None:
        assert data.request_id not in self.rows
        assert data.num_cached_tokens - data.num_computed_tokens in (0, 1)
        tables: list[list[int]] = [[] for _ in self.policies]
        row = _Row(list(data.token_ids), tables, data.num_computed_tokens, data.num_cached_tokens)
        self._extend(row, data.block_ids)
        row.pools = data.pooling_params is not None
        self.rows[data.request_id] = row

    def _extend(self, row: _Row, new_ids: list[int]) -> None:
        """Add the new blocks, as many for each group, group by group."""
        count, rest = divmod(len(new_ids), len(self.policies))
        assert rest == 0
        for group, table in enumerate(row.block_ids):
            table += new_ids[group * count : (group + 1) * count]

    def _slot(self, row: _Row, group: int, position: int) -> tuple[list[tuple[int, int]], int]:
        block_id = row.block_ids[group][position // self.block_size]
        assert block_id != 0
        return self.memory[block_id], position % self.block_size

    def _write(self, row: _Row, count: int) -> None:
        assert count > 0 and row.num_computed + count <= len(row.token_ids)
        for group in range(len(self.policies)):
            for position in range(max(row.num_computed, row.num_cached), row.num_computed + count):
                block, offset = self._slot(row, group, position)
                block[offset] = (group, row.digest_at(position))

    def _check_reads(self, row: _Row, count: int) -> None:
        """The next `count` tokens read all tokens before them, or those in the window of their group."""
        for group, policy in enumerate(self.policies):
            first = max(0, row.num_computed + 1 - policy.window) if isinstance(policy, WindowPolicy) else 0
            for position in range(first, row.num_computed + count):
                block, offset = self._slot(row, group, position)
                assert block[offset] == (group, row.digest_at(position)), f"position {position} holds something else"


class FakeEngine:
    """Scheduler and fake runner with up to `depth` steps in flight."""

    def __init__(self, scheduler: Scheduler, *, vocab_size: int = 1000, depth: int = 1):
        self.scheduler, self.depth = scheduler, depth
        self.runner = FakeRunner(
            num_blocks=len(scheduler.cache_manager.pool.blocks),
            block_size=scheduler.cache_manager.block_size,
            vocab_size=vocab_size,
            max_num_seqs=scheduler.max_num_seqs,
            max_tokens=scheduler.max_num_batched_tokens,
            policies=scheduler.cache_manager.policies,
        )
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.plans: list[SchedulerOutput] = []

    def dispatch(self) -> None:
        """Plan and start steps until `depth` are in flight or nothing can be planned."""
        while len(self.in_flight) < self.depth:
            plan = self.scheduler.schedule()
            self.scheduler.check_integrity()
            if plan.num_tokens == 0:
                break
            self.plans.append(plan)
            self.in_flight.append((plan, self.runner.dispatch(plan)))

    def collect(self) -> list[EngineCoreOutput]:
        """Take in the oldest step in flight."""
        if not self.in_flight:
            return []
        outputs = self.scheduler.update_from_output(*self.in_flight.popleft())
        self.scheduler.check_integrity()
        return outputs

    def start_over(self) -> None:
        """What a failed step leads to: nothing in flight comes back, and the runner has forgotten everything."""
        self.in_flight.clear()
        self.scheduler.start_over()
        self.runner.start_over()

    def step(self) -> list[EngineCoreOutput]:
        """Keep `depth` steps in flight and take in the oldest."""
        self.dispatch()
        return self.collect()

    def run(self) -> dict[str, list[int]]:
        """Step until every request has ended. Returns their tokens."""
        tokens: dict[str, list[int]] = {}
        while self.scheduler.has_requests():
            self.dispatch()
            assert self.in_flight, "requests wait and nothing runs"
            for output in self.collect():
                tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
        while self.in_flight:
            assert self.collect() == []
        return tokens
