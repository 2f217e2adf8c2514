"""The waiting queue of the policy "fair": clients in turn, by the tokens that each was served.

A virtual token counter (Sheng et al., Fairness in Serving Large Language Models, 2024): each client has a clock, which the tokens of its
prompts move when they are taken, and those of its outputs as they come; the client whose clock is least is next. Who comes after a while
starts at the clock of who is next, so that no client saves turns up, and new clients do not hold up old ones.
"""

import heapq
from collections import OrderedDict

from jaxllm.request import Request
from jaxllm.scheduler.waiting_queue import WaitingQueue

MAX_REMEMBERED = 10_000
"""Clients that do not wait whose clocks are kept."""


class FairQueue(WaitingQueue):
    """First come, first served within a client, `RequestOptions.client`. A request that is put back is its client's first again,
    and is not charged."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: dict[str, OrderedDict[str, Request]] = {}
        """The requests of each client that has any."""
        self._clocks: dict[str, int] = {}
        """Clock of each client that waits, or was served since the queue was last empty."""
        self._heap: list[tuple[int, int, str]] = []
        """Clock, number, client; an entry counts if its client has this number. The number decides between equal clocks."""
        self._numbers: dict[str, int] = {}
        """Number of each client that waits."""
        self._num_pushed = 0
        self._num_charged: dict[str, int] = {}
        """Output tokens that requests which had been taken are charged for, or had before any other waited."""

    def peek(self) -> Request:
        return next(iter(self._lines[self._next_client()].values()))

    def pop(self) -> Request:
        client = self._next_client()
        request = next(iter(self._lines[client].values()))
        clock = self._clocks[client]
        self.remove(request)
        self._set(client, clock + request.num_prompt_tokens)
        self._num_charged[request.request_id] = request.num_output_tokens
        return request

    def add(self, request: Request) -> None:
        client = request.options.client
        if not self._requests:  # the queue was empty: all clients are served alike from now on
            self._clocks.clear()
            self._heap.clear()
            self._num_charged.clear()
        is_new = client not in self._lines
        clock = max(self._clocks.get(client, 0), self._least_clock())
        self._append(request)
        if is_new:
            self._set(client, clock)

    def put_back(self, request: Request) -> None:
        client = request.options.client
        clock = self._clocks.get(client, self._least_clock())
        self._append(request, first=True)
        self._set(client, clock - request.num_prompt_tokens, first=True)

    def give_way(self, request: Request) -> None:
        """Return a request whose place goes to the next client: its client's first again, but charged, and behind that client."""
        client = request.options.client
        clock = max(self._clocks.get(client, 0), self._least_clock())
        self._append(request, first=True)
        self._set(client, clock)

    def remove(self, request: Request) -> None:
        super().remove(request)
        client = request.options.client
        line = self._lines[client]
        del line[request.request_id]
        if not line:
            del self._lines[client], self._numbers[client]
            self._prune()

    def note_output(self, request: Request) -> None:
        client, num_tokens = request.options.client, request.num_output_tokens
        num_new = num_tokens - self._num_charged.get(request.request_id, num_tokens)
        self._num_charged[request.request_id] = num_tokens
        if self._requests and num_new:
            self._set(client, self._clocks.get(client, self._least_clock()) + num_new)

    def note_end(self, request: Request) -> None:
        self.note_output(request)
        del self._num_charged[request.request_id]

    def check_integrity(self) -> None:
        super().check_integrity()
        lines = {name: request for line in self._lines.values() for name, request in line.items()}
        assert lines == self._requests and all(self._lines.values()), "a request is in no line, or in two"
        for client, line in self._lines.items():
            assert all(request.options.client == client for request in line.values()), "a request is in another client's line"
            assert (self._clocks[client], self._numbers[client], client) in self._heap, "a client gets no turn"

    def _append(self, request: Request, *, first: bool = False) -> None:
        super().add(request)
        line = self._lines.setdefault(request.options.client, OrderedDict())
        line[request.request_id] = request
        if first:
            line.move_to_end(request.request_id, last=False)

    def _next_client(self) -> str:
        heap = self._heap
        while self._numbers.get(client := heap[0][2]) != heap[0][1]:
            heapq.heappop(heap)  # it left, or was served
        return client

    def _least_clock(self) -> int:
        """The clock of the next client; 0 if the queue is empty."""
        return self._clocks[self._next_client()] if self._lines else 0

    def _set(self, client: str, clock: int, *, first: bool = False) -> None:
        """Set a client's clock. `first`: it goes before others that have the same."""
        self._clocks[client] = clock
        if client in self._lines:
            self._num_pushed += 1
            self._numbers[client] = number = -self._num_pushed if first else self._num_pushed
            heapq.heappush(self._heap, (clock, number, client))

    def _prune(self) -> None:
        """Forget clients that do not wait, and entries that do not count, once they are many."""
        if len(self._clocks) > 2 * len(self._lines) + MAX_REMEMBERED:
            self._clocks = {client: self._clocks[client] for client in self._lines}
        if len(self._heap) > 4 * len(self._lines) + 256:
            self._heap = [(self._clocks[client], number, client) for client, number in self._numbers.items()]
            heapq.heapify(self._heap)
