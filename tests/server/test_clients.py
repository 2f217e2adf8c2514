"""The clients of OpenAI and Anthropic, unchanged, against a real server."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from jaxllm.async_llm import AsyncLLM
from tests.helpers.fake_engine_core import FakeEngineCore
from tests.helpers.live_server import LiveServer
from tests.helpers.scripted_core import fake_core
from tests.helpers.tiny_tokenizers import CHAT_TEMPLATE, write_tokenizer
from tests.server.canned import SAID, WEATHER

KEY = "secret"
TOOLS = [{"type": "function", "name": name, "parameters": WEATHER} for name in ("weather", "time")]
ANTHROPIC_TOOLS: Any = [{"name": name, "input_schema": WEATHER} for name in ("weather", "time")]


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> FakeEngineCore:
    """Answers with reasoning, text and a call if the prompt has tools, else with a JSON object."""
    directory = write_tokenizer(tmp_path_factory.mktemp("speaker"), chat_template="{{ tools or '' }}" + CHAT_TEMPLATE)

    def say(request: Any) -> list[int]:
        text = SAID if "weather" in tokenizer.decode(request.prompt_token_ids) else '</think>{"city": "Köln", "degrees": 20}'
        return [*tokenizer.encode(text, add_special_tokens=False), request.eos_token_ids[0]]

    core = fake_core(directory, say, max_model_len=2000)
    from jaxllm.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(directory)
    return core


@pytest.fixture(scope="module")
def server(speaker: FakeEngineCore) -> Iterator[LiveServer]:
    with (
        AsyncLLM(core=speaker) as engine,
        LiveServer.start(
            engine, served_model_name=["m"], api_key=[KEY], tool_call_parser="hermes", reasoning_parser="deepseek_r1"
        ) as server,
    ):
        yield server


@pytest.fixture(scope="module")
def of_openai(server: LiveServer) -> Iterator[Any]:
    openai = pytest.importorskip("openai")  # here, as one of the processes that collect tests needs it, and it takes a second
    with openai.OpenAI(base_url=f"http://{server.host}:{server.port}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def of_anthropic(server: LiveServer) -> Iterator[Any]:
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=f"http://{server.host}:{server.port}", api_key=KEY, max_retries=0) as client:
        yield client


class Weather(BaseModel):
    """The output of the speaker."""

    city: str
    degrees: int


def test_openai_creates_retrieves_and_chains(of_openai: Any) -> None:
    import openai

    first = of_openai.responses.create(model="m", input="hi", instructions="be kind", metadata={"a": "b"})
    assert (first.status, json.loads(first.output_text)["city"]) == ("completed", "Köln")
    assert first.usage.total_tokens == first.usage.input_tokens + first.usage.output_tokens
    assert of_openai.responses.retrieve(first.id).output_text == first.output_text
    second = of_openai.responses.create(model="m", input="again", previous_response_id=first.id)
    assert second.usage.input_tokens > first.usage.input_tokens
    of_openai.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        of_openai.responses.retrieve(first.id)


def test_openai_streams_every_event(of_openai: Any) -> None:
    with of_openai.responses.stream(model="m", input="hi", tools=TOOLS) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert {"response.reasoning_text.delta", "response.output_text.delta", "response.function_call_arguments.delta"} <= set(
        kinds
    )
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
    assert final.output_text == "Let me see."
    assert json.loads(final.output[2].arguments) == {"city": "Köln"}


def test_openai_sends_the_results_of_calls_back(of_openai: Any) -> None:
    first = of_openai.responses.create(model="m", input="hi", tools=TOOLS)
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "20"}
        for item in first.output
        if item.type == "function_call"
    ]
    assert len(results) == 2
    second = of_openai.responses.create(model="m", input=results, previous_response_id=first.id, tools=TOOLS)
    assert second.status == "completed"
    turns = [{"role": "user", "content": "hi"}, *[item.model_dump() for item in first.output], *results]
    assert of_openai.responses.create(model="m", input=turns, tools=TOOLS, store=False).status == "completed"


def test_openai_parses_what_the_schema_says(of_openai: Any) -> None:
    assert of_openai.responses.parse(model="m", input="hi", text_format=Weather).output_parsed == Weather(
        city="Köln", degrees=20
    )
    with of_openai.responses.stream(model="m", input="hi", text_format=Weather) as stream:
        assert stream.get_final_response().output_parsed == Weather(city="Köln", degrees=20)


def test_openai_runs_in_the_background(of_openai: Any) -> None:
    made = of_openai.responses.create(model="m", input="hi", background=True)
    while made.status in ("queued", "in_progress"):
        made = of_openai.responses.retrieve(made.id)
    assert made.status == "completed"
    assert of_openai.responses.cancel(made.id).status == "completed"
    events = list(of_openai.responses.create(model="m", input="hi", background=True, stream=True))
    rest = list(of_openai.responses.retrieve(events[0].response.id, stream=True, starting_after=2))
    assert [event.sequence_number for event in rest] == [event.sequence_number for event in events[3:]]


def test_openai_reports_errors_as_its_classes(of_openai: Any, server: LiveServer) -> None:
    import openai

    with pytest.raises(openai.BadRequestError) as caught:
        of_openai.responses.create(model="m", input="hi", temperature=-3)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        of_openai.responses.create(model="other", input="hi")
    with pytest.raises(openai.AuthenticationError):
        of_openai.with_options(api_key="wrong").responses.create(model="m", input="hi")


def test_anthropic_creates_and_counts(of_anthropic: Any) -> None:
    asked: Any = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "system": "be kind"}
    message = of_anthropic.messages.create(max_tokens=100, **asked)
    assert (message.stop_reason, json.loads(message.content[0].text)["degrees"]) == ("end_turn", 20)
    assert of_anthropic.messages.count_tokens(**asked).input_tokens == message.usage.input_tokens


def test_anthropic_streams_thoughts_words_and_calls(of_anthropic: Any) -> None:
    asked: Any = {"model": "m", "max_tokens": 1500, "tools": ANTHROPIC_TOOLS, "messages": [{"role": "user", "content": "hi"}]}
    with of_anthropic.messages.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_message()
    assert {"thinking", "text", "input_json", "message_stop"} <= kinds
    thought, text, weather, time = message.content
    assert (thought.thinking, text.text) == ("I must look it up.", "Let me see.")
    assert (weather.name, weather.input, time.input) == ("weather", {"city": "Köln"}, {})
    assert (message.stop_reason, message.usage.output_tokens > 0) == ("tool_use", True)
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "20"} for call in (weather, time)]
    turns = [*asked["messages"], {"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
    assert of_anthropic.messages.create(**{**asked, "messages": turns}).stop_reason == "tool_use"


def test_anthropic_reports_errors_as_its_classes(of_anthropic: Any) -> None:
    import anthropic

    asked: Any = {"max_tokens": 10, "messages": [{"role": "user", "content": "hi"}]}
    with pytest.raises(anthropic.BadRequestError) as caught:
        of_anthropic.messages.create(model="m", **{**asked, "max_tokens": 0})
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError):
        of_anthropic.messages.create(model="other", **asked)
    with pytest.raises(anthropic.AuthenticationError) as refused:
        of_anthropic.with_options(api_key="wrong").messages.create(model="m", **asked)
    assert refused.value.body == {"type": "error", "error": refused.value.body["error"]}
    assert refused.value.body["error"]["type"] == "authentication_error"
