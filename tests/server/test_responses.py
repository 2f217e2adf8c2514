"""The routes of the Responses API."""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxllm.async_llm import AsyncLLM
from jaxllm.errors import EngineError
from jaxllm.text.tokenizer import load_tokenizer
from server.app import create_app
from server.chat_deltas import ChatDelta
from server.responses.service import BackgroundRun, ResponsesService
from tests.helpers.fake_engine_core import FakeEngineCore
from tests.helpers.scripted_core import fake_core
from tests.helpers.tiny_tokenizers import write_tokenizer
from tests.server.canned import WEATHER, answer_with, caller_app
from tests.server.client import Client
from tests.server.conftest import options


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A client of a model that answers with reasoning, text and calls."""
    with caller_app(tmp_path_factory.mktemp("caller")) as app, Client(app) as client:
        yield client


def respond(client: Client, **body: Any) -> httpx.Response:
    return client.post("/v1/responses", {"input": "hi", **body})


def named_events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, each of which has its type as its name."""
    assert response.status_code == 200, response.text
    found = []
    for block in response.text.rstrip("\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def test_a_text_is_answered(client: Client) -> None:
    response = respond(client, metadata={"a": "b"}, instructions="be kind", max_output_tokens=50).json()
    assert response["object"] == "response"
    assert (response["status"], response["model"], response["metadata"]) == ("completed", "m", {"a": "b"})
    [message] = response["output"]
    assert (message["role"], message["content"][0]["text"]) == ("assistant", "one two three")
    usage = response["usage"]
    assert usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"]
    assert usage["output_tokens"] == 4


def test_what_a_response_answered_is_listed_page_by_page(client: Client) -> None:
    first = respond(client, input="one").json()
    given = [
        {"role": "user", "content": [{"type": "input_text", "text": "two"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "3"},
        {"role": "assistant", "content": "four"},
    ]
    second = respond(client, input=given, previous_response_id=first["id"]).json()
    path = f"/v1/responses/{second['id']}/input_items"
    whole = client.get(f"{path}?order=asc").json()
    assert (whole["object"], whole["has_more"]) == ("list", False)
    types = [item["type"] for item in whole["data"]]
    assert types == ["message", "message", "message", "function_call", "function_call_output", "message"]
    assert whole["data"][0]["content"] == [{"type": "input_text", "text": "one"}] and whole["data"][1] == first["output"][0]
    assert whole["data"][-1]["content"] == [{"type": "output_text", "text": "four", "annotations": []}]
    ids = [item["id"] for item in whole["data"]]
    assert len({*ids}) == 6 and (whole["first_id"], whole["last_id"]) == (ids[0], ids[-1])
    found: list[Any] = []
    while True:
        after = f"&after={found[-1]}" if found else ""
        page = client.get(f"{path}?limit=4{after}").json()
        found += [item["id"] for item in page["data"]]
        if not page["has_more"]:
            break
    assert found == ids[::-1]
    assert client.get(f"{path}?after=x").status_code == client.get(f"{path}?limit=0").status_code == 400
    client.request("DELETE", f"/v1/responses/{first['id']}")
    assert len(client.get(path).json()["data"]) == 4
    client.request("DELETE", f"/v1/responses/{second['id']}")
    assert client.get(path).status_code == 404


def test_a_stream_ends_with_the_response_that_is_stored(client: Client) -> None:
    events = named_events(respond(client, stream=True))
    assert events[0]["type"] == "response.created"
    last = events[-1]
    assert last["type"] == "response.completed"
    assert "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta") == "one two three"
    assert client.get(f"/v1/responses/{last['response']['id']}").json() == last["response"]


def test_logprobs_come_where_they_are_included(client: Client) -> None:
    body = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    part = respond(client, **body).json()["output"][0]["content"][0]
    streamed = named_events(respond(client, stream=True, **body))
    in_deltas = [each for event in streamed if event["type"] == "response.output_text.delta" for each in event["logprobs"]]
    assert [each["token"] for each in part["logprobs"]][:3] == ["one", " two", " three"]
    assert [each["token"] for each in in_deltas][:3] == ["one", " two", " three"]
    assert all(len(each["top_logprobs"]) == 2 for each in part["logprobs"])


def test_every_token_has_its_logprobs_however_its_outputs_come(client: Client) -> None:
    for body in ({}, {"stream": True}, {"stop": "three"}):
        reply = respond(client, include=["message.output_text.logprobs"], **body)
        response = named_events(reply)[-1]["response"] if "stream" in body else reply.json()
        logprobs = response["output"][0]["content"][0]["logprobs"]
        assert len(logprobs) == response["usage"]["output_tokens"]


def test_reasoning_and_calls_are_items_of_their_own(caller: Client) -> None:
    tools = [{"type": "function", "name": name, "parameters": WEATHER} for name in ("weather", "time")]
    response = respond(caller, tools=tools).json()
    thought, message, weather, time = response["output"]
    assert (thought["type"], thought["content"]) == ("reasoning", [{"type": "reasoning_text", "text": "I must look it up."}])
    assert (message["type"], message["content"][0]["text"]) == ("message", "Let me see.")
    assert (weather["type"], weather["name"], json.loads(weather["arguments"])) == (
        "function_call",
        "weather",
        {"city": "Köln"},
    )
    assert (time["name"], json.loads(time["arguments"])) == ("time", {})
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    assert response["tools"] == [{**tool, "description": None, "strict": None} for tool in tools]
    streamed = named_events(respond(caller, tools=tools, stream=True))[-1]["response"]
    for item in (*response["output"], *streamed["output"]):
        del item["id"]
        item.pop("call_id", None)
    assert streamed["output"] == response["output"]


def test_what_the_model_did_goes_back_to_it(caller: Client) -> None:
    tools = [{"type": "function", "name": name, "parameters": WEATHER} for name in ("weather", "time")]
    first = respond(caller, tools=tools).json()
    calls = [item for item in first["output"] if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "20"} for call in calls]
    assert respond(caller, input=results, previous_response_id=first["id"], tools=tools).status_code == 200
    assert (
        respond(caller, input=[{"role": "user", "content": "hi"}, *first["output"], *results], tools=tools).status_code == 200
    )


def test_a_later_turn_holds_the_earlier_ones(client: Client, core: FakeEngineCore) -> None:
    first = respond(client, input="first", instructions="only then").json()
    second = respond(client, input="second", previous_response_id=first["id"]).json()
    prompt = client.app.state.context.engine.get_tokenizer().decode(core.requests[-1].prompt_token_ids)
    places = [prompt.index(text) for text in ("first", "one two three", "second")]
    assert places == sorted(places)
    assert "only then" not in prompt
    assert second["previous_response_id"] == first["id"]
    whole = [{"role": "user", "content": "first"}, *first["output"], {"role": "user", "content": "second"}]
    respond(client, input=whole)
    assert core.requests[-1].prompt_token_ids == core.requests[-2].prompt_token_ids


def test_what_is_not_to_be_stored_is_not(client: Client) -> None:
    response = respond(client, store=False).json()
    assert response["store"] is False
    assert client.get(f"/v1/responses/{response['id']}").status_code == 404
    refused = respond(client, previous_response_id=response["id"])
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "previous_response_not_found")


def test_another_key_sees_nothing_of_it(client: Client) -> None:
    response_id = respond(client).json()["id"]
    other = {"authorization": "Bearer other"}
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel")):
        assert client.request(method, f"/v1/responses/{response_id}{path}", headers=other).status_code == 404
    assert client.post("/v1/responses", {"input": "x", "previous_response_id": response_id}, headers=other).status_code == 404
    assert client.get(f"/v1/responses/{response_id}").status_code == 200


def test_a_deleted_response_is_gone(client: Client) -> None:
    response_id = respond(client).json()["id"]
    assert client.request("DELETE", f"/v1/responses/{response_id}").json()["deleted"] is True
    assert client.get(f"/v1/responses/{response_id}").status_code == 404


def test_only_what_runs_in_the_background_can_be_cancelled(client: Client) -> None:
    response_id = respond(client).json()["id"]
    refused = client.post(f"/v1/responses/{response_id}/cancel")
    assert refused.status_code == 400
    assert "background" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": "x" * 3000}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -9.0}, "temperature"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"n": 2}, "n"),
        ({"previous_input_messages": [{"role": "user", "content": "x"}]}, "previous_input_messages"),
        ({"text": {"format": {"type": "zzz"}}}, "text"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"background": True, "store": False}, "background"),
        ({"guided_regex": "a"}, "guided_regex"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_wrong_requests_are_refused_before_anything_is_sent(
    client: Client, body: dict[str, Any], param: str, stream: bool
) -> None:
    refused = respond(client, stream=stream, **body)
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == param


@pytest.mark.parametrize("stream", [False, True])
def test_an_unknown_previous_response_is_not_found(client: Client, stream: bool) -> None:
    refused = respond(client, stream=stream, previous_response_id="resp_x")
    error = refused.json()["error"]
    assert (refused.status_code, error["type"], error["param"]) == (404, "not_found_error", "previous_response_id")


def test_truncation_drops_first_turns_until_the_rest_fits(client: Client, core: FakeEngineCore) -> None:
    turns: list[dict[str, Any]] = [{"role": "system", "content": "stay"}]
    for number in range(8):
        turns += [
            {"role": "user", "content": f"question {number} {'x' * 30}"},
            {"role": "assistant", "content": f"answer {number}"},
        ]
    turns.append({"role": "user", "content": "the last"})
    assert respond(client, input=turns).json()["error"]["code"] == "context_length_exceeded"
    response = respond(client, input=turns, truncation="auto")
    assert response.json()["truncation"] == "auto"
    tokenizer = client.app.state.context.engine.get_tokenizer()
    prompt = tokenizer.decode(core.requests[-1].prompt_token_ids)
    assert "stay" in prompt and "the last" in prompt and "question 0" not in prompt and "question 7" in prompt
    assert respond(client, input="x" * 3000, truncation="auto").status_code == 400


def test_an_engine_that_fails_at_once_is_a_status_and_later_an_event(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, client.app, [EngineError("secret")])
    for stream in (False, True):
        refused = respond(client, stream=stream)
        assert (refused.status_code, refused.json()["error"]["code"]) == (500, "engine_error")
        assert "secret" not in refused.text
    answer_with(monkeypatch, client.app, [ChatDelta(0, content="so far"), EngineError("secret")])
    events = named_events(respond(client, stream=True))
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "so far"
    assert "secret" not in json.dumps(events)
    assert client.get(f"/v1/responses/{events[-1]['response']['id']}").json()["status"] == "failed"


# In the background


async def until(condition: Any) -> Any:
    """Poll a condition until it holds; return its result."""
    while not (found := await condition()):
        await asyncio.sleep(0)
    return found


def browser(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://localhost")


def test_a_background_response_is_fetched_later(client: Client) -> None:
    async def run() -> None:
        async with browser(client.app) as web:
            made = (await web.post("/v1/responses", json={"input": "hi", "background": True})).json()
            assert made["status"] == "queued"

            async def finished() -> Any:
                found = (await web.get(f"/v1/responses/{made['id']}")).json()
                return found["status"] == "completed" and found

            found = await until(finished)
            assert found["output"][0]["content"][0]["text"] == "one two three"
            again = (await web.post(f"/v1/responses/{made['id']}/cancel")).json()
            assert again["status"] == "completed"

    client.run(run())


def test_a_background_stream_is_followed_from_any_event(client: Client) -> None:
    async def run() -> None:
        async with browser(client.app) as web:
            body = {"input": "hi", "background": True, "stream": True}
            events = named_events(await web.post("/v1/responses", json=body))
            path = f"/v1/responses/{events[0]['response']['id']}"
            rest = named_events(await web.get(path, params={"stream": True, "starting_after": 3}))
            assert rest == events[4:]
            plain = (await web.post("/v1/responses", json={"input": "hi"})).json()["id"]
            assert (await web.get(f"/v1/responses/{plain}", params={"stream": True})).status_code == 400

    client.run(run())


def test_events_that_come_while_others_are_sent_are_not_lost() -> None:
    async def run() -> None:
        background = BackgroundRun(None, events=[b"0", b"1"])  # type: ignore[arg-type]
        follower = ResponsesService.follow(None, background)  # type: ignore[arg-type]
        assert await anext(follower) == b"01"
        background.events += [b"2", b"3"]
        assert await anext(follower) == b"23"
        background.end()
        assert [part async for part in follower] == []

    asyncio.run(asyncio.wait_for(run(), 10))


def test_a_cancelled_response_ends_its_request(client: Client, core: FakeEngineCore, gate: threading.Semaphore) -> None:
    async def run() -> None:
        async with browser(client.app) as web:
            made = (await web.post("/v1/responses", json={"input": "hi", "background": True})).json()
            cancelled = (await web.post(f"/v1/responses/{made['id']}/cancel")).json()
            assert cancelled["status"] == "cancelled"
            assert (await web.get(f"/v1/responses/{made['id']}")).json()["status"] == "cancelled"
            gate.release()
            await until(lambda: asyncio.sleep(0, not core.running))

    client.run(run())


def test_closing_the_service_ends_what_runs(client: Client, core: FakeEngineCore, gate: threading.Semaphore) -> None:
    async def run() -> None:
        async with browser(client.app) as web:
            await web.post("/v1/responses", json={"input": "hi", "background": True})
            await client.app.state.responses.close()
            gate.release()
            await until(lambda: asyncio.sleep(0, not core.running))

    client.run(run())


def test_several_http_processes_keep_no_responses(engine: AsyncLLM) -> None:
    with Client(create_app(engine, options(api_server_count=2))) as client:
        assert respond(client).json()["store"] is False
        for name, value in (("store", True), ("background", True), ("previous_response_id", "resp_1")):
            refused = respond(client, **{name: value})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


def test_custom_tools_take_plain_text(tmp_path_factory: pytest.TempPathFactory) -> None:
    said = '<tool_call>{"name": "patch", "arguments": {"input": "+ \\"a\\"\\n"}}</tool_call>'
    template = "{{ tools }}{{ messages }}"
    core = fake_core(write_tokenizer(tmp_path_factory.mktemp("m"), chat_template=template), said, max_model_len=4000)
    tools = [{"type": "custom", "name": "patch", "description": "Edits files.", "format": {"type": "text"}}]
    with AsyncLLM(core=core) as engine, Client(create_app(engine, options())) as client:
        response = respond(client, tools=tools, tool_choice="auto").json()
        [call] = response["output"]
        assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "patch", '+ "a"\n')
        assert response["tools"] == tools
        kinds = [event["type"] for event in named_events(respond(client, tools=tools, stream=True))]
        assert "response.custom_tool_call_input.delta" in kinds and "response.custom_tool_call_input.done" in kinds
        result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "done"}
        for body in (
            {"input": [{"role": "user", "content": "hi"}, call, result]},
            {"input": [result], "previous_response_id": response["id"]},
        ):
            assert respond(client, **body, tools=tools).status_code == 200
            prompt = load_tokenizer(Path(core.config.model.model)).decode(core.requests[-1].prompt_token_ids)
            assert "'role': 'tool'" in prompt and "'content': 'done'" in prompt and "Edits files." in prompt
            assert "'name': 'patch', 'arguments'" in prompt
        named = {"type": "custom", "name": "patch"}
        assert respond(client, tools=tools, tool_choice=named).status_code == 200
        tools[0]["format"] = {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}
        error = respond(client, tools=tools).json()["error"]
        assert error["param"] == "tools" and "tools[0].format is of type 'grammar'" in error["message"]
