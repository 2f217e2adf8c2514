"""A client of one OpenAI-compatible server, for asyncio."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import aiohttp
import msgspec
from aiohttp.typedefs import StrOrURL

from jaxllm.errors import ConfigError, JaxLLMError
from jaxllm.http_client.chunks import DONE, Chunk, read_chunk
from jaxllm.http_client.sse import EventParser, EventTooLongError

MAX_ERROR_BYTES = 64 * 1024
IDLE_CONNECTION_SECONDS = 2.0
"""Shorter than servers keep an idle connection (uvicorn: 5 s), so that no request uses one that is being closed."""


class ServerError(JaxLLMError):
    """The server refused, failed or disconnected. `status` is the HTTP status, or None without a response."""

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status

    @property
    def is_final(self) -> bool:
        """Whether a retry is pointless."""
        return self.status is not None and 400 <= self.status < 500 and self.status not in (408, 409, 425, 429)


class ServerClient:
    """A client of one server. Use as an async context manager."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        verify_tls: bool = True,
        timeout_seconds: float | None = None,
    ):
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(f"the server's URL is {base_url!r}, must begin with http:// or https://")
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._ssl: ssl.SSLContext | bool = verify_tls
        self._timeout = aiohttp.ClientTimeout(total=timeout_seconds, connect=60)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "ServerClient":
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=self._ssl, keepalive_timeout=IDLE_CONNECTION_SECONDS),
            headers=self._headers,
            timeout=self._timeout,
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=2**20,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def get(self, path: str) -> bytes:
        """The body of a GET. Raises ServerError."""
        async with self._ask("GET", path) as response:
            return await response.read()

    async def get_json(self, path: str) -> Any:
        """The JSON body of a GET. Raises ServerError."""
        return _decoded(await self.get(path), path)

    async def post_json(self, path: str, body: Any) -> Any:
        """The JSON answer to a JSON body. Raises ServerError."""
        return _decoded(await self.post(path, msgspec.json.encode(body)), path)

    async def post(self, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None) -> bytes:
        """The answer to a POST. Raises ServerError."""
        async with self._ask("POST", path, body, headers) as response:
            return await response.read()

    async def models(self) -> list[str]:
        """The names of the models that the server serves. Raises ServerError."""
        return [card["id"] for card in await self.model_cards()]

    async def model_cards(self) -> list[dict[str, Any]]:
        """The server's description of each model. Raises ServerError."""
        found = await self.get_json("/v1/models")
        entries = found.get("data") if isinstance(found, dict) else None
        return [entry for entry in entries or [] if isinstance(entry, dict) and isinstance(entry.get("id"), str)]

    async def model_card(self, name: str | None) -> dict[str, Any]:
        """The server's description of a model, as far as it has one; None: of the first that it lists. Raises ServerError, and
        ConfigError if it lists none."""
        try:
            cards = await self.model_cards()
        except ServerError:
            if name is None:
                raise
            cards = []  # not every server has a list
        if name is not None:
            return next((card for card in cards if card["id"] == name), {"id": name})
        if not cards:
            raise ConfigError("the server lists no models at /v1/models; name one with --model")
        return cards[0]

    async def stream(
        self, path: str, body: bytes, headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[list[Chunk], None]:
        """POST JSON that requests a stream; yield the answer's chunks, grouped by read.

        Ends at `[DONE]`, or where the server ends. Raises ServerError for a refusal, for an error within the stream, and for
        a connection that breaks. Closing the generator early closes the connection.
        """
        parser = EventParser()
        async with self._ask("POST", path, body, headers) as response:
            if response.content_type == "application/json":
                raise ServerError('the server answered at once instead of streaming; it must honour "stream": true')
            content = response.content
            while True:
                piece = await content.readany()
                try:
                    events = parser.feed(piece) if piece else parser.close()
                except EventTooLongError as fault:
                    raise ServerError(str(fault)) from None
                if events:
                    is_done = events[-1] == DONE
                    chunks, error = _chunks_before_error(events)
                    if chunks:
                        yield chunks
                    if error is not None:
                        raise error
                    if is_done:
                        # the end of the body arrives at once; reading it frees the connection for the next request
                        with contextlib.suppress(TimeoutError):
                            async with asyncio.timeout(1):
                                await response.read()
                        return
                if not piece:
                    return

    @contextlib.asynccontextmanager
    async def _ask(
        self, method: str, path: StrOrURL, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[aiohttp.ClientResponse, None]:
        assert self._session is not None, "the client is used outside its context"
        try:
            async with self._session.request(method, f"{self.base_url}{path}", data=body, headers=headers) as response:
                if response.status >= 400:
                    raise ServerError(await _message_of(response), response.status)
                yield response
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            raise ServerError(f"{self.base_url}: {_reason(error)}") from error


def error_text(error: Any) -> str:
    """The message in an OpenAI error object, or the object as it is."""
    if isinstance(error, dict):
        return str(error.get("message") or error)
    return str(error)


def _reason(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot connect: {error.os_error.strerror or error.os_error}"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(error) or type(error).__name__


async def _message_of(response: aiohttp.ClientResponse) -> str:
    body = await response.content.read(MAX_ERROR_BYTES)
    try:
        content = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        content = None
    if isinstance(content, dict):
        text = error_text(content.get("error") or content.get("message") or content.get("detail") or content)
    else:
        text = body.decode("utf-8", "replace").strip()[:500] or str(response.reason)
    return f"HTTP {response.status}: {text}"


def _chunks_before_error(events: list[bytes]) -> tuple[list[Chunk], ServerError | None]:
    """The chunks in events, up to the first error or invalid one."""
    chunks: list[Chunk] = []
    for event in events:
        if event == DONE:
            break
        try:
            chunk = read_chunk(event)
        except ValueError as error:
            return chunks, ServerError(f"a chunk of the stream makes no sense: {error}")
        if chunk.error is not None:
            code = chunk.error.get("code") if isinstance(chunk.error, dict) else None
            return chunks, ServerError(
                f"error in the stream: {error_text(chunk.error)}", code if isinstance(code, int) else None
            )
        chunks.append(chunk)
    return chunks, None


def _decoded(body: bytes, path: str) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ServerError(f"the answer to {path} is not JSON: {error}") from None
