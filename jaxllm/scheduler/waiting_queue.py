"""The requests that wait for admission, in the order of a policy."""

import heapq
from collections import OrderedDict
from collections.abc import Iterator

from jaxllm.request import Request


class WaitingQueue:
    """First come, first served. A request that is put back goes first again.

    Every operation is O(log n) or better, so that a long queue does not slow a step.
    """

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()
        self.num_prompt_tokens = 0
        """Prompt tokens of all requests together."""

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        return self._requests.get(request.request_id) is request

    def __iter__(self) -> Iterator[Request]:
        """All requests, in any order."""
        return iter(self._requests.values())

    def peek(self) -> Request:
        """The next request; the queue must not be empty."""
        return next(iter(self._requests.values()))

    def pop(self) -> Request:
        """Take the next request."""
        request = self.peek()
        self.remove(request)
        return request

    def add(self, request: Request) -> None:
        """Add a new request."""
        self._requests[request.request_id] = request
        self.num_prompt_tokens += request.num_prompt_tokens

    def put_back(self, request: Request) -> None:
        """Return a request that had been popped."""
        self.add(request)
        self._requests.move_to_end(request.request_id, last=False)

    def remove(self, request: Request) -> None:
        """Remove a request from any place in the queue."""
        del self._requests[request.request_id]
        self.num_prompt_tokens -= request.num_prompt_tokens

    def note_output(self, request: Request) -> None:
        """A request that had been taken has more output."""

    def note_end(self, request: Request) -> None:
        """A request ended."""

    def check_integrity(self) -> None:
        """Raise AssertionError if the queue disagrees with itself."""
        assert self.num_prompt_tokens == sum(request.num_prompt_tokens for request in self), "waiting tokens are miscounted"


class PriorityQueue(WaitingQueue):
    """Lowest (priority, arrival time, id) first. A request that is put back keeps its order."""

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[tuple[tuple[int, float, str], int, Request]] = []
        self._num_added = 0

    def peek(self) -> Request:
        while self._requests.get((request := self._heap[0][2]).request_id) is not request:
            heapq.heappop(self._heap)  # removed earlier
        return request

    def pop(self) -> Request:
        request = self.peek()
        heapq.heappop(self._heap)
        super().remove(request)
        return request

    def add(self, request: Request) -> None:
        super().add(request)
        # The counter keeps the heap from ever comparing two requests.
        heapq.heappush(self._heap, (request.sort_key(), self._num_added, request))
        self._num_added += 1

    put_back = add

    def remove(self, request: Request) -> None:
        super().remove(request)
        if len(self._heap) > 2 * len(self._requests) + 64:
            self._heap = [entry for entry in self._heap if self._requests.get(entry[2].request_id) is entry[2]]
            heapq.heapify(self._heap)
