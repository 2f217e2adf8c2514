import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxllm.async_llm import AsyncLLM
from jaxllm.outputs import RequestMetrics, RequestOutput
from jaxllm.text.tokenizer import load_tokenizer
from server.app import create_app
from server.usage import Usage, per_request_metrics
from tests.helpers.fake_engine_core import FakeEngineCore
from tests.helpers.scripted_core import fake_core
from tests.helpers.tiny_tokenizers import write_tokenizer
from tests.server.client import Client, events
from tests.server.conftest import options

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]


def text_of(chunks: list[Any], index: int = 0, key: str = "content") -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get(key) or "" for choice in choices)


def test_a_conversation_is_answered(client: Client) -> None:
    reply = client.chat().json()
    assert reply["object"] == "chat.completion" and reply["id"].startswith("chatcmpl-")
    message = {"role": "assistant", "content": "one two three", "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    assert reply["choices"] == [choice]
    assert reply["usage"]["completion_tokens"] == 4


def test_chunks_come_in_the_order_that_clients_rely_on(client: Client) -> None:
    chunks = events(client.chat(n=2, temperature=1, stream=True, stream_options={"include_usage": True}))
    for index in (0, 1):
        own = [chunk["choices"][0] for chunk in chunks[:-1] if chunk["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert own[-1]["delta"] == {} and own[-1]["finish_reason"] == "stop"
        assert all(choice["finish_reason"] is None for choice in own[:-1])
        assert text_of(chunks, index) == "one two three"
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 8
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1


def test_running_usage_only_grows(client: Client) -> None:
    chunks = events(client.chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == 4


def test_logprobs_come_per_token_with_their_bytes(client: Client) -> None:
    content = client.chat(logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content[:3]] == ["one", " two", " three"]
    assert all(bytes(entry["bytes"]).decode() == entry["token"] and len(entry["top_logprobs"]) == 2 for entry in content[:3])


def test_ids_and_timings_are_told_if_asked(client: Client) -> None:
    reply = client.chat(return_token_ids=True, include_timings=True).json()
    assert len(reply["choices"][0]["token_ids"]) == 4 and reply["prompt_token_ids"]
    assert reply["timings"]["total_ms"] >= reply["timings"]["time_to_first_token_ms"] >= 0
    assert "timings" not in client.chat().json()
    chunks = events(client.chat(return_token_ids=True, stream=True))
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [reply["prompt_token_ids"], *[None] * (len(chunks) - 1)]
    assert [id for chunk in chunks for id in chunk["choices"][0].get("token_ids", ())] == reply["choices"][0]["token_ids"]


def test_replies_have_the_metrics_and_cache_counts_of_vllm(served_directory: Path) -> None:
    core = fake_core(served_directory, max_model_len=200, enable_prefix_caching=True, block_size=8)
    given = options(enable_per_request_metrics=True, enable_prompt_tokens_details=True)
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    with AsyncLLM(core=core) as engine, Client(create_app(engine, given)) as client:
        replies = [client.chat().json(), client.complete(prompt=[5] * 9).json(), events(client.chat(**usage))[-1]]
        for reply in replies:
            metrics, created = reply["metrics"], reply["usage"]["prompt_tokens"] // 8 * 8
            assert metrics["generation_time_ms"] >= 0 and metrics["mean_itl_ms"] == metrics["generation_time_ms"] / 3
            assert metrics["speculative_decoding"] is None and "timings" in reply
            assert reply["usage"]["prompt_tokens_details"] == {"cached_tokens": 0, "created_cache_tokens": created}
        assert client.chat(n=2).json()["metrics"] is None, "they are of one answer"
        details = client.post("/v1/responses", {"input": "hi"}).json()["usage"]["input_tokens_details"]
        assert details["cache_write_tokens"] > 0


def test_usage_tells_where_cached_tokens_were_kept_if_some_were_loaded() -> None:
    def output(num_cached: int, loaded: dict[str, int] | None) -> RequestOutput:
        metrics = RequestMetrics(0.0, num_cached_tokens=num_cached, loaded_tokens=loaded)
        return RequestOutput("r", None, [1] * 64, [], True, num_cached_tokens=num_cached, metrics=metrics)

    usage = Usage(64)
    usage.set_cached(output(48, {"host": 32}))
    details = usage.as_dict()["prompt_tokens_details"]
    assert (details["cached_tokens"], details["cached_tokens_by_source"]) == (48, {"device": 16, "host": 32})
    usage.add_cached(output(32, {"host": 16, "disk": 16}))
    details = usage.as_dict()["prompt_tokens_details"]
    assert (details["cached_tokens"], details["cached_tokens_by_source"]) == (80, {"device": 16, "host": 48, "disk": 16})
    usage.set_cached(output(48, None))
    assert "cached_tokens_by_source" not in usage.as_dict()["prompt_tokens_details"]


def test_metrics_leave_the_queue_out_of_the_first_token_and_tell_of_drafts() -> None:
    metrics = RequestMetrics(0.0, 2.0, 3.0, queue_seconds=0.5, prefill_seconds=1.0)
    metrics.accepted_counts, metrics.num_draft_tokens = (1, 0, 3), 8
    found = per_request_metrics(metrics, 11)
    assert found is not None and (found["time_to_first_token_ms"], found["queue_time_ms"]) == (1000, 500)
    assert (found["mean_itl_ms"], found["tokens_per_second"]) == (100, 5.5)
    drafts = found["speculative_decoding"]
    assert (drafts["mean_acceptance_length"], drafts["draft_acceptance_rate"]) == (2.5, 0.75)
    assert (drafts["num_spec_steps"], drafts["num_spec_tokens"], drafts["acceptance_histogram"]) == (4, 2, (1, 0, 3))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "x"}}]}]},
            "messages[0].content[0]",
        ),
        ({"guided_json": {}}, "guided_json"),
        ({"functions": [{}]}, "functions"),
        ({"chat_template": "x"}, "chat_template"),
        ({"response_format": {"type": "json_object", "schema": {"type": "object"}}}, "response_format"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"tools": []}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"timeout": 0}, "timeout"),
        ({"verbosity": "endless"}, "verbosity"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(client: Client, fields: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        reply = client.chat(**{"stream": stream, **fields})
        assert reply.status_code == 400 and reply.json()["error"]["param"] == param, reply.text


@pytest.mark.parametrize("choice", ["any", {}, 3, {"type": "allowed_tools"}, {"type": "function", "name": "weather"}], ids=str)
def test_a_field_of_several_forms_says_which_there_are(client: Client, choice: Any) -> None:
    error = client.chat(tools=TOOLS, tool_choice=choice).json()["error"]
    assert error["message"].startswith("tool_choice: must be none, auto, required, {") and error["param"] == "tool_choice"
    assert error["message"].count("tool_choice") == 1
    for prompt in (None, {}, [1, "a"], 3):
        message = client.complete(prompt=prompt).json()["error"]["message"]
        assert message.startswith("prompt: must be a text, a list of token ids, or")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object is False"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json is not valid JSON"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "x"}}}},
            "response_format at #/type",
        ),
    ],
)
def test_errors_of_constraints_name_the_field_that_was_sent(client: Client, fields: dict[str, Any], message: str) -> None:
    assert client.chat(**fields).json()["error"]["message"].startswith(message)


def test_an_id_that_is_no_token_is_shown_as_far_as_it_fits(client: Client) -> None:
    message = client.post("/detokenize", {"tokens": [2**70]}).json()["error"]["message"]
    assert "the id 1180591620717411303…" in message


def test_it_waits_in_the_queue_no_longer_than_the_server_allows(engine: AsyncLLM, core: FakeEngineCore) -> None:
    with Client(create_app(engine, options(queue_timeout=30))) as client:
        for ask in (client.chat, client.complete):
            assert ask().status_code == 200
            assert core.requests[-1].options.queue_timeout_seconds == 30


def test_unknown_fields_are_ignored(client: Client) -> None:
    assert client.chat(foo=1, user="me", metadata={"a": "b"}, store=True, service_tier="auto").status_code == 200


def test_a_prompt_that_leaves_no_room_is_refused_before_the_stream(client: Client) -> None:
    for stream in (False, True):
        reply = client.chat("word " * 300, stream=stream)
        assert reply.status_code == 400 and reply.json()["error"]["code"] == "context_length_exceeded"


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory, served_directory: Path) -> Iterator[tuple[Client, FakeEngineCore]]:
    """A model that answers with reasoning, text and a tool call."""
    tokenizer = load_tokenizer(served_directory)
    ids = tokenizer.encode(f"<think>\nhm hm\n</think>\n\nSo: {CALL}", add_special_tokens=False)
    core = fake_core(served_directory, lambda request: [*ids, request.eos_token_ids[0]], max_model_len=300)
    with AsyncLLM(core=core) as engine:
        app = create_app(engine, options(tool_call_parser="hermes", reasoning_parser="think"))
        with Client(app) as client:
            yield client, core


def test_tool_calls_and_reasoning_are_apart_from_content(thinking: tuple[Client, FakeEngineCore]) -> None:
    choice = thinking[0].chat(tools=TOOLS, max_tokens=200).json()["choices"][0]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["reasoning"].strip() == message["reasoning_content"].strip() == "hm hm"
    assert message["content"].strip() == "So:"
    (call,) = message["tool_calls"]
    assert call["type"] == "function" and call["id"].startswith("call_")
    assert call["function"]["name"] == "weather" and json.loads(call["function"]["arguments"]) == {"city": "Köln"}


def test_a_stream_has_the_same_tool_calls(thinking: tuple[Client, FakeEngineCore]) -> None:
    chunks = events(thinking[0].chat(tools=TOOLS, max_tokens=200, stream=True))
    pieces = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert pieces[0]["function"]["name"] == "weather" and pieces[0]["id"] and pieces[0]["type"] == "function"
    assert all("id" not in piece for piece in pieces[1:]) and {piece["index"] for piece in pieces} == {0}
    assert json.loads("".join(piece["function"]["arguments"] for piece in pieces)) == {"city": "Köln"}
    assert text_of(chunks, key="reasoning").strip() == "hm hm" and text_of(chunks).strip() == "So:"
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_without_tools_their_text_is_content(thinking: tuple[Client, FakeEngineCore]) -> None:
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        message = thinking[0].chat(max_tokens=200, **fields).json()["choices"][0]["message"]
        assert CALL in message["content"] and "tool_calls" not in message


def test_reasoning_that_is_not_wanted_leaks_nowhere(thinking: tuple[Client, FakeEngineCore]) -> None:
    fields = {"include_reasoning": False, "logprobs": True, "return_token_ids": True, "max_tokens": 200}
    client, core = thinking
    whole = client.chat(**fields)
    stream = client.chat(**fields, stream=True)
    assert whole.json()["choices"][0]["message"]["content"].strip().startswith("So:")
    assert text_of(events(stream)).strip().startswith("So:")
    said = len(list(core._script(core.requests[-1])))
    for reply in (whole, stream):
        assert "hm" not in reply.text and reply.text.count('"top_logprobs"') < said


def test_reasoning_tokens_are_counted(thinking: tuple[Client, FakeEngineCore]) -> None:
    usage = thinking[0].chat(max_tokens=200).json()["usage"]
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"]


def test_an_answer_that_ends_within_its_reasoning_is_reasoning_to_the_last_token(tmp_path: Path) -> None:
    core = fake_core(write_tokenizer(tmp_path), "one two three \n", max_model_len=200)
    with AsyncLLM(core=core) as engine, Client(create_app(engine, options(reasoning_parser="deepseek_r1"))) as client:
        usage = client.chat().json()["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == usage["completion_tokens"]


def test_a_templates_variables_may_hold_lists_and_objects(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for name in shown.names %}{{ name }},{% endfor %}"
    core = fake_core(write_tokenizer(tmp_path, chat_template=template), max_model_len=100)
    with AsyncLLM(core=core) as engine, Client(create_app(engine, options())) as client:
        kwargs = {"shown": {"names": ["one", "two"]}}
        reply = client.chat(chat_template_kwargs=kwargs, return_token_ids=True).json()
        assert client.post("/detokenize", {"tokens": reply["prompt_token_ids"]}).json()["prompt"].endswith("one,two,")
        assert client.chat(chat_template_kwargs={"shown": {"names": [10**30]}}).status_code == 400
