"""Counts HTTP requests: outermost ASGI middleware, so that requests refused by the guard are counted too."""

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxllm.metrics.buckets import HTTP_SECONDS
from jaxllm.metrics.collect import PREFIX, Collected
from jaxllm.metrics.metric import Metric
from jaxllm.observations import Observations

NOT_COUNTED = frozenset({"/metrics", "/health", "/live", "/ready", "/ping", "/load", "/version", "/server_info"})
NO_HANDLER = "none"
"""Path label of requests that match no route: arbitrary paths must not become labels."""
CLIENT_GONE = 499
"""Status of a request whose client disconnected before an answer began."""
METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH"})


class HttpMetrics:
    """Counters of one front. Used only by its event loop."""

    def __init__(self) -> None:
        self._requests: dict[tuple[str, str, str], int] = {}
        self._seconds: dict[tuple[str, str], Observations] = {}
        self._tool_calls: dict[str, int] = {}

    def request_done(self, method: str, status: int, handler: str, seconds: float) -> None:
        """Count a request that was answered or whose client disconnected."""
        method = method if method in METHODS else "other"
        key = (method, str(status), handler)
        self._requests[key] = self._requests.get(key, 0) + 1
        self._seconds.setdefault((method, handler), Observations(HTTP_SECONDS)).add(seconds)

    def tool_calls_parsed(self, parser: str) -> None:
        """Count a request whose output is searched for tool calls in this dialect."""
        self._tool_calls[parser] = self._tool_calls.get(parser, 0) + 1

    def snapshot(self) -> list[Metric]:
        """The current value of every metric."""
        found = Collected({}, prefix="")
        for (method, status, handler), count in self._requests.items():
            found.counter("http_requests", count, "HTTP requests", method=method, status=status, handler=handler)
        for (method, handler), seconds in self._seconds.items():
            about = "from the headers of an HTTP request to the last byte of its answer"
            found.histogram("http_request_duration_seconds", seconds, about, method=method, handler=handler)
        for parser, count in self._tool_calls.items():
            about = "requests whose output was searched for tool calls"
            found.counter(f"{PREFIX}tool_call_parser_invocations", count, about, tool_parser=parser)
        return found.metrics


class HttpMetricsMiddleware:
    """Wraps an ASGI app; install it outermost."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics):
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in NOT_COUNTED:
            await self._app(scope, receive, send)
            return
        status = CLIENT_GONE

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        began = time.perf_counter()
        try:
            await self._app(scope, receive, noting)
        except Exception:
            status = 500 if status == CLIENT_GONE else status
            raise
        finally:
            handler = getattr(scope.get("route"), "path", NO_HANDLER)
            self._metrics.request_done(scope["method"], status, handler, time.perf_counter() - began)
