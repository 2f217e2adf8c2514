"""Stop conditions of a request."""

import numpy as np
import pytest

from jaxllm.request import FinishReason, RequestStatus
from jaxllm.scheduler.stop import check_stop, ends_in_repetition
from jaxllm.scheduler_output import ModelRunnerOutput, TokenLogprobs
from tests.helpers.scheduling import EOS, make_request, make_scheduler


def after(tokens, *, max_model_len=100, **fields):
    """The request after these output tokens, the last of which is to be checked."""
    request = make_request("r", 4, **fields)
    request.max_num_tokens = min(request.max_num_tokens, max_model_len)
    for token in tokens:
        request.append_output(token)
    return request


def test_eos_ends_without_a_reason():
    request = after([5, EOS])
    assert check_stop(request) == RequestStatus.FINISHED_STOPPED and request.stop_reason is None


def test_further_eos_ids_and_stop_ids_end_with_their_id():
    request = after([5, 7], eos=(EOS, 7))
    assert check_stop(request) == RequestStatus.FINISHED_STOPPED and request.stop_reason == 7
    request = after([5, 42], stop_token_ids=[41, 42])
    assert check_stop(request) == RequestStatus.FINISHED_STOPPED and request.stop_reason == 42


def test_ignore_eos_ignores_every_eos_but_no_stop_id():
    assert check_stop(after([EOS], ignore_eos=True)) is None
    assert check_stop(after([7], eos=(EOS, 7), ignore_eos=True)) is None
    request = after([EOS], ignore_eos=True, stop_token_ids=[EOS])
    assert check_stop(request) == RequestStatus.FINISHED_STOPPED and request.stop_reason == EOS


def test_lengths_end():
    assert check_stop(after([1, 2], max_tokens=3)) is None
    assert check_stop(after([1, 2, 3], max_tokens=3)) == RequestStatus.FINISHED_LENGTH_CAPPED
    assert check_stop(after([1, 2], max_model_len=6)) == RequestStatus.FINISHED_LENGTH_CAPPED
    assert check_stop(after([1, 2], max_model_len=7)) is None
    assert check_stop(after([1, 2], max_tokens=None, max_model_len=6)) == RequestStatus.FINISHED_LENGTH_CAPPED


def test_eos_wins_over_stop_ids_and_stop_ids_over_length():
    assert check_stop(request := after([EOS], max_tokens=1, stop_token_ids=[EOS])) == RequestStatus.FINISHED_STOPPED
    assert request.stop_reason is None
    assert check_stop(after([42], max_tokens=1, stop_token_ids=[42])) == RequestStatus.FINISHED_STOPPED


def test_a_drawn_stop_token_and_the_lengths_end_below_min_tokens():
    assert check_stop(after([EOS], min_tokens=5)) == RequestStatus.FINISHED_STOPPED
    assert check_stop(after([42], min_tokens=5, stop_token_ids=[42])) == RequestStatus.FINISHED_STOPPED
    assert check_stop(after([1, 2], min_tokens=5, max_model_len=6)) == RequestStatus.FINISHED_LENGTH_CAPPED


def test_repetition_ends_but_not_below_min_tokens():
    detection = {"max_pattern_size": 2, "min_pattern_size": 1, "min_count": 3}
    request = after([1, 2, 1, 2, 1, 2], repetition_detection=detection)
    assert check_stop(request) == RequestStatus.FINISHED_REPETITION and request.stop_reason == "repetition_detected"
    assert check_stop(after([1, 2, 1, 2, 1, 2], repetition_detection=detection, min_tokens=7)) is None
    assert check_stop(after([1, 2, 1, 2, 1], repetition_detection=detection)) is None


@pytest.mark.parametrize(
    ("tokens", "smallest", "largest", "count", "expected"),
    [
        ([7, 7], 1, 1, 2, True),
        ([7], 1, 1, 2, False),
        ([7, 7, 7], 2, 2, 2, False),
        ([7, 7, 7, 7], 2, 2, 2, True),
        ([1, 2, 3, 1, 2, 3], 1, 2, 2, False),
        ([1, 2, 3, 1, 2, 3], 1, 3, 2, True),
        ([1, 2, 3, 1, 2, 3], 1, 3, 3, False),
        ([1, 2, 3, 1, 2, 3, 4], 1, 3, 2, False),
        ([3, 1, 2, 1, 2, 1, 2, 1, 2], 2, 4, 4, True),
        ([3, 1, 2, 1, 2, 1, 2, 1, 2], 3, 4, 2, True),
    ],
)
def test_pattern_sizes_and_counts(tokens, smallest, largest, count, expected):
    detection = {"min_pattern_size": smallest, "max_pattern_size": largest, "min_count": count}
    assert ends_in_repetition(tokens, 0, detection) is expected


def test_the_prompt_does_not_count_as_repetition():
    assert ends_in_repetition([7, 7, 7, 7], 0, {"max_pattern_size": 1, "min_count": 3})
    assert not ends_in_repetition([7, 7, 7, 7], 2, {"max_pattern_size": 1, "min_count": 3})


@pytest.mark.parametrize(
    ("sampled", "fields", "kept", "reason", "stop_reason"),
    [
        ([10, EOS, 12], {}, [10, EOS], FinishReason.STOP, None),
        ([10, 42, 12], {"stop_token_ids": [42, 43]}, [10, 42], FinishReason.STOP, 42),
        ([10, 11, 12], {"max_tokens": 2}, [10, 11], FinishReason.LENGTH, None),
        ([10, EOS, 12], {"ignore_eos": True, "max_tokens": 11}, [10, EOS, 12], None, None),
    ],
)
def test_tokens_after_the_end_are_dropped_with_their_logprobs(sampled, fields, kept, reason, stop_reason):
    scheduler = make_scheduler()
    request = make_request("r", 5, **fields)
    scheduler.add_request(request)
    logprobs = TokenLogprobs(np.arange(6).reshape(3, 2), np.zeros((3, 2), np.float32), np.ones(3, np.int32))
    (output,) = scheduler.update_from_output(scheduler.schedule(), ModelRunnerOutput({"r": sampled}, logprobs={"r": logprobs}))
    assert (output.new_token_ids, output.finish_reason, output.stop_reason) == (kept, reason, stop_reason)
    assert request.output_token_ids == kept
    assert output.new_logprobs is not None
    assert (
        len(output.new_logprobs.token_ids) == len(output.new_logprobs.logprobs) == len(output.new_logprobs.ranks) == len(kept)
    )
    assert len(scheduler.requests) == (0 if reason else 1)
