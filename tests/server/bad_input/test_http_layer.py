"""Socket input that is not a valid request: malformed, endless, too large, or of another protocol."""

import gzip
import json
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from tests.helpers.live_server import LiveServer, envelope

CHAT_BODY = json.dumps({"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}).encode()


def exchange(
    server: LiveServer,
    data: bytes,
    *,
    seconds: float = 60,
    chunks: Iterator[bytes] | None = None,
    is_whole: Callable[[bytes], bool] = lambda reply: True,
) -> bytes:
    """Everything that comes back to raw bytes until the server closes, or a tenth of a second of silence after what is whole."""
    with socket.create_connection((server.host, server.port), timeout=seconds) as connection:
        try:
            connection.sendall(data)
            for chunk in chunks or ():
                connection.sendall(chunk)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the server has refused the rest and sent its error
        reply = b""
        try:
            while piece := connection.recv(65536):
                reply += piece
                connection.settimeout(0.1 if is_whole(reply) else seconds)
        except (TimeoutError, ConnectionResetError):
            pass
        return reply


def status_of(reply: bytes) -> int | None:
    return int(reply.split(b" ", 2)[1]) if reply.startswith(b"HTTP/1.") else None


def post(path: str, body: bytes, *headers: str, length: int | None = None) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    lines.append(f"Content-Length: {len(body) if length is None else length}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def get(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: localhost", "Connection: close", *headers]).encode() + b"\r\n\r\n"


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", None])
def test_only_json_is_read(guarded: LiveServer, kind: str | None) -> None:
    headers = guarded.headers | ({} if kind is None else {"content-type": kind})
    reply = guarded.client.post("/v1/chat/completions", content=CHAT_BODY, headers=headers)
    assert reply.status_code in (400, 415) and envelope(reply)


def test_a_compressed_body_is_refused_by_its_coding(guarded: LiveServer) -> None:
    headers = guarded.headers | {"content-type": "application/json", "content-encoding": "gzip"}
    reply = guarded.client.post("/v1/chat/completions", content=gzip.compress(CHAT_BODY), headers=headers)
    assert reply.status_code == 415 and "gzip" in envelope(reply)["message"]


def test_a_body_over_the_limit_is_refused_before_it_is_read(guarded: LiveServer) -> None:
    start = time.monotonic()
    reply = exchange(guarded, post("/v1/chat/completions", b"", f"Authorization: Bearer {guarded.key}", length=10**12))
    assert status_of(reply) == 413 and time.monotonic() - start < 60
    assert b"connection: close" in reply.lower()


def test_a_chunked_body_that_never_ends_is_cut_off(guarded: LiveServer) -> None:
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {guarded.key}\r\nTransfer-Encoding: chunked\r\n\r\n"
    ).encode()
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    assert status_of(exchange(guarded, head, chunks=(chunk for _ in range(2000)))) == 413


@pytest.mark.parametrize("num_first", [0, 1, 40, 10_000])
def test_a_request_that_offers_http2_is_answered_in_http1(guarded: LiveServer, num_first: int) -> None:
    offer = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA")
    data = 2 * post("/tokenize", b'{"prompt": "hi"}', f"Authorization: Bearer {guarded.key}", *offer)
    chunks = iter([data[num_first:]])
    reply = exchange(guarded, data[:num_first], chunks=chunks, is_whole=lambda reply: reply.count(b'"tokens"') == 2)
    assert reply.count(b"HTTP/1.1 200 OK") == 2 and reply.count(b'"tokens"') == 2


@pytest.mark.parametrize("offer", ["Upgrade: websocket", "Upgrade: h2c"])
def test_a_last_request_that_offers_another_protocol_is_answered(guarded: LiveServer, offer: str) -> None:
    data = post("/tokenize", b'{"prompt": "hi"}', f"Authorization: Bearer {guarded.key}", "Connection: Upgrade, close", offer)
    reply = exchange(guarded, data)
    assert status_of(reply) == 200 and b"connection: close" in reply.lower()


def test_a_body_that_stalls_is_given_up(server: LiveServer) -> None:
    start = time.monotonic()
    with LiveServer.start(engine=server.engine, request_body_timeout=0.2) as impatient:
        reply = exchange(impatient, post("/v1/chat/completions", b'{"model"', length=100), seconds=100)
    assert status_of(reply) in (408, None) and time.monotonic() - start < 90


@pytest.mark.parametrize(
    ("data", "statuses"),
    [
        (get("/v1/models", "X-Big: " + "a" * 10_000_000), (400, 431)),
        (get("/v1/models", *(f"X-{i}: a" for i in range(2000))), (400, 431)),
        (get("/v1/models?" + "a" * 100_000), (400, 414)),
        (get("/v1/models").replace(b"Host: localhost", b"Host: a/health?"), (400, 401)),
        (get("/v1/models").replace(b"Host: localhost\r\n", b""), (400, 401)),
        (post("/v1/models", b"", "Content-Length: 5"), (400,)),
        (post("/v1/models", b"", "Transfer-Encoding: chunked"), (400, 401)),
        (b"POST /v1/models HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n", (400,)),
        (b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", (400, 401)),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200), (400, None)),
        (bytes(range(256)) * 4, (400, None)),
        (get("http://evil/v1/models"), (400, 401)),
    ],
    ids=["10 MB header", "2000 headers", "long URL", "Host with a path", "no Host", "two lengths", "length and chunks", "negative length",
         "bad chunk", "TLS hello", "noise", "absolute form"],
)  # fmt: skip
def test_broken_requests_are_refused(guarded: LiveServer, data: bytes, statuses: tuple[int | None, ...]) -> None:
    reply = exchange(guarded, data)
    assert status_of(reply) in statuses, reply[:300]
    assert b"Traceback" not in reply and b'File "' not in reply


def test_pipelined_requests_are_answered_in_order(guarded: LiveServer) -> None:
    one = get("/live").replace(b"Connection: close\r\n", b"")
    reply = exchange(guarded, one * 100)
    assert 1 <= reply.count(b"HTTP/1.1 200") <= 100


@pytest.mark.parametrize(
    "path", ["/%76%31/models", "//v1/models", "/V1/models", "/v1/models/", "/v1/../v1/models", "/v1/models?key={key}"]
)
def test_no_spelling_of_a_path_goes_around_the_key(guarded: LiveServer, path: str) -> None:
    assert status_of(exchange(guarded, get(path.format(key=guarded.key)))) in (307, 401, 404)


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (None, 401),
        ("Bearer wrong", 401),
        ("Bearer {key} ", 200),
        ("Bearer {key}x", 401),
        ("bearer {key}", 200),
        ("Basic {key}", 401),
        ("Bearer \xfc\xff", 401),
        ("Bearer " + "k" * 60_000, 401),
    ],
)
def test_keys(guarded: LiveServer, header: str | None, status: int) -> None:
    data = get("/v1/models", *([] if header is None else [f"Authorization: {header.format(key=guarded.key)}"]))
    reply = exchange(guarded, data.decode().encode("latin-1") if header else data)
    assert status_of(reply) in ((status, 431) if status == 401 else (status,)), reply[:200]
    if status == 401 and status_of(reply) == 401:
        assert b"www-authenticate: bearer" in reply.lower()
        assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["type"] == "authentication_error"


def test_every_route_asks_for_the_key_but_the_open_ones(guarded: LiveServer) -> None:
    asked = 0
    for method, path in guarded.routes():
        reply = guarded.client.request(
            method, path.replace("{", "").replace("}", ""), headers={"content-type": "application/json"}
        )
        if path in ("/live", "/ready", "/health", "/ping", "/metrics", "/", "/docs", "/docs.js") or path.startswith("/web/"):
            assert reply.status_code != 401, path
        else:
            assert reply.status_code == 401, (method, path, reply.status_code)
            asked += 1
    assert asked > 10


def test_foreign_origins_are_not_allowed(guarded: LiveServer) -> None:
    for origin in ("http://evil.example", "http://localhost.evil.com"):
        reply = guarded.client.options(
            "/v1/chat/completions", headers={"Origin": origin, "Access-Control-Request-Method": "POST"}
        )
        assert "access-control-allow-origin" not in reply.headers


def test_unknown_paths_and_methods_have_the_envelope(guarded: LiveServer) -> None:
    unknown = guarded.client.get("/v1/nope", headers=guarded.headers)
    assert unknown.status_code == 404 and envelope(unknown)
    wrong = guarded.client.get("/v1/chat/completions", headers=guarded.headers)
    assert wrong.status_code == 405 and envelope(wrong) and "POST" in wrong.headers["allow"]


def test_request_ids_and_log_lines_stay_on_one_line(guarded: LiveServer) -> None:
    reply = guarded.client.get("/v1/models", headers=guarded.headers | {"x-request-id": "a" * 5000})
    assert reply.status_code == 200 and 0 < len(reply.headers["x-request-id"]) < 300
