"""Limits on waiting requests."""

import pytest

from jaxllm.errors import OverloadedError
from jaxllm.request import Request, RequestStatus
from tests.helpers.fake_items import encoder, image
from tests.helpers.scheduling import make_request, make_scheduler, run_to_end, step


def test_requests_beyond_the_seats_and_the_queue_are_refused() -> None:
    scheduler = make_scheduler(max_num_seqs=2, max_num_queued_reqs=3)
    for number in range(5):  # two of them have a seat in the next step
        scheduler.add_request(make_request(f"first{number}", 4))
    with pytest.raises(OverloadedError, match="3 requests wait already and at most 3 may .--max-num-queued-reqs."):
        scheduler.add_request(make_request("more", 4))
    step(scheduler)
    with pytest.raises(OverloadedError):
        scheduler.add_request(make_request("more", 4))
    scheduler.finish_requests("first4", RequestStatus.FINISHED_ABORTED)
    scheduler.add_request(make_request("more", 4))
    assert len({output.request_id for output in run_to_end(scheduler)}) == 5
    scheduler.add_request(make_request("again", 4))


def test_seats_do_not_count_while_blocks_keep_requests_waiting() -> None:
    scheduler = make_scheduler(num_blocks=9, block_size=4, max_model_len=32, max_num_seqs=8, max_num_queued_reqs=1)
    for number in range(2):
        scheduler.add_request(make_request(str(number), 20, max_tokens=2))
    step(scheduler)
    assert len(scheduler.running) == 1
    with pytest.raises(OverloadedError):
        scheduler.add_request(make_request("2", 20))


def test_without_a_queue_only_seats_are_given() -> None:
    scheduler = make_scheduler(max_num_seqs=2, max_num_queued_reqs=0)
    scheduler.add_request(make_request("a", 4))
    scheduler.add_request(make_request("b", 4))
    with pytest.raises(OverloadedError):
        scheduler.add_request(make_request("c", 4))


@pytest.mark.parametrize("policy", ["fcfs", "fair", "priority"])
def test_prompt_tokens_that_wait_are_limited(policy: str) -> None:
    scheduler = make_scheduler(max_num_seqs=1, max_num_queued_tokens=100, scheduling_policy=policy)
    scheduler.add_request(make_request("large", 500))  # the only one is always taken
    step(scheduler)
    scheduler.add_request(make_request("a", 60))
    with pytest.raises(OverloadedError, match="60 prompt tokens wait already, the request has 41"):
        scheduler.add_request(make_request("b", 41))
    scheduler.add_request(make_request("b", 40))
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    scheduler.add_request(make_request("c", 60))
    run_to_end(scheduler)
    assert scheduler.waiting.num_prompt_tokens == 0


def test_bytes_of_images_are_limited_until_their_requests_end() -> None:
    scheduler = make_scheduler(max_num_seqs=1, max_queued_image_gb=100 / 2**30, rooms=(encoder(),))

    def add(name: str, num_bytes: int) -> Request:
        request = make_request(name, 20, items=(image(bytes(num_bytes - 1), 4, 8),))
        scheduler.add_request(request)
        return request

    large = add("large", 500)  # the only one is always taken
    scheduler.add_request(make_request("text", 20))
    step(scheduler)
    assert large.status is RequestStatus.RUNNING
    with pytest.raises(OverloadedError, match=r"hold 0.0 GiB of images, .* \(--max-queued-image-gb\); try again"):
        add("a", 1)
    scheduler.finish_requests("large", RequestStatus.FINISHED_ABORTED)
    shared = add("b", 60).spec.items
    scheduler.add_request(make_request("b2", 20, items=shared))
    with pytest.raises(OverloadedError):
        add("c", 41)
    add("c", 40)
    run_to_end(scheduler)
    assert scheduler.stats().num_rejected_for_images == 2


def test_the_time_to_wait_is_that_of_the_next_in_line() -> None:
    scheduler = make_scheduler(max_num_seqs=1, max_num_queued_reqs=1)
    scheduler.add_request(make_request("runs", 4))
    step(scheduler)
    scheduler.add_request(make_request("waits", 4))
    scheduler.waiting.peek().queued_at -= 7.0
    with pytest.raises(OverloadedError) as caught:
        scheduler.add_request(make_request("more", 4))
    assert caught.value.retry_after_seconds == 7
