"""Hands the requests of a call to the engine. Those whose images are not prepared yet are prepared in threads, a few ahead of it."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from jaxllm.errors import InvalidRequestError

AHEAD = 32
"""Prompts that are prepared before the engine has room for them. A call with at most so many that have images prepares all at first."""
NUM_FIRST_STEPS = 3
"""Steps that the first requests are to fill: as many as are in flight at a time."""
NUM_THREADS = 8
"""Threads that read what prompts name and wait for its preparation."""

Request = TypeVar("Request")


@dataclass(frozen=True)
class LaterRequest(Generic[Request]):
    """A request that can be made only once the images of its prompt are prepared."""

    prepare: Callable[[], Any]
    """Prepare them. Runs in a thread."""
    make: Callable[[Any], Request]
    """Make the request of what `prepare` returned. Raises InvalidRequestError."""
    priority: int = 0
    """Requests with smaller ones are prepared first."""


class RequestFeed(Generic[Request]):
    """The requests of a call that the engine does not have yet, each with its place in the call. Closing it ends its threads."""

    def __init__(
        self,
        requests: "Sequence[Request | LaterRequest[Request]]",
        max_unfinished: int,
        first_tokens: int | None = None,
        num_tokens: Callable[[Request], int] = lambda request: 0,
    ):
        """max_unfinished: how many requests of this call the engine may have when it gets one that is made later.
        first_tokens: it first gets no more than the requests with so many tokens, the others while it computes these; None: all."""
        self._count, self._max_unfinished = len(requests), max_unfinished
        self._ready: deque[tuple[int, Request]] = deque()
        later: list[tuple[int, LaterRequest[Request]]] = []
        for place, request in enumerate(requests):
            if isinstance(request, LaterRequest):
                later.append((place, request))
            else:
                self._ready.append((place, request))
        self._first_tokens, self._num_tokens = first_tokens, num_tokens
        self._later = deque(sorted(later, key=lambda each: each[1].priority))
        self._started: dict[Future[Any], tuple[int, LaterRequest[Request]]] = {}
        """In the order in which they were started."""
        self._threads = ThreadPoolExecutor(NUM_THREADS, "jaxllm-prompts") if later else None

    def __len__(self) -> int:
        """How many requests it has."""
        return len(self._ready) + len(self._started) + len(self._later)

    def take(self, num_unfinished: int) -> Iterator[tuple[int, Request]]:
        """Take out what the engine may get now, when it has so many requests of this call. Waits for the next request if it has none.

        Raises the error of a request that cannot be made.
        """
        room, self._first_tokens = self._first_tokens, None
        while self._ready:
            if room is not None and room <= 0:
                return
            place, request = self._ready.popleft()
            if room is not None:
                room -= self._num_tokens(request)
            yield place, request
            num_unfinished += 1
        while num_unfinished < self._max_unfinished:
            self._start()
            if not self._started:
                return
            if not num_unfinished:
                wait(self._started, return_when=FIRST_COMPLETED)
            done = next((future for future in self._started if future.done()), None)
            if done is None:
                return
            place, later = self._started.pop(done)
            self._start()
            try:
                request = later.make(done.result())
            except InvalidRequestError as error:
                raise InvalidRequestError(
                    f"prompt {place} of {self._count} cannot be served, and ended the call: {error}", error.param
                ) from error
            yield place, request
            num_unfinished += 1

    def _start(self) -> None:
        """Start to prepare prompts, up to AHEAD."""
        while self._later and len(self._started) < AHEAD:
            assert self._threads is not None
            place, later = self._later.popleft()
            self._started[self._threads.submit(later.prepare)] = place, later

    def close(self) -> None:
        """Give up what is left."""
        self._later.clear()
        self._started.clear()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
