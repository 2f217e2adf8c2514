from tests.server.client import Client, events


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
    assert choice["logprobs"]["token_logprobs"][0] is None


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
