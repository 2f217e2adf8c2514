"""Finds the requests that read blocks which nothing has written, or which have what others computed wrongly."""

from collections.abc import Iterable

from jaxllm.request import Request, RequestStatus
from jaxllm.scheduler.results import Share
from jaxllm.scheduler_output import ModelRunnerOutput, SchedulerOutput


def readers_of_unwritten(
    plan: SchedulerOutput, result: ModelRunnerOutput, shares: Iterable[Share], in_flight: Iterable[list[Share]]
) -> set[Request]:
    """The requests of a step, and of those in flight behind it, that found blocks of a request which got no row in this step.

    Blocks can be found from the plan on that fills them. A request that fails when it is to get its row takes no part in its step and in
    those that are planned already, so its blocks have what their last owners left. shares: of the step; in_flight: of the others.
    """
    new_ids = {data.request_id for data in plan.new_requests}
    failed = [request for request, _, row in shares if row.request_id in result.errors and row.request_id in new_ids]
    if not failed:
        return set()
    all_requests = {request for step in (shares, *in_flight) for request, _, _ in step}
    admitted = [request for request in all_requests.difference(failed) if request.admission_step_id >= plan.step_id]
    return {request for request in admitted if any(_found_blocks_of(request, each) for each in failed)}


def readers_of_wrong(result: ModelRunnerOutput, shares: Iterable[Share]) -> set[Request]:
    """The requests of a step that drew NaN and had found blocks, which may be why: the request that computed these may have ended before
    the fault was seen, and so may another engine before it could report it. Each request once. shares: of the step."""
    return {
        request
        for request, _, row in shares
        if row.request_id in result.not_finite
        and request.status is RequestStatus.RUNNING
        and request.most_found_blocks
        and request.may_try_again
    }


def _found_blocks_of(request: Request, other: Request) -> bool:
    """Whether a request may have found blocks that another was to compute: both have the same tokens up to the first of these."""
    first = other.num_found_blocks
    next_name = other.block_hashes[first : first + 1]
    return request.most_found_blocks > first and request.block_hashes[first : first + 1] == next_name
