"""What a waiting request must find room in before it runs."""

import enum
from collections.abc import Iterable
from typing import Protocol

from jaxllm.request import Request


class Fit(enum.IntEnum):
    """Whether a request can be admitted."""

    NOW = 0
    LATER = 1
    """Not in this step; requests behind it in the queue may be."""
    IN_TURN = 2
    """Not in this step, and no request behind it either: it would take the room that this one waits for."""


class AdmissionRoom(Protocol):
    """Something that a request needs from its admission until it ends or is preempted.

    Blocks of the KV cache are no such room. A request needs more of them in later steps, shares them, and leaves them to the
    prefix cache; when they run out, running requests are preempted. So the KVCacheManager allocates them, after all rooms agreed.
    """

    def fits(self, request: Request) -> Fit:
        """Whether there is room for a waiting request. Asked in every step while it is next in line; blocks may still be missing."""

    def take(self, request: Request) -> None:
        """The request is admitted. Called before the next `fits`."""

    def release(self, request: Request) -> None:
        """The request ended, was preempted or starts over, as its status says. It may hold nothing. Steps in flight may still compute
        it, but all of them before any step that is planned from now on."""


def fit_all(rooms: Iterable[AdmissionRoom], request: Request) -> Fit:
    """Whether there is room in all rooms; if not in several, the answer that holds back more requests."""
    answer = Fit.NOW
    for room in rooms:
        fit = room.fits(request)
        if fit is not Fit.NOW and fit > answer:
            answer = fit
    return answer
