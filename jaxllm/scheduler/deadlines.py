"""Tracks the deadlines of requests. The cost per step is one look at the clock."""

import heapq

from jaxllm.request import ErrorKind, Request


class Deadlines:
    """The times by which requests must be finished, or admitted, to avoid ending with an error.

    Times are in seconds on one clock, which the caller reads.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, ErrorKind, Request]] = []
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request, now: float) -> None:
        """Record the deadlines of a request that was added now."""
        options = request.options
        self._push(request, now, ErrorKind.QUEUE_TIMEOUT, options.queue_timeout_seconds)
        self._push(request, now, ErrorKind.TIMEOUT, options.timeout_seconds)

    def _push(self, request: Request, now: float, kind: ErrorKind, seconds: float | None) -> None:
        if seconds is not None:
            # The counter keeps the heap from ever comparing two requests.
            heapq.heappush(self._heap, (now + seconds, self._num_added, kind, request))
            self._num_added += 1

    def expired(self, now: float) -> list[tuple[Request, ErrorKind]]:
        """Remove and return the requests that exceeded a deadline, each once, with the kind of deadline."""
        found: dict[Request, ErrorKind] = {}
        while self._heap and self._heap[0][0] <= now:
            _, _, kind, request = heapq.heappop(self._heap)
            if _applies(kind, request):
                found.setdefault(request, kind)
        return list(found.items())

    def prune(self, num_unfinished: int) -> None:
        """Drop obsolete deadlines once they are the majority. Call when requests end."""
        if len(self._heap) > 4 * num_unfinished + 64:
            self._heap = [entry for entry in self._heap if _applies(entry[2], entry[3])]
            heapq.heapify(self._heap)


def _applies(kind: ErrorKind, request: Request) -> bool:
    """Whether a deadline still applies. A queue timeout no longer applies after the first admission, even after preemption."""
    was_admitted = request.num_cached_tokens >= 0
    return not request.status.is_finished and not (kind is ErrorKind.QUEUE_TIMEOUT and was_admitted)


def describe_expiry(request: Request, kind: ErrorKind) -> str:
    """The message for a request that exceeded a deadline."""
    options = request.options
    if kind is ErrorKind.QUEUE_TIMEOUT:
        return f"the request waited {options.queue_timeout_seconds:g} s for a place in the batch, its queue timeout; try again later"
    return (
        f"the request was not done after {options.timeout_seconds:g} s, its timeout, with {request.num_output_tokens} tokens; "
        "raise it or ask for fewer tokens"
    )
