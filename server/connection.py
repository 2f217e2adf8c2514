"""uvicorn connections with additional limits: time for and size of headers, number of connections; errors as JSON."""

import asyncio
import functools
import re
import uuid
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.error_shapes import in_shape_of
from server.errors import ApiError
from server.guard import MAX_HEADER_BYTES, MAX_URL_BYTES
from server.options import ErrorFormat, ServerOptions
from server.unread import SendWatch

_URL_HOST = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*://(?:[^/?#@]*@)?([^/?#]*)")
_REASONS = {400: b"Bad Request", 408: b"Request Timeout", 414: b"URI Too Long", 431: b"Headers Too Large", 503: b"Unavailable"}


class GuardedConnection(HttpToolsProtocol):
    """A connection of one client."""

    def __init__(
        self,
        *args: Any,
        max_connections: int,
        read_timeout_seconds: float,
        unread_seconds: float,
        error_format: ErrorFormat,
        **named: Any,
    ):
        super().__init__(*args, **named)
        self._send_watch = SendWatch(unread_seconds)
        self._max_connections = max_connections
        self._read_timeout_seconds = read_timeout_seconds
        self._error_format = error_format
        self._timer: asyncio.TimerHandle | None = None
        self._is_in_headers = True
        self._num_header_bytes = 0

    def connection_made(self, transport: Any) -> None:
        """Accept a connection; the headers must arrive within the time limit."""
        super().connection_made(transport)
        if len(self.connections) > self._max_connections:
            self._refuse(ApiError(503, "there are too many connections"))
            return
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed, by either side."""
        self._stop_timer()
        self._send_watch.end()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client reads slower than its answer is written."""
        super().pause_writing()
        self._send_watch.begin(self.transport)

    def resume_writing(self) -> None:
        """The client has read most of what was written."""
        self._send_watch.end()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """Receive bytes; close the connection as soon as headers are too large, even if incomplete."""
        if self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        num_bytes = len(data)
        try:
            while data:
                data = self._parse(data)
        except httptools.HttpParserError:
            self.send_400_response("")
            return
        if self._is_in_headers:
            self._num_header_bytes += num_bytes
            if self._num_header_bytes > MAX_HEADER_BYTES + MAX_URL_BYTES and not self.transport.is_closing():
                status = 414 if len(self.url) > MAX_URL_BYTES else 431
                self._refuse(ApiError(status, "the URL is too long" if status == 414 else "the headers are too large"))

    def _parse(self, data: bytes) -> bytes:
        """Parse bytes. Returns unparsed bytes of a request that asks for a protocol upgrade, such as h2c.

        The parser stops HTTP after such headers, so it gets the request again without the upgrade.
        """
        try:
            self.parser.feed_data(data)
            return b""
        except httptools.HttpParserUpgrade as stopped:
            if not self._asks_for_upgrade():
                return b""
            version = self.parser.get_http_version().encode()
            head = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
            head += [b"%b: %b" % (name, value) for name, value in self.headers if name != b"upgrade"]
            self.parser = httptools.HttpRequestParser(self)  # the old one ignores what follows `Connection: close`
            return b"\r\n".join([*head, b"", data[stopped.args[0] :]])

    def _asks_for_upgrade(self) -> bool:
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._is_in_headers = True
        self._num_header_bytes = 0
        if self._timer is None:
            self._start_timer()

    def on_headers_complete(self) -> None:
        """The headers are complete; the guard takes over."""
        self._is_in_headers = False
        self._stop_timer()
        if not self._asks_for_upgrade():
            self._take_host_of_url()
            super().on_headers_complete()

    def _take_host_of_url(self) -> None:
        """Have the host of `GET http://host/path` replace that of the header Host, as RFC 9112 (3.2.2) demands."""
        if (found := _URL_HOST.match(self.url)) is not None:
            self.headers[:] = [(name, found[1] if name == b"host" else value) for name, value in self.headers]

    def on_message_complete(self) -> None:
        """The body is complete."""
        if not self._asks_for_upgrade():
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer input that is not HTTP."""
        if len(getattr(self, "url", b"")) > MAX_URL_BYTES:
            self._refuse(ApiError(414, f"the URL is longer than {MAX_URL_BYTES} bytes"))
        else:
            self._refuse(ApiError(400, "the request is not valid HTTP"))

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self._read_timeout_seconds, self._too_slow)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        if self._num_header_bytes:
            self._refuse(ApiError(408, "the request's headers did not arrive in time", code="timeout"))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        self._stop_timer()
        self._is_in_headers = False
        body = in_shape_of("", error, self._error_format).body()  # its path may not have come
        headers = {
            **error.headers,
            "x-request-id": uuid.uuid4().hex,
            "content-type": "application/json",
            "content-length": len(body),
            "connection": "close",
        }
        lines = b"".join(f"{name}: {value}\r\n".encode() for name, value in headers.items())
        self.transport.write(b"HTTP/1.1 %d %b\r\n%b\r\n%b" % (error.status, _REASONS[error.status], lines, body))
        self.transport.close()


def uvicorn_config(app: Any, options: ServerOptions, **more: Any) -> uvicorn.Config:
    """uvicorn's settings for an application; `more` overrides them."""
    network = options.network
    connection = functools.partial(
        GuardedConnection,
        max_connections=network.max_connections,
        read_timeout_seconds=options.limits.request_body_timeout,
        unread_seconds=options.limits.unread_stream_timeout,
        error_format=options.replies.error_format,
    )
    settings: dict[str, Any] = {
        "host": network.host,
        "port": network.port,
        "uds": network.uds,
        "loop": "uvloop",
        "http": connection,
        "ws": "none",
        "lifespan": "on",
        "log_config": None,
        "log_level": options.logging.uvicorn_log_level,
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,
        "backlog": 2048,
        "timeout_keep_alive": network.timeout_keep_alive,
        "timeout_graceful_shutdown": int(network.shutdown_timeout) or None,
        "ssl_keyfile": network.ssl_keyfile,
        "ssl_certfile": network.ssl_certfile,
        "ssl_ca_certs": network.ssl_ca_certs,
        "ssl_cert_reqs": network.ssl_cert_reqs,
        **({} if network.ssl_ciphers is None else {"ssl_ciphers": network.ssl_ciphers}),
    }
    return uvicorn.Config(app, **{**settings, **more})
