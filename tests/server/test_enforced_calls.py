"""Calls that a request forces, whole and cut by max_tokens, as each chat API reports them."""

from collections.abc import Iterator
from typing import Any

import pytest

from jaxllm.async_llm import AsyncLLM
from server.app import create_app
from tests.helpers.scripted_core import fake_core
from tests.helpers.tiny_tokenizers import write_tokenizer
from tests.server.client import Client, events
from tests.server.conftest import options

SAID = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
FUNCTION = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Client, int]]:
    """An application whose model outputs `SAID`, and the number of its tokens."""
    core = fake_core(write_tokenizer(tmp_path_factory.mktemp("caller")), SAID, max_model_len=1000)
    with AsyncLLM(core=core) as engine:
        num_tokens = len(engine.get_tokenizer().encode(SAID, add_special_tokens=False))
        with Client(create_app(engine, options())) as client:
            yield client, num_tokens


@pytest.mark.parametrize("choice", ["required", NAMED, "auto"], ids=str)
def test_a_whole_call_ends_as_openai_says(caller: tuple[Client, int], choice: Any) -> None:
    client, _ = caller
    wanted = "stop" if choice is NAMED else "tool_calls"
    whole = client.chat(tools=TOOLS, tool_choice=choice).json()["choices"][0]
    assert (whole["finish_reason"], whole["message"]["content"]) == (wanted, None)
    chunks = events(client.chat(tools=TOOLS, tool_choice=choice, stream=True))
    assert chunks[-1]["choices"][0]["finish_reason"] == wanted


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_a_choice_among_some_tools_is_one_among_these_alone(caller: tuple[Client, int], mode: str) -> None:
    client, _ = caller
    two = [*TOOLS, {"type": "function", "function": {"name": "time"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [NAMED]}}
    found, wanted = (client.chat(tools=tools, tool_choice=choice).json() for tools, choice in ((two, choice), (TOOLS, mode)))
    assert found["usage"]["prompt_tokens"] == wanted["usage"]["prompt_tokens"]
    assert found["choices"][0]["finish_reason"] == "tool_calls" == wanted["choices"][0]["finish_reason"]
    asked = {
        "input": "hi",
        "tools": [{"type": "function", **tool["function"]} for tool in two],
        "tool_choice": {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "weather"}]},
    }
    response = client.post("/v1/responses", asked).json()
    assert [item["type"] for item in response["output"]] == ["function_call"]
    assert response["tool_choice"] == asked["tool_choice"] and len(response["tools"]) == 2
    assert response["usage"]["input_tokens"] == wanted["usage"]["prompt_tokens"]
    two[1]["function"]["name"] = "clock"
    choice["allowed_tools"]["tools"] = [NAMED, {"type": "function", "function": {"name": "time"}}]
    reply = client.chat(tools=two, tool_choice=choice)
    assert reply.status_code == 400 and "'time', which tools lacks" in reply.json()["error"]["message"]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_each_tool_is_checked_and_counted_as_sent_whether_it_is_allowed_or_not(caller: tuple[Client, int], place: int) -> None:
    client, _ = caller
    tools = [{"type": "function", "function": {"name": name}} for name in ("time", "weather", "clock")]
    tools[place]["function"]["parameters"] = {"type": "array"}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
    asked = {
        "input": "hi",
        "tools": [{"type": "function", **tool["function"]} for tool in tools],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]},
    }
    for reply in (client.chat(tools=tools, tool_choice=choice), client.post("/v1/responses", asked)):
        assert reply.status_code == 400 and reply.json()["error"]["message"].startswith(
            f"tools[{place}].function.parameters"
        ), reply.text


@pytest.mark.parametrize("choice", ["required", NAMED], ids=str)
def test_a_call_that_is_cut_ends_with_length_and_without_its_markup(caller: tuple[Client, int], choice: Any) -> None:
    client, num_tokens = caller
    for max_tokens in range(1, num_tokens, 3):
        asked = {"tools": TOOLS, "tool_choice": choice, "max_tokens": max_tokens}
        whole = client.chat(**asked).json()["choices"][0]
        assert (whole["finish_reason"], whole["message"]["content"] or "") == ("length", "")
        for call in whole["message"].get("tool_calls", ()):
            assert '{"city": "Paris"}'.startswith(call["function"]["arguments"])
        choices = [chunk["choices"][0] for chunk in events(client.chat(**asked, stream=True))]
        assert choices[-1]["finish_reason"] == "length"
        assert not any(each["delta"].get("content") for each in choices)


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_with_a_call_that_is_cut_is_incomplete(caller: tuple[Client, int], stream: bool) -> None:
    client, num_tokens = caller
    tools = [{"type": "function", **FUNCTION}]
    for max_tokens in range(1, num_tokens, 5):
        asked = {"input": "hi", "tools": tools, "tool_choice": "required", "max_output_tokens": max_tokens}
        reply = client.post("/v1/responses", {**asked, "stream": stream})
        if stream:
            assert "response.incomplete" in reply.text and "output_text" not in reply.text
            continue
        response = reply.json()
        assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert all(item["type"] == "function_call" and item["status"] == "incomplete" for item in response["output"])


def test_anthropic_is_told_that_a_named_tool_is_used(caller: tuple[Client, int]) -> None:
    client, _ = caller
    tools = [{"name": "weather", "input_schema": FUNCTION["parameters"]}]
    asked = {"max_tokens": 500, "messages": [{"role": "user", "content": "hi"}], "tools": tools}
    reply = client.post("/v1/messages", {**asked, "tool_choice": {"type": "tool", "name": "weather"}}).json()
    assert reply["stop_reason"] == "tool_use", reply
