"""Middleware before every route: checks sizes, times, hosts, origins, keys and request ids. Pure ASGI.

Decides by `scope["path"]` alone, never by a URL built from the Host header. If any key is set, every path that is not
listed as public requires one.
"""

import asyncio
import hashlib
import hmac
import re
import time
from collections.abc import Collection, Iterable

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxllm.log import logger, safe
from server.browser_access import BrowserAccess
from server.context import ServerContext
from server.error_shapes import shaped
from server.errors import ApiError, as_api_error
from server.ids import Ids
from server.logs import AccessLog
from server.request_bodies import BodyReader

MAX_HEADERS = 100
MAX_HEADER_BYTES = 64 << 10
MAX_URL_BYTES = 8 << 10
LINGER_SECONDS = 1.0
"""Seconds to read and discard a refused body, so that a client that is still sending gets to read the refusal."""
PROBES = frozenset({"/live", "/ready", "/health", "/ping"})
METRICS = "/metrics"
"""Serves counts and times with the names of the model and its adapters, nothing of requests. Public unless the option
metrics_require_key is set, because Prometheus is seldom set up to send a key."""
_HOST = re.compile(rb"[A-Za-z0-9._:\[\]-]+")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}")


class Guard:
    """Wraps the application. `admin_paths` require the operator's key, `public_paths` none ("/x/" includes paths below it)."""

    def __init__(
        self, app: ASGIApp, context: ServerContext, *, public_paths: Collection[str] = (), admin_paths: Collection[str] = ()
    ):
        options = context.options
        self._context = context
        self._app = self._with_cors(app)
        self._bodies = BodyReader(options.limits)
        self._browsers = BrowserAccess(options)
        self._public = PROBES | set(public_paths) | (set() if options.access.metrics_require_key else {METRICS})
        self._public_folders = tuple(path for path in public_paths if path.endswith("/") and path != "/")
        self._admin = frozenset(admin_paths)
        self._keys = key_digests(options.access.api_key or ())
        self._admin_keys = key_digests([options.access.admin_api_key] if options.access.admin_api_key else ())
        self._log = AccessLog(options.logging)
        self._ids = Ids()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        answer = _Answer(send, self._request_id(scope) if self._context.options.replies.enable_request_id_headers else None)
        started = time.monotonic()
        try:
            await self._answered(scope, receive, answer)
        except Exception as error:
            if not answer.has_begun:
                await self._refuse(as_api_error(error), scope, receive, answer)
            logger.error("%s %s failed", scope["method"], safe(scope["path"], 200), exc_info=error)
        finally:
            self._context.clients.leave(scope)
            self._log.write(scope, answer.status, time.monotonic() - started)

    async def _answered(self, scope: Scope, receive: Receive, send: "_Answer") -> None:
        try:
            headers = _checked_headers(scope)
            self._browsers.check(scope["method"], headers)
            path = scope["path"]
            self._check_key(scope, path, headers)
            self._context.clients.enter(scope, _given_key(headers))
            if self._context.refusal is not None and path not in PROBES and path != METRICS:
                raise self._context.refusal
            body = await self._bodies.read(headers, receive, scope["state"]["client"])
        except ApiError as error:
            is_unread = any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])
            await self._refuse(error, scope, receive, send, is_unread=is_unread)
            return
        if body is None:
            await self._app(scope, receive, send)
        else:
            await body.pass_on(self._app, scope, receive, send)

    async def _refuse(self, error: ApiError, scope: Scope, receive: Receive, send: Send, *, is_unread: bool = False) -> None:
        """Send an error. Closes the connection if the body was not read completely."""

        async def reply(scope: Scope, receive: Receive, send: Send) -> None:
            response = shaped(scope, error).response()
            if not is_unread:
                await response(scope, receive, send)
                return
            response.headers["connection"] = "close"
            await send({"type": "http.response.start", "status": error.status, "headers": response.raw_headers})
            await send({"type": "http.response.body", "body": response.body, "more_body": True})
            await _thrown_away(receive, LINGER_SECONDS)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        await self._with_cors(reply)(scope, receive, send)

    def _with_cors(self, app: ASGIApp) -> ASGIApp:
        access = self._context.options.access
        if not access.allowed_origins:
            return app
        return CORSMiddleware(
            app,
            allow_origins=access.allowed_origins,
            allow_methods=access.allowed_methods or ["*"],
            allow_headers=access.allowed_headers or ["*"],
            allow_credentials=access.allow_credentials,
            expose_headers=["x-request-id"],
        )

    def _request_id(self, scope: Scope) -> str:
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"").decode("latin-1")
        request_id = given if _REQUEST_ID.fullmatch(given) else self._ids.take()
        scope.setdefault("state", {})["request_id"] = request_id
        return request_id

    # Keys

    def _check_key(self, scope: Scope, path: str, headers: dict[bytes, bytes]) -> None:
        if scope["method"] == "OPTIONS":
            return
        if path in self._admin:
            self._check_admin_key(headers)
        elif self._keys and not self._is_public(path) and not holds_key(_given_key(headers), (*self._keys, *self._admin_keys)):
            raise _unauthenticated()

    def _is_public(self, path: str) -> bool:
        return path in self._public or path.startswith(self._public_folders)

    def _check_admin_key(self, headers: dict[bytes, bytes]) -> None:
        wanted = self._admin_keys or self._keys
        given = _given_key(headers)
        if not wanted or holds_key(given, wanted):
            return
        if self._keys and holds_key(given, self._keys):
            raise ApiError(403, "this endpoint needs the operator's key (--admin-api-key)", code="forbidden")
        raise _unauthenticated()


class _Answer:
    """`send` that adds the request's id as a header and records the status."""

    def __init__(self, send: Send, request_id: str | None):
        self._send = send
        self._header = None if request_id is None else (b"x-request-id", request_id.encode("latin-1"))
        self.status = 499
        """Record that the client left before an answer."""
        self.has_begun = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_begun = True
            self.status = message["status"]
            if self._header is not None:
                message = {**message, "headers": [*message.get("headers", ()), self._header]}
        await self._send(message)


def _checked_headers(scope: Scope) -> dict[bytes, bytes]:
    """The headers by name. Raises ApiError for too many or too large headers, and for an invalid Host."""
    if len(scope.get("raw_path") or scope["path"]) + len(scope.get("query_string", b"")) > MAX_URL_BYTES:
        raise ApiError(414, f"the URL is longer than {MAX_URL_BYTES} bytes")
    pairs = scope["headers"]
    if len(pairs) > MAX_HEADERS or sum(len(name) + len(value) for name, value in pairs) > MAX_HEADER_BYTES:
        raise ApiError(431, f"the headers are more than {MAX_HEADERS} or larger than {MAX_HEADER_BYTES} bytes")
    headers: dict[bytes, bytes] = {}
    for name, value in pairs:
        if name in (b"host", b"authorization", b"content-length", b"x-api-key") and name in headers:
            raise ApiError(400, f"there are two headers {name.decode()}")
        headers[name] = value
    host = headers.get(b"host")
    if host is None and scope.get("http_version") == "1.0":
        return headers
    if host is None or not _HOST.fullmatch(host):
        raise ApiError(400, "the header Host is missing or not a host's name")
    return headers


def key_digests(keys: Iterable[str]) -> tuple[bytes, ...]:
    """Digests of the keys, for comparison."""
    return tuple(hashlib.sha256(key.encode()).digest() for key in keys)


def _given_key(headers: dict[bytes, bytes]) -> bytes | None:
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer":
        return key.strip(b" \t")
    return headers.get(b"x-api-key")  # Anthropic's clients send this header


def holds_key(given: bytes | None, wanted: Iterable[bytes]) -> bool:
    """Whether a key is one of those, in constant time."""
    digest = hashlib.sha256(given or b"").digest()
    found = False
    for each in wanted:
        found |= hmac.compare_digest(digest, each)
    return found and bool(given)


def _unauthenticated() -> ApiError:
    return ApiError(
        401,
        "the API key is missing or wrong; send it as `Authorization: Bearer KEY`",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )


async def _thrown_away(receive: Receive, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return
