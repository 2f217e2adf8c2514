"""An engine without a model: a prefix cache of blocks, a queue, and steps that take as long as measured ones."""

import bisect
import heapq
import math
from array import array
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from jaxllm.cache_events import CacheEvents
from jaxllm.scheduler_stats import SchedulerStats

BLOCK_SIZE = 16


@dataclass(frozen=True)
class StepCosts:
    """Times of steps on one device. Between measured numbers of rows they are interpolated; prompt tokens come on top."""

    rows: tuple[int, ...]
    decode_ms: tuple[float, ...]
    """Milliseconds of a step in which so many rows decode, at about 1100 tokens of context."""
    prefill_tokens_per_second: float
    num_blocks: int
    """Blocks of 16 tokens of the prefix cache: 90 % of 141 GB less the weights."""

    def seconds(self, num_rows: int, num_prompt_tokens: int) -> float:
        """The time of a step."""
        decode = 0.0
        if num_rows:
            at = min(max(1, bisect.bisect_left(self.rows, num_rows)), len(self.rows) - 1)
            (low, high), (less, more) = self.rows[at - 1 : at + 1], self.decode_ms[at - 1 : at + 1]
            decode = less + (more - less) * (num_rows - low) / (high - low)
        elif num_prompt_tokens:
            decode = self.decode_ms[0]  # the weights are read in any case
        return decode / 1e3 + num_prompt_tokens / self.prefill_tokens_per_second


COSTS = {
    "8b": StepCosts((1, 16, 64, 256), (4.23, 4.80, 7.06, 16.6), 43_179, 53_000),
    "1b": StepCosts((1, 16, 64, 256), (1.01, 1.15, 1.69, 3.97), 272_508, 236_000),
}
"""Llama 3.1 8B and Llama 3.2 1B, bfloat16, one NVIDIA H200: docs/BENCHMARKS.md, 2026-11-22."""


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way."""

    number: int
    keys: array  # type: ignore[type-arg]
    """Keys of the blocks of the prompt and the answer."""
    num_prompt_tokens: int
    num_output_tokens: int
    arrived: float
    api_server: int = 0
    num_left: int = 0
    """Prompt tokens to compute, once admitted."""
    num_cached: int = 0
    first_token_seconds: float = 0.0


class BlockCache:
    """The blocks of one engine: held by requests, or free and findable until they are the least recently used ones.

    A request gets the blocks of its answer when it is admitted, so none is ever preempted.
    """

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self.num_held = 0
        self._held: dict[int, int] = {}
        """Number of requests that hold a block."""
        self._free: OrderedDict[int, None] = OrderedDict()
        self.changes: dict[int, bool] = {}
        """Whether blocks can be found, changed since the last report."""

    def admit(self, job: Job) -> bool:
        """Give a request its blocks, if there are enough."""
        held, free = self._held, self._free
        num_needed = -(-(job.num_prompt_tokens + job.num_output_tokens) // BLOCK_SIZE)
        keys = job.keys.tolist()
        num_prompt_blocks = job.num_prompt_tokens // BLOCK_SIZE
        num_found = num_revived = 0
        for key in keys[:num_prompt_blocks]:
            if key in free:
                num_revived += 1
            elif key not in held:
                break
            num_found += 1
        num_new = num_needed - num_found
        num_empty = self.num_blocks - self.num_held - len(free)
        if num_new + num_revived > num_empty + len(free):
            return False
        for key in keys[:num_found]:
            if key in free:
                del free[key]
                held[key] = 1
            else:
                held[key] += 1
        changes = self.changes
        for _ in range(num_new - num_empty):
            changes[free.popitem(last=False)[0]] = False
        self.num_held += num_revived + num_new
        for key in keys[num_found:num_prompt_blocks]:
            self._publish(key)
        job.num_cached = min(num_found * BLOCK_SIZE, job.num_prompt_tokens - 1)
        job.num_left = job.num_prompt_tokens - job.num_cached
        return True

    def release(self, job: Job) -> None:
        """Free the blocks of a request, those of its end to be taken first; the full ones can be found."""
        keys = job.keys.tolist()
        held, free = self._held, self._free
        for key in keys[job.num_prompt_tokens // BLOCK_SIZE :]:
            self._publish(key)
        self.num_held -= -(-(job.num_prompt_tokens + job.num_output_tokens) // BLOCK_SIZE) - len(keys)
        for key in reversed(keys):
            count = held[key]
            if count > 1:
                held[key] = count - 1
            else:
                del held[key]
                free[key] = None
                self.num_held -= 1

    def content(self) -> set[int]:
        """The blocks that can be found."""
        return {*self._held, *self._free}

    def _publish(self, key: int) -> None:
        """A block is full. If another request filled one like it at the same time, they share it from now on."""
        held = self._held
        if key in held:
            held[key] += 1
            self.num_held -= 1
        elif key in self._free:
            del self._free[key]
            held[key] = 1
        else:
            held[key] = 1
            self.changes[key] = True

    def take_events(self) -> CacheEvents | None:
        """As `EventCollector.take`."""
        if not self.changes:
            return None
        stored = array("Q", [key for key, is_stored in self.changes.items() if is_stored])
        removed = array("Q", [key for key, is_stored in self.changes.items() if not is_stored])
        self.changes.clear()
        return CacheEvents(False, stored.tobytes(), removed.tobytes())


@dataclass(eq=False)
class FakeEngine:
    """Steps one after the other; steps in which nothing comes or goes are taken together."""

    number: int
    costs: StepCosts
    cache: BlockCache
    num_api_servers: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    wakes_at: float = math.inf
    """When the step ends, or the last of several."""
    reports_at: float = math.inf
    """When its next report is due."""
    reported_at: float = -math.inf
    finished: list[Job] = field(default_factory=list)
    started: list[Job] = field(default_factory=list)
    """Jobs that got their first token at the latest wake."""

    def __post_init__(self) -> None:
        self.num_received = [0] * self.num_api_servers
        self._inbox: list[Job] = []
        self._waiting: deque[Job] = deque()
        self._num_waiting_tokens = 0
        self._prefilling: deque[Job] = deque()
        self._completing: list[Job] = []
        """Jobs whose prompt the current step completes."""
        self._decoding: list[tuple[int, int, Job]] = []
        """Heap by the number of the decode step that ends them."""
        self._num_decoded = 0
        self._num_steps = 0
        self._num_step_tokens = 0
        self._step_seconds = 0.0
        self._began = 0.0

    def add(self, job: Job, now: float) -> bool:
        """A request arrives. Returns whether `wakes_at` has changed."""
        self._inbox.append(job)
        if self.wakes_at == math.inf:
            self._plan(now)
            return True
        if self._num_steps > 1:
            num_steps = max(1, math.ceil((now - self._began) / self._step_seconds))
            if num_steps < self._num_steps:
                self._num_steps = num_steps
                self.wakes_at = self._began + num_steps * self._step_seconds
                return True
        return False

    def wake(self, now: float) -> None:
        """The step has ended: `finished` and `started` tell of what, and the next one begins."""
        self.finished.clear()
        self.started.clear()
        if self._decoding:
            self._num_decoded += self._num_steps
        for job in self._completing:
            self.started.append(job)
            if job.num_output_tokens > 1:
                heapq.heappush(self._decoding, (self._num_decoded + job.num_output_tokens - 1, job.number, job))
            else:
                self.finished.append(job)
        while self._decoding and self._decoding[0][0] <= self._num_decoded:
            self.finished.append(heapq.heappop(self._decoding)[2])
        for job in self.finished:
            self.cache.release(job)
        self._plan(now)

    def _plan(self, now: float) -> None:
        for job in self._inbox:
            self._waiting.append(job)
            self._num_waiting_tokens += job.num_prompt_tokens
            self.num_received[job.api_server] += 1
        self._inbox.clear()
        self._completing = []
        num_rows = len(self._decoding)
        budget = self.max_num_batched_tokens - num_rows
        num_prompt_tokens = 0
        while budget > 0:
            if not self._prefilling:
                if not self._waiting or num_rows + len(self._completing) >= self.max_num_seqs:
                    break
                if not self.cache.admit(self._waiting[0]):
                    break
                self._prefilling.append(self._waiting.popleft())
                self._num_waiting_tokens -= self._prefilling[0].num_prompt_tokens
            job = self._prefilling[0]
            count = min(job.num_left, budget)
            job.num_left -= count
            budget -= count
            num_prompt_tokens += count
            if not job.num_left:
                self._completing.append(self._prefilling.popleft())
        self._num_step_tokens = num_prompt_tokens
        if not num_rows and not num_prompt_tokens:
            self.wakes_at = math.inf
            return
        self._num_steps = 1 if num_prompt_tokens else self._decoding[0][0] - self._num_decoded
        self._step_seconds = self.costs.seconds(num_rows, num_prompt_tokens)
        self._began = now
        self.wakes_at = now + self._num_steps * self._step_seconds

    def stats(self) -> SchedulerStats:
        """Its load, as a scheduler reports it after planning a step."""
        return SchedulerStats(
            num_running=len(self._decoding) + len(self._prefilling) + len(self._completing),
            num_waiting=len(self._waiting),
            cache_usage=self.cache.num_held / self.cache.num_blocks,
            num_preemptions=0,
            prefix_cache_queries=0,
            prefix_cache_hits=0,
            resumed_prefix_cache_queries=0,
            resumed_prefix_cache_hits=0,
            num_cache_blocks=self.cache.num_blocks,
            num_queued_tokens=self._num_waiting_tokens
            + sum(job.num_left for job in self._prefilling)
            + self._num_step_tokens // 2,
        )
