"""Scheduling policies: which request is next, and which running one gives way."""

from collections import Counter
from collections.abc import Callable, Sequence

from jaxllm.config import SchedulingPolicy
from jaxllm.request import Request
from jaxllm.scheduler.fair_queue import FairQueue
from jaxllm.scheduler.waiting_queue import PriorityQueue, WaitingQueue

PATIENCE_SECONDS = 2.0
"""How long the client whose turn it is waits until a request of another one is preempted for it, and again for each further request."""
_QUEUES: dict[str, Callable[[], WaitingQueue]] = {"priority": PriorityQueue, "fair": FairQueue}


def make_waiting_queue(policy: SchedulingPolicy) -> WaitingQueue:
    """An empty queue of the policy."""
    return _QUEUES.get(policy, WaitingQueue)()


def choose_victim(policy: SchedulingPolicy, running: Sequence[Request]) -> int:
    """Index of the running request to preempt when blocks run out: the latest admitted, or the least urgent under the priority policy;
    under the fair one the latest of the client with the most tokens, among those that keep another."""
    latest = len(running) - 1
    if policy == "priority":
        return max(range(len(running)), key=lambda index: running[index].sort_key())
    if policy != "fair":
        return latest
    num_requests = Counter(request.options.client for request in running)
    num_tokens = _totals(running, lambda request: request.num_tokens)
    several = [client for client in num_tokens if num_requests[client] > 1]
    return _latest_of(max(several, key=lambda client: num_tokens[client]), running) if several else latest


class Turns:
    """Finds who gives way under the fair policy: else a client that holds all places with long answers would hold them for minutes."""

    def __init__(self, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self._patience_seconds = patience_seconds
        self._looked_at = 0.0

    def are_due(self, now: float) -> bool:
        """Whether to look at who has how much. `now` is on the monotonic clock."""
        is_due = now - self._looked_at >= self._patience_seconds
        if is_due:
            self._looked_at = now
        return is_due

    def may_end(self, request: Request, now: float) -> bool:
        """Whether the next request in line has waited long enough."""
        return now - request.queued_at >= self._patience_seconds

    def choose(self, request: Request, running: Sequence[Request], *, by_rows: bool) -> int | None:
        """Index of the running request that gives way to the next in line: the latest of the client that has the most. None: that client
        would have less than the other then.

        by_rows: whether places are what lacks, and are counted; else tokens.
        """

        def size(request: Request) -> int:
            return 1 if by_rows else request.num_tokens

        client = request.options.client
        totals = _totals(running, size)
        own = totals.pop(client, 0)
        if not totals:
            return None
        most = max(totals, key=lambda name: totals[name])
        index = _latest_of(most, running)
        return index if own + size(request) <= totals[most] - size(running[index]) else None


def _totals(running: Sequence[Request], size: Callable[[Request], int]) -> dict[str, int]:
    """The sum of the sizes of each client's requests."""
    found: dict[str, int] = {}
    for request in running:
        client = request.options.client
        found[client] = found.get(client, 0) + size(request)
    return found


def _latest_of(client: str, running: Sequence[Request]) -> int:
    return next(index for index in reversed(range(len(running))) if running[index].options.client == client)
