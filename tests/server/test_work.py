"""Work before the engine gets a request: whose turn it is, what ends it, and what bodies may take of memory."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from server.app import create_app
from server.errors import ApiError
from server.options import LimitOptions
from server.request_bodies import BodyMemory
from server.work import LARGE_BYTES, ORIGIN, Origin, Work, WorkPool
from tests.server.client import Client
from tests.server.conftest import options


class Stretch:
    """Work of many pieces that last a turn each."""

    def __init__(self, num_pieces: int, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("server.work.TURN_SECONDS", 0.0)
        self.num_pieces, self.num_done, self.is_closed = num_pieces, 0, False

    def work(self, note: Callable[[], None] = lambda: None) -> Work[int]:
        try:
            for _ in range(self.num_pieces):
                note()
                time.sleep(0.0005)
                self.num_done += 1
                yield None
        finally:
            self.is_closed = True
        return self.num_done


def as_client(client: str, run: Any) -> "asyncio.Task[Any]":
    """A task of a client's large request."""
    ORIGIN.set(Origin(client, LARGE_BYTES))
    return asyncio.get_running_loop().create_task(run)


def test_one_client_s_work_does_not_wait_for_all_of_another_s(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    async def main() -> None:
        pool = WorkPool(1)
        many = [as_client("greedy", pool.run(Stretch(40, monkeypatch).work(lambda: order.append("g")))) for _ in range(5)]
        await asyncio.sleep(0.005)
        assert await as_client("modest", pool.run(Stretch(10, monkeypatch).work(lambda: order.append("m")))) == 10
        assert not all(task.done() for task in many)
        assert await asyncio.gather(*many) == [40] * 5
        pool.close()

    asyncio.run(main())
    first, last = order.index("m"), len(order) - order[::-1].index("m")
    assert order[first:last].count("g") <= 20


def test_work_ends_with_the_client_that_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        pool, stretch = WorkPool(1), Stretch(100_000, monkeypatch)
        task = as_client("a", pool.run(stretch.work()))
        while not stretch.num_done:
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        while not stretch.is_closed:
            await asyncio.sleep(0.001)
        assert stretch.num_done < 100_000
        pool.close()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_errors_and_awaited_calls_come_back_from_a_turn() -> None:
    def work() -> Work[str]:
        thread = yield threading.current_thread
        return f"{thread.name} {threading.current_thread().name}"

    def failing() -> Work[None]:
        yield lambda: (_ for _ in ()).throw(ValueError("of a call"))

    async def main() -> None:
        pool = WorkPool()
        assert await as_client("a", pool.run(work())) == "jaxllm-wait jaxllm-work"
        with pytest.raises(ValueError, match="of a call"):
            await as_client("a", pool.run(failing()))
        pool.close()

    asyncio.run(main())


def test_bodies_wait_for_memory_and_one_client_may_not_take_all_of_it() -> None:
    async def main() -> None:
        memory = BodyMemory(LimitOptions(max_request_body_bytes=100, request_body_timeout=0.05))
        held = [await memory.take("a", 100) for _ in range(4)]
        with pytest.raises(ApiError) as caught:
            await memory.take("a", 1)
        assert caught.value.status == 503 and "retry-after" in caught.value.headers
        held += [await memory.take("b", 100) for _ in range(4)]
        waiting = asyncio.create_task(memory.take("c", 50))
        await asyncio.sleep(0)
        assert not waiting.done()
        held.pop()()
        give_back = await waiting
        for each in (give_back, give_back, *held):
            each()
        assert not memory._held and not memory._waiting

    asyncio.run(main())


def test_a_client_that_leaves_ends_the_work_on_its_large_request(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    app = create_app(engine, options())
    texts: list[str] = []
    tokenizer, has_begun = engine.input_processor.tokenizer, threading.Event()
    encode = type(tokenizer).encode

    def slow(self: Any, text: str, add_special_tokens: bool = True) -> list[int]:
        texts.append(text)
        has_begun.set()
        time.sleep(0.02)
        return encode(self, "a", add_special_tokens)

    monkeypatch.setattr(type(tokenizer), "encode", slow)

    async def leave() -> None:
        body = b'{"prompt": "%b"}' % (b"a " * 400_000)
        headers = [
            (b"host", b"localhost"),
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
        scope |= {"client": ("1.2.3.4", 1), "http_version": "1.1", "scheme": "http", "root_path": "", "raw_path": b"/"}
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        sent: list[Any] = []

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await asyncio.to_thread(has_begun.wait)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        await app(scope, receive, send)
        assert not sent

    with Client(app) as client:
        client.run(leave())
        count = len(texts)
        time.sleep(0.1)
        assert count >= 1 and len(texts) <= count + 1
