"""use_beam_search on /v1/completions and /v1/chat/completions."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxllm.async_llm import AsyncLLM
from jaxllm.llm import LLM
from jaxllm.outputs import EngineCoreOutput
from jaxllm.sampling_params import BeamSearchParams
from jaxllm.text.detokenizer import text_of
from server.app import create_app
from server.beam_search import HONOURED
from server.protocol.chat import ChatCompletionRequest
from server.protocol.completions import CompletionRequest
from tests.helpers.fake_engine_core import FakeEngineCore
from tests.helpers.scripted_core import guessing_core
from tests.helpers.tiny_tokenizers import write_tokenizer
from tests.server.canned import WEATHER
from tests.server.client import Client
from tests.server.conftest import options

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MODELS = {COMPLETIONS: CompletionRequest, CHAT: ChatCompletionRequest}
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "one two", "use_beam_search": True, "n": 3, "max_tokens": 6},
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "use_beam_search": True, "n": 3, "max_tokens": 6},
}
REFUSED: dict[str, Any] = {
    "stream": True,
    "kv_transfer_params": {"do_remote_decode": True},
    "stream_options": {"include_usage": True},
    "stream_interval": 2,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.1,
    "top_n_sigma": 1.0,
    "thinking_token_budget": 5,
    "num_speculative_tokens": 3,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
    "seed": 5,
    "stop": "x",
    "stop_token_ids": [5],
    "min_tokens": 2,
    "logit_bias": {"5": 1},
    "bad_words": ["x"],
    "prompt_logprobs": 1,
    "logprob_token_ids": [5],
    "repetition_detection": {"max_pattern_size": 2, "min_count": 2},
    "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a"},
    "extra_args": {"a": [1.0]},
    "vllm_xargs": {"a": [1.0]},
    "spaces_between_special_tokens": False,
}
ASKS_NOTHING = {
    "stream": False,
    "temperature": 0,
    "top_p": 1,
    "top_k": -1,
    "min_p": 0,
    "top_n_sigma": -1,
    "thinking_token_budget": -1,
    "num_speculative_tokens": 0,
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1,
    "seed": None,
    "stop": [],
    "stop_token_ids": [],
    "min_tokens": 0,
    "logit_bias": {},
    "bad_words": [],
    "response_format": {"type": "text"},
    "best_of": 3,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose defaults sample with a temperature, unless a request sets another value."""
    return write_tokenizer(tmp_path_factory.mktemp("beams"), generation_config={"temperature": 0.5, "top_p": 0.9})


@pytest.fixture(scope="module")
def core(directory: Path) -> FakeEngineCore:
    return guessing_core(directory, max_model_len=200, scheduling_policy="priority")


@pytest.fixture(scope="module")
def script(directory: Path) -> LLM:
    """The model for scripts."""
    core = guessing_core(directory, max_model_len=200)
    return LLM.from_config(core.config, core=core)


def ask(client: Client, path: str, **fields: Any) -> dict[str, Any]:
    """The reply to a search."""
    reply = client.post(path, {**BODIES[path], **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()


def refusal(client: Client, path: str, **fields: Any) -> dict[str, Any]:
    """The error that answers a search."""
    reply = client.post(path, {**BODIES[path], **fields})
    assert reply.status_code == 400, reply.text
    return reply.json()["error"]


@pytest.mark.parametrize(
    "fields", [{}, {"length_penalty": 0.0}, {"length_penalty": 3}, {"ignore_eos": True}, {"n": 1}], ids=str
)
def test_answers_are_those_of_a_script(client: Client, script: LLM, fields: dict[str, Any]) -> None:
    options = {name: value for name, value in fields.items() if name != "n"}
    params = BeamSearchParams(fields.get("n", 3), 6, **options)
    expected = script.beam_search(["one two", "three"], params)
    choices = ask(client, COMPLETIONS, prompt=["one two", "three"], echo=True, **fields)["choices"]
    plain = ask(client, COMPLETIONS, prompt=["one two", "three"], logprobs=0, **fields)["choices"]
    sequences = [sequence for output in expected for sequence in output.sequences]
    assert [choice["index"] for choice in choices] == list(range(len(sequences)))
    assert [choice["text"] for choice in choices] == [sequence.text for sequence in sequences]
    assert [choice["finish_reason"] for choice in choices] == [sequence.finish_reason for sequence in sequences]
    for choice, without_prompt, sequence in zip(choices, plain, sequences, strict=True):
        assert choice["text"].endswith(without_prompt["text"])
        assert sum(without_prompt["logprobs"]["token_logprobs"]) == pytest.approx(sequence.cum_logprob)


def test_a_chat_is_answered_by_the_same_search(client: Client, script: LLM) -> None:
    reply = ask(client, CHAT, return_token_ids=True, logprobs=True, top_logprobs=2)
    prompt = reply["prompt_token_ids"]
    [expected] = script.beam_search([prompt], BeamSearchParams(3, 6))
    assert reply["usage"]["prompt_tokens"] == len(prompt)
    assert reply["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in reply["choices"])
    for choice, sequence in zip(reply["choices"], expected.sequences, strict=True):
        answer = sequence.tokens[len(prompt) :]
        assert choice["token_ids"][: len(answer)] == answer
        assert choice["message"]["content"] == text_of(script.get_tokenizer(), answer, skip_special_tokens=True)
        content = choice["logprobs"]["content"]
        assert [len(entry["top_logprobs"]) for entry in content] == [2] * len(choice["token_ids"])
        assert sum(entry["logprob"] for entry in content) == pytest.approx(sequence.cum_logprob)


def test_a_chat_without_max_tokens_is_searched_to_the_end_of_the_context(client: Client) -> None:
    reply = ask(client, CHAT, max_tokens=None, n=1, ignore_eos=True)
    assert reply["usage"]["total_tokens"] == 200 and reply["choices"][0]["finish_reason"] == "length"


def test_usage_counts_a_prompt_once_and_all_answers(client: Client) -> None:
    reply = ask(client, COMPLETIONS, return_token_ids=True)
    num_tokens = [len(choice["token_ids"]) for choice in reply["choices"]]
    assert reply["usage"]["prompt_tokens"] == len(reply["choices"][0]["prompt_token_ids"])
    assert reply["usage"]["completion_tokens"] == sum(num_tokens) and len(num_tokens) == 3


def test_an_eos_has_text_only_if_it_is_asked_for(client: Client) -> None:
    def ended(**fields: Any) -> list[str]:
        choices = ask(client, COMPLETIONS, n=5, **fields)["choices"]
        return [choice["text"] for choice in choices if choice["finish_reason"] == "stop"]

    texts = ended()
    assert texts and ended(include_stop_str_in_output=True) == texts
    assert ended(skip_special_tokens=False) == texts
    assert ended(include_stop_str_in_output=True, skip_special_tokens=False) == [text + "</s>" for text in texts]


def test_what_concerns_the_prompt_reaches_every_step(client: Client, core: FakeEngineCore) -> None:
    core.requests.clear()
    fields = {"priority": 4, "cache_salt": "salt", "session_id": "s", "request_id": "mine", "truncate_prompt_tokens": 2}
    reply = ask(client, COMPLETIONS, max_tokens=2, include_timings=True, **fields)
    assert reply["id"] == "cmpl-mine" and reply["timings"]["total_ms"] >= 0
    assert [len(request.prompt_token_ids) for request in core.requests] == [2, 3, 3, 3]
    assert {(each.options.priority, each.options.cache_salt, each.options.session_id) for each in core.requests} == {
        (4, "salt", "s")
    }


def test_reasoning_and_tool_calls_are_read_in_the_answers(directory: Path) -> None:
    said = '<think>Hm.</think>Yes.<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>'
    core = guessing_core(directory, said, max_model_len=1000)
    tools = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
    with (
        AsyncLLM(core=core) as engine,
        Client(create_app(engine, options(tool_call_parser="hermes", reasoning_parser="deepseek_r1"))) as client,
    ):
        choice = ask(client, CHAT, max_tokens=200, n=2, tools=tools)["choices"][0]
    assert choice["message"]["reasoning"] == "Hm." and choice["message"]["content"] == "Yes."
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Ulm"}'}
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_every_field_is_honoured_or_refused(client: Client, core: FakeEngineCore, path: str) -> None:
    core.requests.clear()
    fields = set(MODELS[path].model_fields)
    assert fields - HONOURED == set(REFUSED)
    for name, value in REFUSED.items():
        error = refusal(client, path, **{"logprobs": True} if path == CHAT else {}, **{name: value})
        assert error["param"] == name and "cannot be combined with use_beam_search: " in error["message"]
    assert not core.requests


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_what_asks_for_nothing_is_taken(client: Client, path: str) -> None:
    assert ask(client, path, **ASKS_NOTHING)["choices"] == ask(client, path)["choices"]


@pytest.mark.parametrize(
    ("path", "fields", "param", "text"),
    [
        (COMPLETIONS, {"n": 11}, "n", "n is 11, which takes 22 logprobs, but this engine reports at most 20"),
        (CHAT, {"n": 0}, "n", "n is 0, must be at least 1"),
        (COMPLETIONS, {"n": 129}, "n", "--max-n"),
        (COMPLETIONS, {"prompt": ["a"] * 1000, "n": 5}, "n", "--max-sequences-per-request"),
        (COMPLETIONS, {"best_of": 5}, "best_of", "best_of"),
        (COMPLETIONS, {"echo": True, "logprobs": 1}, "echo", "leave echo or logprobs out"),
        (COMPLETIONS, {"logprobs": 21}, "logprobs", "logprobs is 21"),
        (COMPLETIONS, {"logprobs": 1, "allowed_token_ids": [5]}, "logprobs", "logprobs is 1, must be 0"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs is 21"),
        (CHAT, {"logprobs": True, "top_logprobs": 1, "allowed_token_ids": [5]}, "top_logprobs", "top_logprobs is 1, must be 0"),
        (CHAT, {"allowed_token_ids": list(range(200))}, "allowed_token_ids", "at most 128"),
        (COMPLETIONS, {"length_penalty": 1e300}, "length_penalty", "length_penalty is 1e+300"),
        (COMPLETIONS, {"length_penalty": 2, "use_beam_search": False}, "length_penalty", "set use_beam_search"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}, "tool_choice", "grammar"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, "tools", "strict"),
    ],
)  # fmt: skip
def test_what_cannot_be_searched_is_refused_by_name(
    client: Client, core: FakeEngineCore, path: str, fields: dict[str, Any], param: str, text: str
) -> None:
    core.requests.clear()
    error = refusal(client, path, **fields)
    assert error["param"] == param and text in error["message"]
    assert not core.requests


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/responses", {"input": "hi"}), ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5})],
)
def test_other_apis_say_where_to_search(client: Client, path: str, body: dict[str, Any]) -> None:
    reply = client.post(path, {**body, "use_beam_search": True})
    assert reply.status_code == 400 and "/v1/chat/completions" in reply.json()["error"]["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_time_limit_aborts_all_beams(
    client: Client, engine: AsyncLLM, core: FakeEngineCore, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    core.requests.clear()
    advance = core._advance

    def only_the_first(running: Any) -> EngineCoreOutput:
        return advance(running) if len(core.requests) == 1 else EngineCoreOutput(running.request.request_id, [])

    async def nothing_runs() -> None:
        while core.running:
            await asyncio.sleep(0.001)
        await engine.check_integrity()

    monkeypatch.setattr(core, "_advance", only_the_first)
    reply = client.post(path, {**BODIES[path], "timeout": 0.2})
    assert reply.status_code == 408 and reply.json()["error"]["code"] == "timeout"
    client.run(nothing_runs())


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left(engine: AsyncLLM, core: FakeEngineCore) -> Iterator[None]:
    yield
    asyncio.run(engine.check_integrity())
    assert not core.running
