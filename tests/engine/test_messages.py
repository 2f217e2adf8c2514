"""Bytes that are no message of the engine's sockets are MessageError and nothing else, however near they come to one."""

import contextlib
import inspect
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxllm.adapters import AdapterInfo, AdapterState
from jaxllm.engine import messages
from jaxllm.engine.messages import MessageError, Reply
from jaxllm.errors import AdapterNotFoundError
from jaxllm.request import EngineCoreRequest, PromptItem
from jaxllm.sampling_params import SamplingParams

TAGS = [
    "hello",
    "add",
    "abort",
    "end_lease",
    "meet",
    "call",
    "status",
    "ready",
    "outputs",
    "refused",
    "failed",
    "reply",
    "dead",
    "sleep",
]
ADD = messages.encode(
    messages.Add(
        "a",
        EngineCoreRequest(
            request_id="x",
            prompt_token_ids=[1, 2, 3],
            items=(PromptItem("image", b"dog", position=1, num_tokens=2, payload=b"pixels"),),
            sampling_params=SamplingParams(seed=1),
        ),
    )
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=4) | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["request_id", "sampling_params", "prompt_token_ids", "x"]), inner, max_size=4)
    ),
    max_leaves=12,
)
LIKE_MESSAGES = st.tuples(st.sampled_from(TAGS), st.lists(VALUES, max_size=8)).map(lambda parts: [parts[0], *parts[1]])


def read(frame: bytes) -> list[Any]:
    """A frame as each end decodes it; without the ends that refuse it."""
    found = []
    for decode in (messages.decode_client_message, messages.decode_engine_message, messages.decode_engine_start):
        with contextlib.suppress(MessageError):
            found.append(decode(frame))
    sender = messages.sender_of_add(frame)
    assert sender is None or all(isinstance(part, str) for part in sender)
    return found


def places(value: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value inside one."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [way, *(place for key, child in children for place in places(child, (*way, key)))]


@given(st.binary(max_size=80))
@example(b"\x91" * 100_000)
@example(b"\x81\xa1x" * 100_000)
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\xc6\xff\xff\xff\xff")
@settings(max_examples=200)
def test_no_bytes_break_a_decoder(frame: bytes) -> None:
    read(frame)


@given(VALUES | LIKE_MESSAGES)
@settings(max_examples=150)
def test_nothing_like_a_message_breaks_a_decoder(value: Any) -> None:
    read(msgspec.msgpack.encode(value))


@pytest.mark.slow
@given(st.data(), VALUES)
@settings(max_examples=300)
def test_a_request_with_any_field_replaced_is_read_or_refused(data: st.DataObject, value: Any) -> None:
    whole = msgspec.msgpack.decode(ADD)
    *way, last = data.draw(st.sampled_from(places(whole)[1:]))
    inside = whole
    for key in way:
        inside = inside[key]
    inside[last] = value
    read(msgspec.msgpack.encode(whole))


def test_the_request_itself_is_read() -> None:
    (found,) = read(ADD)
    assert found.request.prompt_token_ids == [1, 2, 3] and messages.sender_of_add(ADD) == ("a", "x")


@pytest.mark.parametrize(
    "result",
    [[AdapterInfo("sql", "/a/sql", 8, 1024, True, "host")], AdapterState("failed", "no such file"), [], 7, False, None],
)
def test_what_calls_about_adapters_return_is_read_as_it_was_sent(result: Any) -> None:
    assert messages.decode_engine_message(messages.encode(Reply(1, result))) == Reply(1, result)


def test_an_unknown_adapter_stays_that_on_its_way_to_a_client() -> None:
    error = messages.error_of(messages.fault_of(AdapterNotFoundError("there is no adapter 'x'", "model")))
    assert type(error) is AdapterNotFoundError and (str(error), error.param) == ("there is no adapter 'x'", "model")


def test_every_control_call_is_a_method_of_the_core_with_the_fields_of_its_message() -> None:
    from jaxllm.engine.core import EngineCore

    assert {"sleep", "wake_up", "pause", "resume", "reset_prefix_cache", "start_profile"} <= messages._CALL_TYPES.keys()
    for name, call in messages._CALL_TYPES.items():
        assert list(inspect.signature(getattr(EngineCore, name)).parameters) == ["self", *call.__struct_fields__], name
