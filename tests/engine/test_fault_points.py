import threading
import time

import pytest

from jaxllm.engine.fault_points import Fault, faults_of, injected, install, places
from jaxllm.errors import ConfigError
from jaxllm.request import Request
from tests.helpers.scheduling import make_request, make_scheduler


@pytest.mark.parametrize(
    ("when", "number", "request_id", "applies"),
    [
        ("7", 7, None, True),
        ("7", 8, None, False),
        ("7-9", 9, None, True),
        ("7-9", 10, None, False),
        ("7-", 10**6, None, True),
        ("id=bad*", 1, "bad-1", True),
        ("id=bad*", 1, "good", False),
        ("id=*", 1, None, False),
    ],
)
def test_when_a_fault_happens(when, number, request_id, applies):
    assert Fault.parse(f"step:{when}:oom").applies(number, request_id) is applies


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("step", "must be place:when:kind"),
        ("stepp:1:oom", "names the place 'stepp', must be one of add,"),
        ("step:soon:oom", "FIRST-LAST"),
        ("step:1:boom", "names the kind 'boom', must be one of error, oom, fatal"),
        ("step:1:hang=x", "has 'step:1:hang=x'"),
        ("step:1:corrupt", "corrupt at step, which reads no stored bytes"),
    ],
)
def test_a_wrong_fault_says_what_is_right(text, message):
    with pytest.raises(ConfigError, match=message):
        faults_of(f"add:1:error,{text}")


def test_a_fault_is_there_for_a_while_only():
    plain = Request.append_output
    with injected("stop:id=a:error,stop:2:hang=0"):
        request = make_request("a", 4)
        with pytest.raises(RuntimeError, match="injected"):
            request.append_output(1)
        assert make_request("b", 4).append_output(1) is False
    assert Request.append_output is plain


def test_a_fault_may_hold_the_interpreter():
    ticks: list[float] = []
    ended = threading.Event()

    def tick() -> None:
        while not ended.wait(0.001):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    with injected("stop:1:hold=0.2"):
        began = time.monotonic()
        make_request("a", 4).append_output(1)
        end = time.monotonic()
    ended.set()
    thread.join()
    assert end - began > 0.19 and not any(began + 0.05 < tick < end - 0.05 for tick in ticks)


def test_without_faults_nothing_is_wrapped():
    before = [make_scheduler().schedule.__func__, Request.append_output]
    install("core", [])()
    assert before == [make_scheduler().schedule.__func__, Request.append_output]


@pytest.mark.parametrize("name", [name for name, place in places().items() if place.side == "client"])
def test_every_place_of_the_client_exists(name):
    install("client", faults_of(f"{name}:1:error"))()


@pytest.mark.parametrize("name", [name for name, place in places().items() if place.side == "core"])
def test_every_place_of_the_core_exists(name):
    install("core", faults_of(f"{name}:1:error"))()
