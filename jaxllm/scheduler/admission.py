"""Interfaces of the resources that a waiting request needs before it runs."""

import enum
from collections.abc import Collection, Iterable
from typing import Protocol, runtime_checkable

from jaxllm.device_ops import AnyDeviceOp
from jaxllm.request import PromptItem, Request
from jaxllm.scheduler_stats import SchedulerStats


class Fit(enum.IntEnum):
    """Whether a request can be admitted."""

    NOW = 0
    LATER = 1
    """Not in this step; requests behind it in the queue may be."""
    IN_TURN = 2
    """Not in this step, and no request behind it either: it would take the room that this one waits for."""


class AdmissionRoom(Protocol):
    """A resource that a request needs from its admission until it ends or is preempted. A subclass defines what it limits.

    Blocks of the KV cache are no such room. A request needs more of them in later steps, shares them, and leaves them to the
    prefix cache; when they run out, running requests are preempted. So the KVCacheManager allocates them, after all rooms agreed.
    """

    def fits(self, request: Request) -> Fit:
        """Whether there is room for a waiting request. Asked in every step while it is next in line; blocks may still be missing."""
        return Fit.NOW

    def take(self, request: Request) -> None:
        """The request is admitted. Called before the next `fits`."""
        return

    def release(self, request: Request) -> None:
        """The request ended, was preempted or starts over, as its status says. It may hold nothing. Steps in flight may still compute
        it, but all of them before any step that is planned from now on."""
        return


@runtime_checkable
class ChunkRoom(AdmissionRoom, Protocol):
    """A room that is also asked for each part of a prompt that a step is about to compute, e.g. because a step encodes few images.

    It belongs to one scheduler. What `limit` grants is taken for this step; it becomes final with `ops`, when the plan is complete.
    What `step_ops` returns is final at once: the plan runs, even without rows.
    """

    item_kinds: Collection[str] = ()
    """The kinds of items of prompts that it computes."""
    min_chunk: int = 1
    """So many tokens of one request every step must be able to compute, because `limit` may grant them together or not at all."""

    def check(self, item: PromptItem) -> None:
        """Raise InvalidRequestError for an item of these kinds that it can never compute."""
        return

    def begin_step(self, *, decodes: bool) -> None:
        """A step is about to be planned. What `limit` granted before and `ops` did not take is free. decodes: requests that are past their
        prompts wait for it."""
        return

    def limit(self, request: Request, start: int, count: int) -> int:
        """How many of the `count` tokens from position `start` on the step may compute: none, some or all. Asked at most once for a
        request in a step, in the order in which requests may take what is there. With 0 the request waits for a later step, and others
        may overtake it. A request that is alone must get on: `check` refuses one that never can.

        A request that then finds no blocks is preempted (see `release`), or asks again in a later step.
        """

    def ops(self, request: Request, start: int, count: int) -> list[AnyDeviceOp]:
        """Operations on the devices before the step that computes these tokens, at most those that `limit` allowed."""

    def step_ops(self) -> list[AnyDeviceOp]:
        """Operations of the step that are not for the tokens that it computes, before all others. Called once, at its end."""
        return []

    def is_begun(self, request: Request) -> bool:
        """Whether an item that the request waits for is being computed in parts, which another scheduler would begin anew."""
        return False

    def forget(self) -> None:
        """Results on the devices are lost, or of other weights. No request is admitted; what `limit` granted is free."""

    def add_stats(self, stats: SchedulerStats) -> None:
        """Add what it counts to the stats."""
        return

    def check_integrity(self, requests: Collection[Request]) -> None:
        """Raise AssertionError if its state is inconsistent. requests: all unfinished ones. Called between steps."""


def limit_all(rooms: Iterable[ChunkRoom], request: Request, start: int, count: int) -> int:
    """How many tokens of a chunk all rooms allow."""
    for room in rooms:
        if count:
            count = room.limit(request, start, count)
    return count


def fit_all(rooms: Iterable[AdmissionRoom], request: Request) -> Fit:
    """Whether there is room in all rooms; if not in several, the answer that holds back more requests."""
    answer = Fit.NOW
    for room in rooms:
        fit = room.fits(request)
        if fit is not Fit.NOW and fit > answer:
            answer = fit
    return answer
