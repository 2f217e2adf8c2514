"""A server with arbitrary answers: the client reads them or raises ServerError; nothing else."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxllm.http_client.chunks import read_chunk
from jaxllm.http_client.client import ServerClient, ServerError
from jaxllm.http_client.sse import EventParser
from server.sse import DONE, KEEP_ALIVE, event

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["choices", "delta", "index", "text", "usage", "error", "tool_calls", "function", "x"]), inner
        )
    ),
    max_leaves=12,
)
CHUNKS = [b'{"choices": [{"index": 0, "text": "a"}]}', b'{"choices": [{"delta": {"content": "b"}, "index": 0}], "usage": null}']
BODY = b"".join([event(CHUNKS[0]), KEEP_ALIVE, event(CHUNKS[1]), DONE])
ANSWERS = [
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n" + BODY,
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n"
    % (len(BODY), BODY),
    b'HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: 29\r\n\r\n{"error": {"message": "no :("}}',
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-encoding: gzip\r\ncontent-length: 9\r\n\r\nnot gzip.",
    b'HTTP/1.1 500 X\r\ncontent-length: 100000\r\n\r\n{"error": ' + b"[" * 99_990,
    b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + event(b'{"error": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"),
]
"""The first two are good."""


@given(st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
@example(b'{"error": ' + b"[" * 100_000)
@example(b'{"unknown": ' + b"[" * 100_000 + b"]" * 100_000 + b"}")
@example(b'{"choices": [{"index": 1e999}]}')
@settings(max_examples=150)
def test_no_event_breaks_the_reader_of_chunks(data: bytes) -> None:
    try:
        read_chunk(data)
    except ValueError as error:
        assert len(str(error)) < 2000


@given(st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]))), st.data())
@settings(max_examples=60)
def test_what_the_server_writes_is_read_wherever_it_is_cut(texts: list[str], data: st.DataObject) -> None:
    written = b"".join(event(text.encode()) + KEEP_ALIVE for text in texts) + DONE
    cuts = sorted(data.draw(st.lists(st.integers(0, len(written)), max_size=8)))
    parser = EventParser()
    found = [
        each for start, end in zip([0, *cuts], [*cuts, len(written)], strict=True) for each in parser.feed(written[start:end])
    ]
    assert found + parser.close() == [*(text.encode() for text in texts), b"[DONE]"]


def damaged(dice: random.Random) -> Iterator[bytes]:
    """Answers that are cut short, have bytes changed, or never were any."""
    yield from ANSWERS
    for answer in ANSWERS[:3]:
        yield from (answer[:size] for size in range(0, len(answer), 9))
        for _ in range(60):
            changed = bytearray(answer)
            for _ in range(dice.randint(1, 4)):
                changed[dice.randrange(len(changed))] = dice.randrange(256)
            yield bytes(changed)
    yield from (dice.randbytes(dice.randrange(200)) for _ in range(40))


@asynccontextmanager
async def saying(answers: Iterator[bytes]) -> AsyncIterator[str]:
    """The URL of a server that sends one of the answers to each connection, and closes it."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(next(answers))
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def test_no_answer_of_a_server_breaks_the_client() -> None:
    async def main() -> None:
        answers = list(damaged(random.Random(0)))
        told: list[str] = []
        async with saying(iter(answers)) as url, ServerClient(url, timeout_seconds=5) as client:
            for number in range(len(answers)):
                texts = ""
                try:
                    async for chunks in client.stream("/v1/completions", b"{}", {"connection": "close"}):
                        texts += "".join(choice.visible for chunk in chunks for choice in chunk.choices or [])
                except ServerError as error:
                    told.append(str(error))
                assert texts == "ab" or number > 1
        assert len(told) > 50 and all(len(each) < 3000 for each in told), max(told, key=len)

    asyncio.run(main())
