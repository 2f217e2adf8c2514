import pytest

from jaxllm.http_client.chunks import read_chunk


def test_a_completion_chunk_has_text_and_unknown_fields_are_skipped() -> None:
    chunk = read_chunk(b'{"id": "x", "choices": [{"index": 1, "text": "hi", "logprobs": {"a": 1}, "new": [1]}], "usage": null}')
    assert chunk.choices is not None and (chunk.choices[0].visible, chunk.choices[0].index) == ("hi", 1)
    assert not chunk.choices[0].only_opens and chunk.usage is None


@pytest.mark.parametrize(
    ("delta", "only_opens"),
    [
        ('{"role": "assistant", "content": ""}', True),
        ("{}", True),
        ('{"content": "x"}', False),
        ('{"reasoning": "x"}', False),
        ('{"reasoning_content": "x"}', False),
        ('{"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}', False),
    ],
)
def test_the_chunk_that_opens_a_chat_answer_has_no_token(delta: str, only_opens: bool) -> None:
    chunk = read_chunk(f'{{"choices": [{{"index": 0, "delta": {delta}}}]}}'.encode())
    assert chunk.choices is not None and chunk.choices[0].only_opens is only_opens


def test_usage_is_read() -> None:
    usage = read_chunk(b'{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}}').usage
    assert usage is not None and (usage.prompt_tokens, usage.completion_tokens) == (3, 4)


@pytest.mark.parametrize("event", [b"", b"{", b"[]", b'{"choices": 3}', b'"\xff"', b'{"choices": [{"text": 5}]}'])
def test_what_is_no_chunk_is_refused_with_what_it_was(event: bytes) -> None:
    with pytest.raises(ValueError, match=" in b"):
        read_chunk(event)
