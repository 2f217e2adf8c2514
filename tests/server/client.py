"""A client of an ASGI application, without sockets, that waits for each answer."""

import asyncio
import json
from typing import Any

import httpx


class Client:
    """Requests as httpx has them, each run to its end in an event loop of this client's own."""

    def __init__(self, app: Any, headers: dict[str, str] | None = None):
        self.app = app
        self._headers = headers
        self._runner = asyncio.Runner()

    def __enter__(self) -> "Client":
        self._runner.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._runner.close()

    def run(self, coroutine: Any) -> Any:
        """The result of a coroutine in this client's loop."""
        return self._runner.run(asyncio.wait_for(coroutine, 120))

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=self._headers) as client:
                return await client.request(method, path, **options)

        return self.run(send())

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.request("GET", path, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return self.request("POST", path, **({} if body is None else {"json": body}), **options)

    def complete(self, **body: Any) -> httpx.Response:
        return self.post("/v1/completions", {"prompt": "hi", **body})

    def chat(self, text: str = "hi", **body: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **body})


def events(response: httpx.Response) -> list[Any]:
    """The JSON of each event of a stream, which must end as it should."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]
