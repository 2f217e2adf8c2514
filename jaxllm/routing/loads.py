"""How much work each replica has: what it reported last, and what was sent to it since."""

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from jaxllm.scheduler_stats import SchedulerStats

ROW_TOKENS = 64
"""Cost of a running or waiting request for the next one, in prompt tokens, in addition to its prompt. While it decodes, its row
takes as much of each step as two prompt tokens (8B on an H200: 0.05 ms a row, 0.023 ms a prompt token), and both share some
dozens of steps."""
QUEUE_TOKENS = 1000
"""Cost of each waiting request for the next one where all replicas are full, in prompt tokens: it takes the next seat, and one becomes free
every 12 to 70 ms (8B, answers of 200 tokens, 256 to 20 running)."""
LOAD_TOKENS = 1000
"""Cost of loading an adapter, in prompt tokens: 22 ms until the first token (200 adapters over 16 slots, the same machine)."""


@dataclass(slots=True)
class _Replica:
    is_up: bool = False
    num_running: int = 0
    num_waiting: int = 0
    num_free_tokens: float = np.inf
    """Tokens for which there are free blocks; with several groups of layers, which each take blocks, at most so many."""
    num_queued_tokens: int = 0
    usage: float = 0.0
    num_received: int = 0
    """Requests that the latest report covers."""
    num_used_tokens: int = 0
    """Tokens for which blocks are in use."""
    unreported: deque[tuple[int, int, str | None]] = field(default_factory=deque)
    """Requests that no report covers: their tokens to compute, those that take new blocks, and their adapter."""
    num_unreported_tokens: int = 0
    num_unreported_held_tokens: int = 0
    num_in_flight: int = 0
    """Requests of this API server that have not ended."""
    adapters: OrderedDict[str, None] = field(default_factory=OrderedDict)
    """Adapters that have a slot, or will have one for what was sent; the least recently used first."""
    busy_adapters: set[str] = field(default_factory=set)
    """Adapters that have unfinished requests."""


class Loads:
    """Arrays over the replicas, kept up to date one replica at a time."""

    def __init__(self, num_replicas: int, *, block_size: int, max_num_seqs: int, num_api_servers: int):
        """num_api_servers: API servers that send to these replicas. What the others sent is not known before a report, so each counts
        its own requests for all of them."""
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._num_api_servers = num_api_servers
        self._max_adapters = 0
        self.replicas = [_Replica() for _ in range(num_replicas)]
        self.is_up = np.zeros(num_replicas, bool)
        self.work = np.zeros(num_replicas)
        """Prompt tokens to compute, and requests in tokens."""
        self.waiting = np.zeros(num_replicas)
        """Requests that are not admitted, or not known to be."""
        self.seats = np.zeros(num_replicas)
        """Requests that can still be admitted."""
        self.room = np.zeros(num_replicas)
        """Tokens for which blocks are left once all that is queued is computed."""
        self.held = np.zeros(num_replicas)
        """Tokens for which blocks are in use, or will be for what was sent."""
        self.vllm_score = np.zeros(num_replicas)
        """The score by which vLLM 0.33 balances."""

    def set_up(self, index: int) -> None:
        self.replicas[index] = _Replica(is_up=True)
        self._update(index)

    def set_down(self, index: int) -> None:
        self.replicas[index] = _Replica()
        self._update(index)

    def sent(self, index: int, num_tokens: int, adapter: str | None, num_held: int | None = None) -> None:
        """A request with so many tokens to compute was sent to a replica. num_held: those that take new blocks; None: as many."""
        replica = self.replicas[index]
        num_held = num_tokens if num_held is None else num_held
        replica.unreported.append((num_tokens, num_held, adapter))
        replica.num_unreported_tokens += num_tokens
        replica.num_unreported_held_tokens += num_held
        replica.num_in_flight += 1
        if adapter is not None:
            self._use(replica, [adapter])
        self._update(index)

    def ended(self, index: int) -> None:
        self.replicas[index].num_in_flight -= 1
        self._update(index)

    def note(self, index: int, stats: SchedulerStats, num_received: int | None) -> None:
        """Record a report. num_received: requests of this API server that it covers, since the replica is up; None: all."""
        replica = self.replicas[index]
        replica.num_running, replica.num_waiting = stats.num_running, stats.num_waiting
        replica.usage = stats.cache_usage
        replica.num_free_tokens = round(stats.num_cache_blocks * (1 - stats.cache_usage)) * self._block_size
        replica.num_used_tokens = round(stats.num_cache_blocks * stats.cache_usage) * self._block_size
        replica.num_queued_tokens = stats.num_queued_tokens
        num_new = len(replica.unreported) if num_received is None else num_received - replica.num_received
        for _ in range(min(num_new, len(replica.unreported))):
            num_tokens, num_held, _ = replica.unreported.popleft()
            replica.num_unreported_tokens -= num_tokens
            replica.num_unreported_held_tokens -= num_held
            replica.num_received += 1
        if stats.max_adapters:
            self._max_adapters = stats.max_adapters
            replica.busy_adapters = {*stats.waiting_adapters, *stats.running_adapters}
            self._use(
                replica, [*replica.busy_adapters, *(adapter for *_, adapter in replica.unreported if adapter is not None)]
            )
        self._update(index)

    def adapter_tokens(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Cost for each replica of loading an adapter, in prompt tokens, and whether it has a slot for it now."""
        most = self._max_adapters
        tokens = [0 if name in replica.adapters else LOAD_TOKENS for replica in self.replicas]
        has_slot = [name in replica.adapters or len(replica.busy_adapters) < most or not most for replica in self.replicas]
        return np.array(tokens), np.array(has_slot)

    def _use(self, replica: _Replica, names: Iterable[str]) -> None:
        """These adapters have requests: they take slots, the least recently used ones first, as `SlotTable` gives them."""
        for name in names:
            replica.busy_adapters.add(name)
            replica.adapters[name] = None
            replica.adapters.move_to_end(name)
        while len(replica.adapters) > max(self._max_adapters, len(replica.busy_adapters)):
            replica.adapters.popitem(last=False)

    def _update(self, index: int) -> None:
        replica = self.replicas[index]
        num_unreported = self._num_api_servers * len(replica.unreported)
        num_tokens = replica.num_queued_tokens + self._num_api_servers * replica.num_unreported_tokens
        num_requests = replica.num_running + replica.num_waiting
        self.is_up[index] = replica.is_up
        self.work[index] = num_tokens + ROW_TOKENS * (num_requests + num_unreported)
        self.waiting[index] = replica.num_waiting + num_unreported
        self.seats[index] = self._max_num_seqs - num_requests - num_unreported
        num_held = self._num_api_servers * replica.num_unreported_held_tokens
        self.room[index] = replica.num_free_tokens - replica.num_queued_tokens - num_held
        self.held[index] = replica.num_used_tokens + num_held
        pressure = 6 * replica.num_waiting * max(0.0, replica.usage - 0.5)
        self.vllm_score[index] = max(self._num_api_servers * replica.num_in_flight, num_requests) + pressure
