"""Outermost ASGI layer: answers while the engine loads and while the server drains."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from starlette.types import ASGIApp, Receive, Scope, Send

from jaxllm.engine.messages import Status
from server.browser_access import BrowserAccess
from server.error_shapes import in_shape_of
from server.errors import ApiError
from server.options import ErrorFormat

LIVE_PATH = "/live"
PATHS_WHILE_DRAINING = frozenset({LIVE_PATH, "/health", "/ping", "/metrics", "/load", "/version"})
LOADING_RETRY_SECONDS = 5


class Gate:
    """Answers 503 until `open` is called with an application, and again after `drain`. Counts running requests.

    `page` holds the replies to GET that are available from the start: the web page, which then shows loading progress.
    `root_path` is a prefix that a proxy may leave on paths; it is removed here. `browsers` checks what is answered here; the
    application checks the rest.
    """

    def __init__(
        self,
        status: Callable[[], Status | None],
        failure: Callable[[], BaseException | None] = lambda: None,
        page: Mapping[str, ASGIApp] = MappingProxyType({}),
        root_path: str = "",
        error_format: ErrorFormat = "openai",
        browsers: BrowserAccess | None = None,
    ):
        self._status = status
        self._failure = failure
        self._page = page
        self._root_path = root_path
        self._error_format = error_format
        self._browsers = browsers
        self._app: ASGIApp | None = None
        self._retry_seconds: float | None = None
        self.num_running = 0

    def open(self, app: ASGIApp) -> None:
        """Start to forward requests to the application."""
        self._app = app

    def drain(self, seconds: float) -> ApiError:
        """Refuse new requests, because the server stops within this many seconds. Returns the message for clients."""
        self._retry_seconds = seconds
        return _stopping(seconds)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if self._root_path and scope["path"].startswith(self._root_path + "/"):
            scope["path"] = scope["path"].removeprefix(self._root_path)
        path = scope["path"]
        if self._app is None or (self._retry_seconds is not None and path not in PATHS_WHILE_DRAINING):
            try:
                await self._answer(path, scope, receive, send)
            except ApiError as error:
                await in_shape_of(path, error, self._error_format).response()(scope, receive, send)
            return
        self.num_running += path not in PATHS_WHILE_DRAINING
        try:
            await self._app(scope, receive, send)
        finally:
            self.num_running -= path not in PATHS_WHILE_DRAINING

    async def _answer(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer without the application. Raises ApiError."""
        if self._browsers is not None:
            self._browsers.check(scope["method"], dict(scope["headers"]))
        if self._retry_seconds is not None and path not in PATHS_WHILE_DRAINING:
            raise _stopping(self._retry_seconds)
        if path == LIVE_PATH:
            await _live(send)
        elif path in self._page and scope["method"] in ("GET", "HEAD"):
            await self._page[path](scope, receive, send)
        else:
            raise self._loading()

    def _loading(self) -> ApiError:
        if self._failure() is not None:
            return ApiError(503, "the engine could not be started", code="engine_dead", retry=False)
        headers = {"retry-after": str(LOADING_RETRY_SECONDS)}
        return ApiError(
            503, f"the model is being loaded: {describe(self._status())}", code="loading", headers=headers, retry=True
        )


def describe(status: Status | None) -> str:
    """`loading weights, 42 %`"""
    if status is None or not status.phase:
        return "starting"
    if not status.total:
        return status.phase
    return f"{status.phase}, {min(100, 100 * status.done // status.total)} %"


def _stopping(seconds: float) -> ApiError:
    headers = {"retry-after": str(max(1, round(seconds))), "connection": "close"}
    return ApiError(503, "the server is being stopped and takes no new requests", code="stopping", headers=headers, retry=True)


async def _live(send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})
