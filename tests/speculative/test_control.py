"""How many drafts requests get: as many as their last ones were worth, and none where they cost more than they bring."""

from jaxllm.request import Request, RequestStatus
from jaxllm.scheduler_output import ModelRunnerOutput, RowStep
from jaxllm.speculative.control import AdaptiveControl
from tests.helpers.scheduling import make_request

NUM_DRAFTS = 4


def control(most_drafts=lambda num_running: NUM_DRAFTS) -> AdaptiveControl:
    return AdaptiveControl(NUM_DRAFTS, 0, most_drafts=most_drafts)


def note(control: AdaptiveControl, request: Request, num_right: int, num_drafts: int = NUM_DRAFTS) -> None:
    """A step of a request."""
    row = RowStep(request.request_id, 0, 1 + num_drafts, num_drafts, [])
    result = ModelRunnerOutput({request.request_id: [7] * (1 + num_right)}, {request.request_id: num_drafts})
    control.note([(request, 1 + num_drafts, row)], result)


def step(control: AdaptiveControl, requests: list[Request], num_right: int, *, cost: float) -> int:
    """A step of these requests, which takes `cost` times as long with drafts. Returns the most drafts of a request."""
    most = control.most(len(requests))
    for request in requests if most else ():
        note(control, request, num_right)
    control.note_seconds(len(requests), most, cost if most else 1.0)
    return most


def test_a_request_gets_about_twice_as_many_drafts_as_were_right():
    adaptive, good, bad = control(), make_request("good", 1), make_request("bad", 1)
    assert adaptive.of(good) == adaptive.of(bad) == NUM_DRAFTS
    for _ in range(20):
        note(adaptive, good, NUM_DRAFTS)
        note(adaptive, bad, 0)
    assert adaptive.of(good) >= NUM_DRAFTS and adaptive.of(bad) == 1
    for _ in range(20):
        note(adaptive, bad, min(1, adaptive.of(bad)))
    assert adaptive.of(bad) == 3


def test_a_request_gets_no_more_drafts_than_it_asks_for():
    adaptive = control()
    for asked in (0, 1, 99):
        request = make_request(f"r{asked}", 1, num_speculative_tokens=asked)
        assert adaptive.of(request) == min(asked, NUM_DRAFTS)
        for _ in range(9):
            note(adaptive, request, 0, 1)
        assert adaptive.of(request) == min(asked, 1)


def test_the_options_limit_the_drafts_of_all():
    adaptive = control(lambda num_running: {1: 9, 2: 2}.get(num_running, 0))
    assert [adaptive.most(num_running) for num_running in (0, 1, 2, 3)] == [0, NUM_DRAFTS, 2, 0]
    assert adaptive.num_now == 0


def test_drafts_stop_where_they_do_not_pay_and_are_tried_again_now_and_then():
    adaptive, requests = control(), [make_request(name, 1) for name in "abc"]
    before = [step(adaptive, requests, 0, cost=1.5) for _ in range(200)]
    assert before[0] == NUM_DRAFTS and not any(before[100:])
    later = [step(adaptive, requests, 0, cost=1.5) for _ in range(1000)]
    assert 10 < sum(map(bool, later)) < 100
    # The next trial shows that they are right now.
    won = [step(adaptive, requests, NUM_DRAFTS, cost=1.5) for _ in range(700)]
    assert won[-50:] == [NUM_DRAFTS] * 50


def test_drafts_that_pay_are_left_out_only_to_time_a_step_without():
    adaptive, requests = control(), [make_request("a", 1)]
    steps = [step(adaptive, requests, 2, cost=1.5) for _ in range(5000)]
    assert 3 <= steps.count(0) <= 12 and steps[:3] == [NUM_DRAFTS] * 3


def test_drafts_go_on_where_no_step_without_them_can_be_timed():
    """Steps have prompts in them, or fewer rows than may run."""
    adaptive, requests = control(), [make_request("a", 1)]
    for _ in range(3):
        step(adaptive, requests, 2, cost=1.5)
    assert [adaptive.most(1) for _ in range(100)][50:] == [NUM_DRAFTS] * 50


def test_nothing_is_kept_of_requests_that_have_ended():
    """A step in flight may bring tokens after the end."""
    adaptive, request = control(), make_request("a", 1)
    note(adaptive, request, 0)
    request.status = RequestStatus.FINISHED_STOPPED
    adaptive.forget("a")
    note(adaptive, request, 0)
    assert adaptive.of(make_request("a", 1)) == NUM_DRAFTS
    assert adaptive.counts.num_drafts == 1


def test_a_step_has_as_many_drafts_as_bring_the_most_tokens_a_second():
    """Where a wide step is bound by arithmetic, half of the drafts may bring more than all."""
    for costs, right, best in (((1.0, 1.2, 1.7), 2, 2), ((1.0, 1.05, 1.1), 4, 4), ((1.0, 3.0, 5.0), 1, 0)):
        adaptive, requests = control(), [make_request("a", 1)]
        chosen = []
        for _ in range(400):
            most = adaptive.most(1)
            chosen.append(most)
            if most:
                note(adaptive, requests[0], min(most, right), most)
            adaptive.note_seconds(1, most, costs[(0, 2, 4).index(most)])
        assert chosen[-100:].count(best) >= 90, (costs, chosen[-20:])
