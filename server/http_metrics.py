"""Counts HTTP requests: outermost ASGI middleware, so that requests refused by the guard are counted too."""

import contextlib
import time
from collections.abc import Callable, Iterator
from itertools import product
from typing import Literal, get_args

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxllm.metrics.buckets import HTTP_ALL_SECONDS, HTTP_SECONDS, SLEEP_SECONDS
from jaxllm.metrics.collect import Collected
from jaxllm.metrics.metric import Metric
from jaxllm.observations import Observations
from server.unread import SendWatch

NOT_COUNTED = frozenset({"/metrics", "/health", "/live", "/ready", "/ping", "/load", "/version", "/server_info"})
NO_HANDLER = "none"
"""Path label of requests that match no route: arbitrary paths must not become labels."""
CLIENT_GONE = 499
"""Status of a request whose client disconnected before an answer began."""
METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH"})


RequestType = Literal["chat_completions", "responses", "other"]
SleepOperation = Literal["sleep", "wake"]
MODES = ("non_streaming", "streaming")
OUTCOMES = ("no_tool_call", "tool_call")


class HttpMetrics:
    """Counters of one API server. Used only by its event loop."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._requests: dict[tuple[str, str, str], int] = {}
        self._seconds: dict[tuple[str, str], Observations] = {}
        self._all_seconds = Observations(HTTP_ALL_SECONDS)
        self._bytes: dict[str, tuple[int, int, int]] = {}
        """By route: requests, bytes of their bodies, bytes of the answers."""
        self._tool_calls = dict.fromkeys(product(MODES, OUTCOMES, get_args(RequestType)), 0)
        self._sleep_seconds: dict[str, Observations] = {}
        self._sleep_calls = dict.fromkeys(get_args(SleepOperation), 0)
        """Calls under way."""
        self.num_rate_limited: Callable[[], int] = lambda: 0
        self.num_held: Callable[[], int] = lambda: 0

    def request_done(
        self, method: str, status: int, handler: str, seconds: float, *, request_bytes: int = 0, answer_bytes: int = 0
    ) -> None:
        """Count a request that was answered or whose client disconnected."""
        method = method if method in METHODS else "other"
        key = (method, f"{status // 100}xx", handler)
        self._requests[key] = self._requests.get(key, 0) + 1
        self._seconds.setdefault((method, handler), Observations(HTTP_SECONDS)).add(seconds)
        self._all_seconds.add(seconds)
        count, received, sent = self._bytes.get(handler, (0, 0, 0))
        self._bytes[handler] = (count + 1, received + request_bytes, sent + answer_bytes)

    def tool_calls_parsed(self, request_type: RequestType, streams: bool, found_calls: bool) -> None:
        """Count an answer that was searched for tool calls."""
        self._tool_calls[MODES[streams], OUTCOMES[found_calls], request_type] += 1

    @contextlib.contextmanager
    def sleep_mode(self, operation: SleepOperation) -> Iterator[None]:
        """Measure how long the engine takes to fall asleep or to wake up."""
        began = time.perf_counter()
        self._sleep_calls[operation] += 1
        try:
            yield
        finally:
            self._sleep_calls[operation] -= 1
            self._sleep_seconds.setdefault(operation, Observations(SLEEP_SECONDS)).add(time.perf_counter() - began)

    def snapshot(self) -> list[Metric]:
        """The current value of every metric."""
        found = Collected({}, prefix="")
        own = Collected({})
        for (method, status, handler), count in self._requests.items():
            found.counter(
                "http_requests", count, "HTTP requests by class of status", method=method, status=status, handler=handler
            )
        for (method, handler), seconds in self._seconds.items():
            about = "from the headers of an HTTP request to the last byte of its answer"
            found.histogram("http_request_duration_seconds", seconds, about, method=method, handler=handler)
        found.histogram("http_request_duration_highr_seconds", self._all_seconds, "the same of all routes together")
        for handler, (num_requests, received, sent) in self._bytes.items():
            found.summary("http_request_size_bytes", num_requests, received, "Content-Length of requests", handler=handler)
            found.summary("http_response_size_bytes", num_requests, sent, "bodies of answers", handler=handler)
        for (mode, outcome, request_type), count in self._tool_calls.items():
            own.counter(
                "tool_call_parser_invocations",
                count,
                "answers that were searched for tool calls, once each when they end",
                model_name=self._model_name,
                mode=mode,
                outcome=outcome,
                request_type=request_type,
            )
        for operation, seconds in self._sleep_seconds.items():
            about = "time that putting the engine to sleep or waking it up took"
            own.histogram("sleep_mode_operation_duration_seconds", seconds, about, operation=operation)
        for operation, count in self._sleep_calls.items():
            about = "such calls under way in the HTTP process that answers"
            own.gauge("sleep_mode_operations_in_flight", count, about, operation=operation)
        refused = "requests refused because their key or address had too many (max_concurrent_requests_per_key)"
        own.counter("rate_limited_requests", self.num_rate_limited(), refused)
        unread = "answers whose clients did not read them: requests held until they do, and connections closed"
        own.counter("unread_streams", self.num_held(), unread, outcome="held")
        own.counter("unread_streams", SendWatch.num_ended, unread, outcome="closed")
        return found.metrics + own.metrics


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
        answer_bytes = 0

        async def noting(message: Message) -> None:
            nonlocal status, answer_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                answer_bytes += len(message.get("body", b""))
            await send(message)

        began = time.perf_counter()
        try:
            await self._app(scope, receive, noting)
        except Exception:
            status = 500 if status == CLIENT_GONE else status
            raise
        finally:
            handler = getattr(scope.get("route"), "path", NO_HANDLER)
            self._metrics.request_done(
                scope["method"],
                status,
                handler,
                time.perf_counter() - began,
                request_bytes=_content_length(scope),
                answer_bytes=answer_bytes,
            )


def _content_length(scope: Scope) -> int:
    """The value of Content-Length; 0 without one."""
    value = next((value for name, value in scope.get("headers", ()) if name == b"content-length"), b"")
    return int(value) if value.isdigit() else 0
