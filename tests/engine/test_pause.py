"""A paused engine holds new requests; running ones are aborted, finished or suspended, and no tokens change."""

from dataclasses import replace

import pytest

from jaxllm.config import SchedulerOptions
from jaxllm.engine.pause import Pause
from jaxllm.errors import InvalidRequestError, OverloadedError
from jaxllm.request import FinishReason
from tests.engine.test_sleep import RESULTS, check_answers, requests
from tests.helpers import engines
from tests.helpers.fake_items import image

LATE = "late"


def late():
    return engines.request(LATE, RESULTS[0].prompt, max_tokens=6)


def begin(core, mode):
    """Three requests that run, then a pause, then one that comes late."""
    for request in requests():
        core.add_request(request)
    core.step()
    core.pause(mode)
    core.add_request(late())
    assert core.is_paused()


def run_on(core):
    """The tokens and the ends of all requests, as long as the engine has something to do."""
    tokens, ends = {}, {}
    while core.has_unfinished_requests():
        for output in core.step():
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                ends[output.request_id] = output.finish_reason
    return tokens, ends


def check_late_one(core, tokens, ends):
    assert tokens[LATE] == RESULTS[0].tokens[:6] and ends[LATE] == FinishReason.LENGTH
    assert not core.is_paused()
    core.check_integrity()
    check_answers(core)


def test_what_runs_is_aborted(core):
    begin(core, "abort")
    assert run_on(core)[1] == dict.fromkeys("012", FinishReason.ABORT)
    assert not core.is_draining()
    core.resume()
    check_late_one(core, *run_on(core))


def test_what_runs_ends_first(core):
    begin(core, "wait")
    assert core.is_draining()
    assert run_on(core)[1] == dict.fromkeys("012", FinishReason.LENGTH)
    assert not core.is_draining()
    core.resume()
    check_late_one(core, *run_on(core))


def test_what_runs_stands_still(core):
    begin(core, "keep")
    assert not core.has_unfinished_requests() and not core.is_draining() and core.step() == []
    core.resume()
    tokens, ends = run_on(core)
    assert ends == dict.fromkeys(["0", "1", "2", LATE], FinishReason.LENGTH)
    check_late_one(core, tokens, ends)


def test_requests_that_are_held_can_be_aborted_put_to_sleep_and_bounded(core, monkeypatch):
    core.pause()
    core.add_request(late())
    core.abort_requests([LATE])
    core.add_request(late())
    monkeypatch.setattr(core._pause, "_options", replace(core.config.scheduler, max_num_queued_reqs=1))
    with pytest.raises(OverloadedError):
        core.add_request(requests()[0])
    core.sleep(1)
    assert [output.finish_reason for output in core.step()] == [FinishReason.ABORT]
    core.wake_up()
    assert core.is_paused()
    core.resume()
    check_answers(core)


def test_images_that_wait_are_bounded():
    """One request may have any, others as far as all fit together; equal payloads that are one object count once."""

    def request(name, *contents):
        items = tuple(image(content, place, 1) for place, content in enumerate(contents))
        return replace(engines.request(name, [7] * 9, max_tokens=1), items=items)

    pause, earlier = Pause(SchedulerOptions(max_queued_image_gb=100 / 2**30)), request("earlier", bytes(59))
    pause.hold(request("a", bytes(19)), [earlier])
    pause.hold(engines.request("text", [7]), [earlier])
    with pytest.raises(OverloadedError, match="the engine is paused, and unfinished requests hold .*--max-queued-image-gb"):
        pause.hold(request("b", bytes(20)), [earlier])
    pause.hold(request("c", bytes(9), bytes(9)), [earlier])
    assert [*pause.held] == ["a", "text", "c"]
    Pause(SchedulerOptions(max_queued_image_gb=100 / 2**30)).hold(request("alone", bytes(500)), [])


def test_there_are_three_modes(core):
    with pytest.raises(InvalidRequestError, match="must be one of abort, wait, keep"):
        core.pause("stop")
    assert not core.is_paused()
