"""A tiny OpenAI-compatible server in a thread: outputs `word ` as often as asked, and misbehaves on request."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class Stub:
    """The server's address, what it was asked, and how it behaves."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    max_together: int = 0
    """Most streams that were open at once."""
    with_usage: bool = True
    piece_bytes: int | None = None
    """Cut everything that is sent into pieces of so many bytes."""
    line_end: str = "\n"
    fail: Callable[[dict[str, Any]], tuple[int, Any] | None] = lambda body: None
    """(status, JSON) with which to refuse a request."""
    break_after: Callable[[dict[str, Any]], tuple[int, str] | None] = lambda body: None
    """(tokens, "error" | "close") after which a stream ends badly."""
    pages: dict[str, str] = field(default_factory=dict)
    """Further GET paths with their text."""
    gate: Callable[[dict[str, Any]], asyncio.Event | None] = lambda body: None
    """Event that a stream waits for after its first token."""
    card: dict[str, Any] = field(default_factory=dict)
    """Fields of the model in /v1/models in addition to its id."""
    reasoning: str = ""
    """The reasoning of a chat answer before its content."""
    num_open: int = 0
    cut_off: threading.Event = field(default_factory=threading.Event)
    """Set when a client went away before its stream was over."""

    def reset(self) -> None:
        """Restore normal behaviour, and clear the recorded requests."""
        fresh = Stub(url=self.url)
        fresh.num_open = self.num_open
        self.__dict__.update(vars(fresh))

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "stub", "object": "model", **self.card}]})

    async def page(self, request: web.Request) -> web.Response:
        text = self.pages.get(request.path)
        return web.Response(text=text) if text is not None else web.Response(status=404, text="nothing here")

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        if (refusal := self.fail(body)) is not None:
            status, content = refusal
            return web.json_response(content, status=status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        self.num_open += 1
        self.max_together = max(self.max_together, self.num_open)
        try:
            await self._stream(response, body, is_chat="messages" in body)
        except (ConnectionError, asyncio.CancelledError):
            self.cut_off.set()
            raise
        finally:
            self.num_open -= 1
        return response

    async def embed(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        count = len(self.bodies[-1]["input"])
        return web.json_response({"data": [{"embedding": [1.0]}], "usage": {"prompt_tokens": count, "total_tokens": count}})

    async def note(self, request: web.Request) -> web.Response:
        self.bodies.append({"path": request.path})
        return web.Response()

    async def _stream(self, response: web.StreamResponse, body: dict[str, Any], *, is_chat: bool) -> None:
        count = body.get("max_completion_tokens" if is_chat else "max_tokens") or 3
        broken = self.break_after(body)
        await self._send(response, ": keep-alive")
        if is_chat:
            await self._event(response, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
            if self.reasoning:
                await self._event(response, {"choices": [{"index": 0, "delta": {"reasoning": self.reasoning}}]})
        for number in range(count):
            if broken is not None and number == broken[0]:
                if broken[1] == "close":
                    assert response._req is not None and response._req.transport is not None
                    response._req.transport.close()
                    return
                await self._event(
                    response, {"error": {"message": "the engine died", "type": "InternalServerError", "code": 500}}
                )
                await self._send(response, "data: [DONE]")
                return
            said = {"delta": {"content": "word "}} if is_chat else {"text": "word "}
            reason = "length" if number == count - 1 else None
            await self._event(response, {"choices": [{"index": 0, **said, "finish_reason": reason}], "usage": None})
            if number == 0 and (gate := self.gate(body)) is not None:
                await gate.wait()
        if self.with_usage and (body.get("stream_options") or {}).get("include_usage"):
            prompt = body.get("prompt")
            num_prompt = len(prompt) if isinstance(prompt, list) else 7
            await self._event(response, {"choices": [], "usage": {"prompt_tokens": num_prompt, "completion_tokens": count}})
        await self._send(response, "data: [DONE]")

    async def _event(self, response: web.StreamResponse, content: Any) -> None:
        await self._send(response, "data: " + json.dumps(content))

    async def _send(self, response: web.StreamResponse, line: str) -> None:
        data = (line + self.line_end * 2).encode()
        size = self.piece_bytes or len(data)
        for start in range(0, len(data), size):
            await response.write(data[start : start + size])


@contextmanager
def running_stub() -> Iterator[Stub]:
    """A stub server on a port that the system chose."""
    stub = Stub()
    loop = asyncio.new_event_loop()
    ready = threading.Event()
    stop = asyncio.Event()

    async def serve() -> None:
        app = web.Application()
        app.router.add_get("/v1/models", stub.models)
        app.router.add_post("/v1/completions", stub.answer)
        app.router.add_post("/v1/chat/completions", stub.answer)
        app.router.add_post("/v1/embeddings", stub.embed)
        app.router.add_post("/{path:st[a-z]+_profile}", stub.note)
        app.router.add_get("/{path:.*}", stub.page)
        runner = web.AppRunner(app, shutdown_timeout=0, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        stub.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield stub
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()
