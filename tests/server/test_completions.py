import time
from pathlib import Path

import pytest

from jaxllm.async_llm import AsyncLLM
from server.app import create_app
from tests.helpers.scripted_core import fake_core
from tests.server.client import Client, events
from tests.server.conftest import options


def test_a_prompt_is_continued(client: Client) -> None:
    reply = client.complete().json()
    assert reply["object"] == "text_completion" and reply["model"] == "m" and reply["id"].startswith("cmpl-")
    assert [choice["text"] for choice in reply["choices"]] == ["one two three"]
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}


def test_several_prompts_with_several_answers_are_numbered_by_prompt(client: Client) -> None:
    reply = client.complete(prompt=["a", "b"], n=2, temperature=1).json()
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    chunks = events(client.complete(prompt=["a", "b"], n=2, temperature=1, stream=True))
    ends = [chunk["choices"][0]["index"] for chunk in chunks if chunk["choices"][0]["finish_reason"]]
    assert sorted(ends) == [0, 1, 2, 3]


def test_a_stream_says_what_a_whole_reply_says(client: Client) -> None:
    chunks = events(client.complete(stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == "one two three"
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 4
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1


def test_echo_without_output_gives_the_prompt_with_its_logprobs(client: Client) -> None:
    choice = client.complete(echo=True, max_tokens=0, logprobs=1).json()["choices"][0]
    assert choice["text"] == "hi" and choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == ["<s>", "h", "i"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1]
    assert choice["logprobs"]["token_logprobs"][0] is None


@pytest.mark.parametrize("fields", [{"max_tokens": 0}, {"max_tokens": 2}])
def test_echo_of_a_prompt_of_one_token_has_its_logprobs_too(client: Client, fields: dict[str, int]) -> None:
    choice = client.complete(prompt=[104], echo=True, logprobs=1, prompt_logprobs=1, **fields).json()["choices"][0]
    assert len(choice["logprobs"]["tokens"]) == 1 + fields["max_tokens"]
    assert choice["logprobs"]["token_logprobs"][0] is None and choice["logprobs"]["top_logprobs"][0] is None
    assert choice["prompt_logprobs"] == [None]


def test_a_stream_has_the_logprobs_of_a_whole_reply(client: Client) -> None:
    fields = {"echo": True, "logprobs": 1, "stop": "three"}
    whole = client.complete(**fields).json()["choices"][0]
    pieces = [chunk["choices"][0] for chunk in events(client.complete(**fields, stream=True))]
    assert "".join(piece["text"] for piece in pieces) == whole["text"] == "hione two "
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [value for piece in pieces if piece["logprobs"] for value in piece["logprobs"][name]] == whole["logprobs"][name]


def test_each_streamed_answer_repeats_the_logprobs_of_its_prompt(client: Client) -> None:
    fields = {"prompt": ["hi", "ho"], "echo": True, "logprobs": 1, "n": 2, "temperature": 1}
    chunks = events(client.complete(**fields, stream=True))
    for choice in client.complete(**fields).json()["choices"]:
        pieces = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        for name in ("tokens", "text_offset"):
            streamed = [value for piece in pieces if piece["logprobs"] for value in piece["logprobs"][name]]
            assert streamed == choice["logprobs"][name]


def test_token_ids_are_as_good_as_text(client: Client) -> None:
    ids = client.post("/tokenize", {"prompt": "hi"}).json()["tokens"]
    by_ids = client.complete(prompt=ids, echo=True, return_token_ids=True).json()["choices"][0]
    assert by_ids["prompt_token_ids"] == ids and by_ids["text"].endswith("one two three")
    assert len(client.complete(prompt=[ids, ids]).json()["choices"]) == 2
    assert client.post("/detokenize", {"tokens": ids}).json()["prompt"].endswith("hi")


def test_logprobs_can_name_tokens_by_id(client: Client) -> None:
    logprobs = client.complete(logprobs=1, return_tokens_as_token_ids=True).json()["choices"][0]["logprobs"]
    assert all(token.startswith("token_id:") for token in logprobs["tokens"])


def test_a_prompt_can_be_cut(client: Client) -> None:
    reply = client.complete(prompt="one two three four five", truncate_prompt_tokens=2).json()
    assert reply["usage"]["prompt_tokens"] == 2
    assert client.complete(truncate_prompt_tokens=0).json()["error"]["param"] == "truncate_prompt_tokens"


def test_a_huge_prompt_is_refused_without_tokenizing_it_all(client: Client) -> None:
    began = time.monotonic()
    reply = client.complete(prompt="a" * 20_000_000)
    assert reply.status_code == 400 and reply.json()["error"]["code"] == "context_length_exceeded"
    assert time.monotonic() - began < 20


def test_errors_have_openais_shape(client: Client) -> None:
    reply = client.complete(n="x")
    assert reply.status_code == 400
    assert reply.json() == {
        "error": {
            "message": "n: input should be a valid integer, got 'x'",
            "type": "invalid_request_error",
            "param": "n",
            "code": None,
        }
    }


def test_without_a_tokenizer_what_needs_one_is_refused_by_name(served_directory: Path) -> None:
    with (
        AsyncLLM(core=fake_core(served_directory, skip_tokenizer_init=True)) as engine,
        Client(create_app(engine, options())) as client,
    ):
        for path, body, param in (
            ("/v1/completions", {"prompt": "one"}, "prompt"),
            ("/v1/completions", {"prompt": [1, 2], "echo": True}, "echo"),
            ("/v1/completions", {"prompt": [1, 2], "structured_outputs": {"regex": "a"}}, "structured_outputs"),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "one"}]}, "messages"),
            ("/v1/embeddings", {"input": "one"}, "input"),
            ("/score", {"text_1": "one", "text_2": "two"}, "text_1"),
            ("/tokenize", {"prompt": "one"}, "prompt"),
        ):
            reply = client.post(path, json=body)
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text
            assert "tokenizer" in reply.json()["error"]["message"]
        reply = client.post("/v1/completions", json={"prompt": [1, 2], "max_tokens": 3, "return_token_ids": True})
        assert reply.status_code == 200 and len(reply.json()["choices"][0]["token_ids"]) == 3
