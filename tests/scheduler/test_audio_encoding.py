"""Which audio a step encodes."""

from dataclasses import replace

import pytest

from jaxllm.device_ops import EncodeAudio
from jaxllm.errors import InvalidRequestError
from jaxllm.request import PromptItem, Request
from jaxllm.scheduler.admission import ChunkRoom, Fit
from jaxllm.scheduler.audio_encoding import MAX_STEP_CLIPS, AudioEncoding
from tests.helpers import engines


def request(name: str) -> Request:
    spec = engines.request(name, [1, 2, 3, 4], max_tokens=8)
    return Request(replace(spec, items=(PromptItem("audio", b"x", 0, 1, name.encode()),)))


@pytest.fixture
def room() -> AudioEncoding:
    return AudioEncoding(4)


def test_a_request_encodes_once_until_it_is_released(room: AudioEncoding) -> None:
    assert isinstance(room, ChunkRoom)
    one = request("one")
    assert room.fits(one) is Fit.NOW and room.limit(one, 0, 3) == 3
    assert room.ops(one, 0, 3) == [EncodeAudio(0, "one", b"one")]
    room.begin_step(decodes=False)
    assert room.limit(one, 3, 1) == 1 and room.ops(one, 3, 1) == []
    room.check_integrity([one])
    room.release(one)
    room.begin_step(decodes=False)
    assert room.limit(one, 0, 4) == 4 and len(room.ops(one, 0, 4)) == 1


def test_a_step_encodes_a_few_and_what_it_did_not_plan_is_free(room: AudioEncoding) -> None:
    requests = [request(f"{i}") for i in range(MAX_STEP_CLIPS + 1)]
    assert [room.limit(each, 0, 4) for each in requests] == [*[4] * MAX_STEP_CLIPS, 0]
    room.begin_step(decodes=False)
    assert room.limit(requests[-1], 0, 4) == 4
    room.release(requests[-1])
    assert room.ops(requests[-1], 0, 4) == []
    room.forget()
    room.check_integrity([])


def test_other_sizes_and_places_are_refused(room: AudioEncoding) -> None:
    room.check(PromptItem("audio", b"x", 0, 1, b"abcd"))
    for item in (PromptItem("audio", b"x", 0, 1, b"abc"), PromptItem("audio", b"x", 2, 1, b"abcd")):
        with pytest.raises(InvalidRequestError, match="must be at position 0 with 4"):
            room.check(item)
