"""Checks the invariants of a scheduler, for tests and after failures."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from jaxllm.request import Request, RequestStatus
from jaxllm.scheduler.results import Share

if TYPE_CHECKING:
    from jaxllm.scheduler.scheduler import Scheduler


def check_integrity(scheduler: "Scheduler", in_flight: Iterable[list[Share]]) -> None:
    """Raise AssertionError if requests, queues, counts and blocks disagree. `in_flight`: the shares of each step in flight."""
    scheduler.cache_manager.check_integrity(scheduler.running, has_drafts=scheduler.drafts is not None)
    waiting = list(scheduler.waiting)
    assert len(waiting) == len(scheduler.waiting)
    scheduler.waiting.check_integrity()
    waiting += scheduler.held.values()
    ids = sorted(request.request_id for request in [*scheduler.running, *waiting])
    assert ids == sorted(scheduler.requests), "a request is neither running nor waiting nor held, or twice"
    assert all(scheduler.requests[request.request_id] is request for request in [*scheduler.running, *waiting])
    assert len(scheduler.running) <= scheduler.limits.max_num_seqs, (
        f"{len(scheduler.running)} requests run, at most {scheduler.limits.max_num_seqs} may"
    )
    for room in scheduler.chunk_rooms:
        room.check_integrity(scheduler.requests.values())
    samples: dict[Request, int] = {}
    drafts: dict[Request, int] = {}
    for shares in in_flight:
        for request, num_samples, row in shares:
            samples[request] = samples.get(request, 0) + num_samples
            drafts[request] = drafts.get(request, 0) + row.num_drafts
    loading = {request for request, _ in scheduler.cache_manager.loading.holders()}
    assert loading <= set(scheduler.waiting), "blocks arrive for a request that does not wait"
    for request in waiting:
        assert request.status is request.waiting_status or request in loading
        assert request.num_computed_tokens == 0
    for request in scheduler.running:
        assert request.status == RequestStatus.RUNNING
    for request in [*scheduler.running, *waiting]:
        num_known = request.num_tokens + request.num_output_placeholders
        assert request.num_output_placeholders == samples.get(request, 0), "placeholders differ from the steps in flight"
        assert request.num_drafts_in_flight == drafts.get(request, 0), "drafts differ from the steps in flight"
        assert request.num_computed_tokens <= num_known <= request.max_num_tokens, "more tokens than there may be"
        assert request.num_prompt_tokens <= request.num_tokens < request.max_num_tokens
