import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from jaxllm.errors import ConfigError
from jaxllm.http_client.chunks import Chunk
from jaxllm.http_client.client import ServerClient, ServerError
from tests.helpers.stub_server import Stub

PATH = "/v1/completions"
BODY = msgspec.json.encode({"prompt": "x", "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}})


def with_client(stub: Stub, use: Callable[[ServerClient], Coroutine[Any, Any, Any]], **options: Any) -> Any:
    async def run() -> Any:
        async with ServerClient(stub.url, **options) as client:
            return await asyncio.wait_for(use(client), 120)

    return asyncio.run(run())


async def chunks_of(client: ServerClient) -> list[Chunk]:
    return [chunk async for chunks in client.stream(PATH, BODY) for chunk in chunks]


@pytest.mark.parametrize("piece_bytes", [None, 1, 7])
def test_a_stream_is_read_however_it_is_cut(stub: Stub, piece_bytes: int | None) -> None:
    stub.piece_bytes, stub.line_end = piece_bytes, "\r\n"
    chunks = with_client(stub, chunks_of)
    assert [chunk.choices[0].text for chunk in chunks[:-1]] == ["word "] * 4
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 4


def test_the_key_and_further_headers_are_sent(stub: Stub) -> None:
    with_client(stub, chunks_of, api_key="secret", headers={"X-Extra": "1"})
    assert (stub.headers[0]["authorization"], stub.headers[0]["x-extra"]) == ("Bearer secret", "1")


@pytest.mark.parametrize("base", ["{}", "{}/", "{}/v1", "{}/v1/"])
def test_a_url_may_end_as_clients_are_used_to(stub: Stub, base: str) -> None:
    async def models() -> list[str]:
        async with ServerClient(base.format(stub.url)) as client:
            return await client.models()

    assert asyncio.run(models()) == ["stub"]


@pytest.mark.parametrize(
    ("status", "content", "message", "is_final"),
    [
        (400, {"error": {"message": "no such field", "type": "x"}}, "HTTP 400: no such field", True),
        (401, {"error": "Unauthorized"}, "HTTP 401: Unauthorized", True),
        (422, {"detail": "wrong"}, "HTTP 422: wrong", True),
        (429, {"error": {"message": "slower"}}, "HTTP 429: slower", False),
        (503, {"message": "loading"}, "HTTP 503: loading", False),
        (500, [1], "HTTP 500: [1]", False),
    ],
)
def test_a_refusal_is_told_in_the_server_s_words(stub: Stub, status: int, content: Any, message: str, is_final: bool) -> None:
    stub.fail = lambda body: (status, content)
    with pytest.raises(ServerError) as found:
        with_client(stub, chunks_of)
    assert (str(found.value), found.value.status, found.value.is_final) == (message, status, is_final)


def test_an_error_within_the_stream_is_raised(stub: Stub) -> None:
    stub.break_after = lambda body: (2, "error")
    with pytest.raises(ServerError, match="error in the stream: the engine died") as found:
        with_client(stub, chunks_of)
    assert found.value.status == 500


def test_a_connection_that_breaks_is_an_error(stub: Stub) -> None:
    stub.break_after = lambda body: (2, "close")
    with pytest.raises(ServerError, match=stub.url):
        with_client(stub, chunks_of)


def test_a_server_that_is_not_there_is_an_error_without_noise() -> None:
    with pytest.raises(ServerError) as found:
        asyncio.run(_first_model("http://127.0.0.1:1"))
    assert str(found.value) == "http://127.0.0.1:1: cannot connect: Connect call failed ('127.0.0.1', 1)"


async def _first_model(url: str) -> str:
    async with ServerClient(url) as client:
        return (await client.models())[0]


def test_closing_the_stream_early_closes_the_connection(stub: Stub) -> None:
    gates: list[asyncio.Event] = []

    def gate(body: Any) -> asyncio.Event:
        gates.append(asyncio.Event())
        return gates[-1]

    stub.gate = gate

    async def leave(client: ServerClient) -> None:
        async with contextlib.aclosing(client.stream(PATH, BODY)) as pieces:
            async for _ in pieces:
                break

    with_client(stub, leave)
    assert stub.cut_off.wait(10)


def test_an_answer_that_is_not_streamed_is_refused(stub: Stub) -> None:
    stub.fail = lambda body: (200, {"choices": []})
    with pytest.raises(ServerError, match="must honour"):
        with_client(stub, chunks_of)


def test_a_url_needs_its_scheme() -> None:
    with pytest.raises(ConfigError, match="must begin with http"):
        ServerClient("localhost:8000")
