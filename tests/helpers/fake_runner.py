"""A runner without a model: its KV cache holds, in each slot, a digest of all tokens up to that position, and the group it is of.

Whatever a request reads is compared with the digest of what it should read, so a block that was shared wrongly, reused
too early or never written shows itself in the step that reads it. Drafts that are wrong leave digests of wrong tokens behind.

Requests that get no row take no part in their steps. Until the results that say so are processed, others may read the blocks that they
were to write: whoever does draws wrong tokens from then on, and leaves wrong digests behind.
"""

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxllm.cache_policy import CachePolicy, WindowPolicy
from jaxllm.data_parallel.scheduler import RanksScheduler
from jaxllm.device_ops import DeviceOp, DropStaged, LoadBlocks, LoadState, RankOp, StoreState, WriteAdapter, run_ops
from jaxllm.engine.op_queue import OpQueue
from jaxllm.outputs import EngineCoreOutput
from jaxllm.ranks_plan import RanksPlan
from jaxllm.request import Request
from jaxllm.scheduler.draft_counts import DraftCounts
from jaxllm.scheduler.encoder_cache import EncoderCache
from jaxllm.scheduler.results import Share
from jaxllm.scheduler.scheduler import Scheduler
from jaxllm.scheduler_output import NO_ADAPTER, ModelRunnerOutput, NewRequestData, RowStep, SchedulerOutput
from tests.helpers.fake_items import FakeDevice, ItemToken
from tests.helpers.fake_tier import FakeTier

_MASK = (1 << 61) - 1
NOTHING, DAMAGED, MISLED = (-1, -1), (-2, -2), (-3, -3)


def digest(previous: int, token_id: int) -> int:
    """The digest of a sequence from that of all but its last token."""
    return (previous * 6364136223846793005 + token_id * 1442695040888963407 + 12345) % _MASK


def next_token(last_digest: int, vocab_size: int) -> int:
    """The token that the fake model draws after a sequence."""
    return (last_digest >> 7) % vocab_size


def oracle_tokens(
    prompt: list[int], count: int, vocab_size: int, ends: frozenset[int] = frozenset(), adapter: int = 0
) -> list[int]:
    """The output of a request: `count` tokens, or fewer up to one of `ends`. adapter: what its digests start from."""
    last, output = adapter, list[int]()
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


class RandomDrafts:
    """A DraftControl without any sense. It knows which requests have not ended, and with which share of right drafts."""

    def __init__(
        self,
        rng: random.Random,
        *,
        num_drafts: int,
        num_lookahead: int = 0,
        share_right: float = 0.5,
        fits_rows: bool = False,
    ):
        self.rng, self.num_drafts, self.num_lookahead, self.share_right = rng, num_drafts, num_lookahead, share_right
        self.fits_rows = fits_rows
        self.counts = DraftCounts(num_drafts)
        self.num_now = 0

    def most(self, num_running: int, running: Sequence[Request] = ()) -> int:
        """See DraftControl."""
        assert num_running >= 0
        self.num_now = self.rng.choice([0, *[self.num_drafts] * 4, self.rng.randint(0, self.num_drafts)])
        return self.num_now

    def of(self, request: Request) -> int:
        """See DraftControl."""
        asked = request.sampling_params.num_speculative_tokens
        most = self.num_drafts if asked is None else min(asked, self.num_drafts)
        return self.rng.choice([most, self.rng.randint(0, most)])

    def note(self, shares: Iterable[Share], result: ModelRunnerOutput) -> None:
        """See DraftControl."""
        for _, num_samples, row in shares:
            sampled = result.sampled_token_ids.get(row.request_id, [])
            assert len(sampled) <= num_samples and result.num_drafts.get(row.request_id, 0) <= row.num_drafts
            if sampled:
                self.counts.note(result.num_drafts[row.request_id], len(sampled) - 1)

    def note_seconds(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """See DraftControl."""

    def forget(self, request_id: str) -> None:
        """See DraftControl."""


@dataclass
class _Row:
    token_ids: list[int]
    block_ids: list[list[int]]
    """By group."""
    num_computed: int
    num_cached: int
    pools: bool = False
    digests: list[int] = field(default_factory=list)
    has_drafts: bool = False
    """Whether drafts were proposed behind its latest token."""
    adapter: int = 0
    """Initial value of its digests."""
    adapter_slot: int = NO_ADAPTER
    state: int | None = None
    """The digest that its state has, if there are states by row; None: what an earlier owner left."""
    item_at: dict[int, ItemToken] = field(default_factory=dict)
    """By position, where items stand. In `token_ids` their embeddings stand for the placeholder tokens."""
    is_misled: bool = False
    """Whether it read what was never written."""

    def digest_at(self, position: int) -> int:
        while len(self.digests) <= position:
            previous = self.digests[-1] if self.digests else self.adapter
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
        drafts: RandomDrafts | None = None,
        rank: int = 0,
        num_state_blocks: int = 0,
    ):
        """num_state_blocks: blocks that hold the state of a row; 0: there are no states."""
        self.device = FakeDevice(rank=rank)
        self.num_state_blocks = num_state_blocks
        self.state_ops: list[StoreState | LoadState] = []
        self.load_ops: list[LoadBlocks] = []
        """Operations of the plan."""
        self.drafts = drafts
        self.block_size, self.vocab_size, self.policies = block_size, vocab_size, policies
        self.max_num_seqs, self.max_tokens = max_num_seqs, max_tokens
        self.memory = [[NOTHING] * block_size for _ in range(num_blocks)]
        self.rows: dict[str, _Row] = {}
        self.written: dict[str, list[tuple[int, int, tuple[Any, ...]]]] = {}
        """Writes of each request since its first admission: block, offset and value."""
        self.num_computed_tokens = 0
        self.slots: list[int] = []
        """Initial value of digests by adapter slot."""
        self.staged: dict[int, int] = {}
        """Initial value of digests by the handle of an adapter that is being copied to a slot."""
        self.gets_no_row: Callable[[str], bool] = lambda request_id: False
        """Whether a request that is admitted gets no row."""
        self.unreported: set[int] = set()
        """Steps in which some got none, until their results are processed."""

    def stage(self, handle: int, data: np.ndarray) -> None:
        """See Executor. The data is what digests start from."""
        self.staged[handle] = int(data)

    def _run_op(self, op: DeviceOp) -> list[None]:
        if isinstance(op, WriteAdapter):
            self.slots[op.slot] = self.staged.pop(op.staged)
        elif isinstance(op, DropStaged):
            self.staged.pop(op.staged, None)
        elif isinstance(op, StoreState | LoadState):
            self.state_ops.append(op)
        elif isinstance(op, LoadBlocks):
            self.load_ops.append(op)
        else:
            self.device.run(op, self.memory)
        return []

    def dispatch(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run operations and a step."""
        self.device.begin_step()
        run_ops(plan.ops, self._run_op)
        if plan.ops and not plan.rows:
            self._run_state_ops()
            return ModelRunnerOutput({})
        for request_id in (*plan.finished_request_ids, *plan.preempted_request_ids):
            self.rows.pop(request_id, None)
        for request_id in plan.finished_request_ids:
            self.written.pop(request_id, None)
        errors = {data.request_id: "it got no row" for data in plan.new_requests if self.gets_no_row(data.request_id)}
        if errors:
            self.unreported.add(plan.step_id)
        for data in plan.new_requests:
            if data.request_id not in errors:
                self._admit(data)
        self._run_state_ops()
        num_known = len(plan.rows) - len(plan.new_requests)
        for planned in plan.rows[:num_known]:
            row = self.rows.get(planned.request_id)
            if row is None:
                assert self.unreported, "a request without a row is planned on"
                continue
            self._extend(row, planned.new_blocks)
            if planned.start + 1 == len(row.token_ids):
                self.device.check_costs()  # it decodes
            assert row.num_computed == planned.start or self.drafts is not None and row.num_computed < planned.start
        assert [planned.request_id for planned in plan.rows[num_known:]] == [data.request_id for data in plan.new_requests]
        assert len(plan.num_scheduled_tokens) == len(plan.rows)
        assert plan.num_tokens or plan.ops
        assert plan.num_tokens == sum(planned.num_tokens for planned in plan.rows) <= self.max_tokens
        assert len(self.rows) <= self.max_num_seqs
        rows = [planned for planned in plan.rows if planned.request_id in self.rows]
        for planned in rows:
            row = self.rows[planned.request_id]
            assert row.adapter_slot == NO_ADAPTER or self.slots[row.adapter_slot] == row.adapter, (
                "another adapter is in its slot"
            )
        foreseen = {planned.request_id: self._draft(self.rows[planned.request_id], planned) for planned in rows}
        for planned in rows:
            row, wrong = self.rows[planned.request_id], planned.num_drafts - len(foreseen[planned.request_id])
            row.token_ids += foreseen[planned.request_id]
            self._write(planned.request_id, row, planned.num_tokens - wrong, wrong)
        sampled, pooled, num_drafts = {}, {}, {}
        for planned in rows:
            request_id, count = planned.request_id, planned.num_tokens - planned.num_drafts
            row, right = self.rows[request_id], foreseen[request_id]
            count += len(right)
            was_misled = row.is_misled
            self._check_reads(row, count)
            if self.num_state_blocks:
                self._check_state(row, count)
            if row.is_misled and not was_misled:
                self._write(request_id, row, count, 0)
            row.num_computed += count
            if row.num_computed == len(row.token_ids) and row.pools:
                pooled[request_id] = np.array([*row.digests[: row.num_computed], *[0] * row.is_misled])
            elif row.num_computed == len(row.token_ids):
                drawn = next_token(row.digest_at(row.num_computed - 1), self.vocab_size)
                drawn = (drawn + row.is_misled) % self.vocab_size
                row.token_ids.append(drawn)
                sampled[request_id], num_drafts[request_id] = [*right, drawn], planned.num_drafts
                row.has_drafts = plan.num_drafts > 0 or (self.drafts is not None and self.drafts.fits_rows)
                if row.has_drafts:
                    self._spoil(row)
        self.num_computed_tokens += plan.num_tokens
        return ModelRunnerOutput(sampled, num_drafts, pooled=pooled, errors=errors)

    def _run_state_ops(self) -> None:
        """Loads of states, then stores, then loads of blocks that have another owner from now on."""
        ops = [op for op in self.state_ops if op.request_id in self.rows]
        for op in ops:
            if isinstance(op, LoadState):
                found = [self.memory[block] for block in op.block_ids]
                assert len(found) == self.num_state_blocks
                row, state = self.rows[op.request_id], found[0][0][-1]
                is_state = found == [[("state", index, state)] * self.block_size for index in range(len(found))]
                self._expect(row, is_state, "blocks have no state, or parts of several")
                row.state = state
        for op in ops:
            if isinstance(op, StoreState):
                state = self.rows[op.request_id].state
                assert len(op.block_ids) == self.num_state_blocks
                written = self.written.setdefault(op.request_id, [])
                for index, block in enumerate(op.block_ids):
                    value = ("state", index, state)
                    self.memory[block] = [value] * self.block_size
                    written += [(block, offset, value) for offset in range(self.block_size)]
        self.state_ops.clear()
        for load in self.load_ops:
            self.device.run(load, self.memory)
        self.load_ops.clear()

    def _check_state(self, row: _Row, count: int) -> None:
        """The next `count` tokens follow the state that all before them left."""
        expected = row.digest_at(row.num_computed - 1) if row.num_computed else row.adapter
        self._expect(row, row.state == expected, f"position {row.num_computed} is computed with the state of others")
        row.state = MISLED[0] if row.is_misled else row.digest_at(row.num_computed + count - 1)

    def _expect(self, row: _Row, is_right: bool, message: str) -> None:
        """A row reads what it should, or is misled by a request without a row, whose step's results are not processed yet."""
        assert is_right or self.unreported, message
        row.is_misled |= not is_right

    def _draft(self, row: _Row, planned: RowStep) -> list[int]:
        """The first drafts of a row that are right."""
        right: list[int] = []
        if not planned.num_drafts:
            return right
        assert self.drafts is not None and row.has_drafts and row.num_computed == len(row.token_ids) - 1
        assert planned.num_tokens == 1 + planned.num_drafts
        last = row.digest_at(row.num_computed)
        while len(right) < planned.num_drafts and self.drafts.rng.random() < self.drafts.share_right:
            right.append(next_token(last, self.vocab_size))
            last = digest(last, right[-1])
        return right

    def _spoil(self, row: _Row) -> None:
        """Write what a drafter with layers writes after the tokens of a row, as far as it has blocks."""
        assert self.drafts is not None
        for group, table in enumerate(row.block_ids):
            end = min(row.num_computed + self.drafts.num_lookahead, len(table) * self.block_size)
            for position in range(row.num_computed, end):
                block, offset = self._slot(row, group, position)
                block[offset] = NOTHING

    def check_block(self, row: _Row, index: int) -> None:
        """A block holds the right tokens of its row, in each group that has not freed it."""
        if row.is_misled:
            assert self.unreported, "a request goes on that read what was never written"
            return
        positions = range(index * self.block_size, (index + 1) * self.block_size)
        for group, table in enumerate(row.block_ids):
            if table[index] and self.policies[group].num_expired(row.num_computed, self.block_size) <= index:
                assert self.memory[table[index]] == [(group, row.digest_at(position)) for position in positions]

    def start_over(self, failed: Iterable[DeviceOp] = ()) -> None:
        """Drop rows and memory. failed: operations of steps whose results are lost."""
        self.rows.clear()
        self.written.clear()
        self.state_ops.clear()
        self.load_ops.clear()
        self.unreported.clear()
        self.device.start_over(failed)
        self.memory = [[NOTHING] * self.block_size for _ in self.memory]

    def _admit(self, data: NewRequestData) -> None:
        assert data.request_id not in self.rows
        assert data.num_cached_tokens - data.num_computed_tokens in (0, 1)
        tables: list[list[int]] = [[] for _ in self.policies]
        row = _Row(list(data.token_ids), tables, data.num_computed_tokens, data.num_cached_tokens)
        self._extend(row, data.block_ids)
        row.pools = data.pooling_params is not None
        row.adapter_slot = data.adapter_slot
        if data.adapter_slot != NO_ADAPTER:
            row.adapter = self.slots[data.adapter_slot]
        row.state = None if data.num_computed_tokens else row.adapter
        self.rows[data.request_id] = row
        row.item_at = self.device.items_of(data.request_id, data.items, row.token_ids)

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

    def _write(self, request_id: str, row: _Row, count: int, num_wrong: int) -> None:
        assert count > 0 and row.num_computed + count <= len(row.token_ids)
        end = row.num_computed + count
        for position in range(row.num_computed, end) if row.item_at else ():
            if position in row.item_at:
                self.device.check_embedding(row.item_at[position], row.token_ids[position], end)
        written = self.written.setdefault(request_id, [])
        for group in range(len(self.policies)):
            for position in range(max(row.num_computed, row.num_cached), end + num_wrong):
                block, offset = self._slot(row, group, position)
                block[offset] = (group, row.digest_at(position)) if position < end else NOTHING
                if row.is_misled:
                    block[offset] = MISLED
                written.append((row.block_ids[group][position // self.block_size], offset, block[offset]))

    def damage(self, request_id: str, scheduler: Scheduler) -> None:
        """All that a request wrote turns out to be wrong. Whoever holds its blocks now is not told, so those stay as they are."""
        manager = scheduler.cache_manager
        wrong = {id(value) for _, _, value in self.written.get(request_id, ())}
        for block, offset, value in self.written.pop(request_id, ()):
            if self.memory[block][offset] is value and not manager.pool.blocks[block].ref_count:
                self.memory[block][offset] = DAMAGED
        if self.device.copies is not None:
            self.device.copies.damage(wrong, DAMAGED)
        for tier in manager.loading._tiers:
            if isinstance(tier, FakeTier):
                for content in (*tier.contents.values(), *(content for _, content in tier.stores.values())):
                    content[:] = [DAMAGED if id(value) in wrong else value for value in content]

    def _check_reads(self, row: _Row, count: int) -> None:
        """The next `count` tokens read all tokens before them, or those in the window of their group."""
        for group, policy in enumerate(self.policies):
            first = max(0, row.num_computed + 1 - policy.window) if isinstance(policy, WindowPolicy) else 0
            for position in range(first, row.num_computed + count):
                block, offset = self._slot(row, group, position)
                right = (group, row.digest_at(position))
                self._expect(row, block[offset] == right, f"position {position} holds something else")


def runner_for(scheduler: Scheduler, vocab_size: int, rank: int = 0) -> FakeRunner:
    """A runner of the sizes of a scheduler."""
    runner = FakeRunner(
        num_blocks=len(scheduler.cache_manager.pool.blocks),
        block_size=scheduler.cache_manager.block_size,
        vocab_size=vocab_size,
        max_num_seqs=scheduler.limits.max_num_seqs,
        max_tokens=scheduler.options.max_step_tokens,
        policies=scheduler.cache_manager.policies,
        drafts=scheduler.drafts,
        rank=rank,
        num_state_blocks=scheduler.cache_manager.states.num_blocks,
    )
    for room in scheduler.chunk_rooms:
        if isinstance(room, EncoderCache):
            runner.device.sizes = room._sizes
    return runner


class FakeEngine:
    """Scheduler and fake runner with up to `depth` steps in flight."""

    def __init__(self, scheduler: Scheduler, *, vocab_size: int = 1000, depth: int = 1):
        self.scheduler, self.depth = scheduler, depth
        self.runner = runner_for(scheduler, vocab_size)
        self.runners, self.schedulers = [self.runner], (scheduler,)
        self.ops = OpQueue(self.runner)  # type: ignore[arg-type]
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.plans: list[SchedulerOutput] = []

    def dispatch(self) -> None:
        """Plan and start steps until `depth` are in flight or nothing can be planned."""
        while len(self.in_flight) < self.depth:
            plan = self.scheduler.schedule()
            self.scheduler.check_integrity()
            if plan.num_tokens == 0 and not plan.ops and not self.ops:
                break
            self.plans.append(plan)
            self.in_flight.append((plan, self.ops.dispatch(plan)))  # type: ignore[arg-type]
            if self.scheduler.drafts is not None:
                self._check_published()

    def _check_published(self) -> None:
        """The latest block of each request that others may find holds no draft that was wrong."""
        for scheduler, runner in zip(self.schedulers, self.runners, strict=True):
            for request in scheduler.running:
                table, row = scheduler.cache_manager._tables[request.request_id], runner.rows.get(request.request_id)
                if row is not None and table.num_published:
                    runner.check_block(row, table.num_published - 1)

    def collect(self) -> list[EngineCoreOutput]:
        """Take in the oldest step in flight."""
        if not self.in_flight:
            return []
        plan, result = self.in_flight.popleft()
        failing = list(self._failing(plan, result))
        outputs = self.scheduler.update_from_output(plan, result)
        self.scheduler.check_integrity()
        for part, runner in zip(self._parts(plan), self.runners, strict=True):
            runner.unreported.discard(part.step_id)
        for request_id, scheduler, runner in failing:
            runner.damage(request_id, scheduler)
        return outputs

    def _failing(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> Iterable[tuple[str, Scheduler, FakeRunner]]:
        """The unfinished requests that fail in a step, with their scheduler and runner."""
        for part, scheduler, runner in zip(self._parts(plan), self.schedulers, self.runners, strict=True):
            for request, _, row in scheduler._in_flight.shares_of(part.step_id) if result.errors else ():
                if row.request_id in result.errors and not request.status.is_finished:
                    yield row.request_id, scheduler, runner

    def _parts(self, plan: SchedulerOutput) -> Sequence[SchedulerOutput]:
        """The plans of ranks."""
        return plan.ranks if isinstance(plan, RanksPlan) else [plan]

    def start_over(self) -> None:
        """Consequences of a failed step: nothing in flight comes back, and the runner has forgotten everything."""
        failed = [op for plan, _ in self.in_flight for op in plan.ops]
        self.in_flight.clear()
        self.scheduler.start_over()
        self.runner.start_over(failed)

    def step(self) -> list[EngineCoreOutput]:
        """Keep `depth` steps in flight and process the oldest."""
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


class FakeRanks:
    """The fake runners of several data-parallel ranks as one."""

    def __init__(self, scheduler: RanksScheduler, vocab_size: int):
        self.ranks = [runner_for(rank, vocab_size, index) for index, rank in enumerate(scheduler.ranks)]

    def dispatch(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run the operations and the step of each rank."""
        assert isinstance(plan, RanksPlan)
        found = ModelRunnerOutput({})
        for index, (runner, part) in enumerate(zip(self.ranks, plan.ranks, strict=True)):
            own = tuple(op for op in plan.ops if isinstance(op, RankOp) and op.rank == index)
            assert len(own) == len(part.ops)
            if part.rows or own:
                found.add(runner.dispatch(replace(part, ops=own)))
        return found

    def start_over(self, failed: Iterable[DeviceOp] = ()) -> None:
        """Drop rows and memory."""
        for runner in self.ranks:
            runner.start_over()


class FakeRanksEngine(FakeEngine):
    """Schedulers of data-parallel ranks and their fake runners."""

    def __init__(self, scheduler: RanksScheduler, *, vocab_size: int = 1000, depth: int = 1):
        self.scheduler, self.depth = scheduler, depth
        self.runner = FakeRanks(scheduler, vocab_size)
        self.runners, self.schedulers = self.runner.ranks, scheduler.ranks
        self.ops = OpQueue(self.runner)  # type: ignore[arg-type]
        self.in_flight, self.plans = deque(), []
