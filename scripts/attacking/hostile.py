"""Requests that are not HTTP, or are HTTP and make no sense; bodies that are not JSON, or JSON and make no sense."""

import json
from dataclasses import dataclass

from scripts.attacking import wire
from scripts.attacking.attack import Seen, attack
from scripts.attacking.bystander import Bystander
from scripts.attacking.target import Target

_NEXT = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
"""A request that must not be found inside another."""
ANSWERED_WITHIN_SECONDS = 5.0


@dataclass(frozen=True)
class Kind:
    """Bytes, and what must not come back."""

    name: str
    data: bytes
    most_ok: int = 0
    """Responses with 2xx that are right."""


def _post(headers: bytes, body: bytes = b"", path: bytes = b"/v1/completions") -> bytes:
    return (
        b"POST " + path + b" HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n" + headers + b"\r\n\r\n" + body
    )


def _get(line: bytes, headers: bytes = b"Host: 127.0.0.1") -> bytes:
    return line + b"\r\n" + headers + b"\r\nConnection: close\r\n\r\n"


_GOOD = json.dumps(wire.PLAIN).encode()
_LENGTH = b"Content-Length: %d" % len(_GOOD)
_CHUNKED = b"Transfer-Encoding: chunked"
SOCKET_KINDS = (
    Kind("both lengths", _post(_LENGTH + b"\r\n" + _CHUNKED, b"0\r\n\r\n" + _NEXT)),
    Kind("both lengths, chunked first", _post(_CHUNKED + b"\r\n" + _LENGTH, b"0\r\n\r\n" + _NEXT)),
    Kind("two lengths", _post(_LENGTH + b"\r\nContent-Length: 0", _GOOD)),
    Kind("two equal lengths", _post(_LENGTH + b"\r\n" + _LENGTH, _GOOD)),
    Kind("length with a sign", _post(b"Content-Length: +5", b"12345")),
    Kind("negative length", _post(b"Content-Length: -1", b"12345")),
    Kind("length in hex", _post(b"Content-Length: 0x5", b"12345")),
    Kind("length of 30 digits", _post(b"Content-Length: " + b"9" * 30)),
    Kind("length list", _post(b"Content-Length: 5, 5", b"12345")),
    Kind("unknown transfer", _post(b"Transfer-Encoding: xchunked", b"0\r\n\r\n" + _NEXT)),
    Kind("transfer list", _post(b"Transfer-Encoding: chunked, identity", b"0\r\n\r\n" + _NEXT)),
    Kind("transfer with a tab", _post(b"Transfer-Encoding:\tchunked\r\nContent-Length: 3", b"0\r\n\r\n" + _NEXT)),
    Kind("name with a space", _post(b"Transfer-Encoding : chunked", b"0\r\n\r\n" + _NEXT)),
    Kind("chunk size overflows", _post(_CHUNKED, b"FFFFFFFFFFFFFFFFF\r\nx")),
    Kind("chunk size is no number", _post(_CHUNKED, b"zz\r\nx\r\n0\r\n\r\n")),
    Kind("chunk size is negative", _post(_CHUNKED, b"-1\r\nx\r\n0\r\n\r\n")),
    Kind("chunk is too long", _post(_CHUNKED, b"1\r\nxyz\r\n0\r\n\r\n")),
    Kind("chunk extension of 1 MB", _post(_CHUNKED, b"1;" + b"a" * 1_000_000 + b"\r\nx\r\n0\r\n\r\n")),
    Kind("chunked body of 40 MB", _post(_CHUNKED, b"2625A00\r\n" + b" " * 40_000_000 + b"\r\n0\r\n\r\n")),
    Kind("50,000 trailers", _post(_CHUNKED, b"1\r\nx\r\n0\r\n" + b"A: b\r\n" * 50_000 + b"\r\n")),
    Kind("10,000 headers", _get(b"GET /v1/models HTTP/1.1", b"Host: x\r\n" + b"\r\n".join([b"A: b"] * 10_000))),
    Kind("header of 1 MB", _get(b"GET /v1/models HTTP/1.1", b"Host: x\r\nA: " + b"a" * 1_000_000)),
    Kind("header name of 1 MB", _get(b"GET /v1/models HTTP/1.1", b"Host: x\r\n" + b"a" * 1_000_000 + b": b")),
    Kind("URL of 1 MB", _get(b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1")),
    Kind("query of 1 MB", _get(b"GET /v1/models?" + b"a=b&" * 250_000 + b" HTTP/1.1")),
    Kind("folded header", _get(b"GET /v1/models HTTP/1.1", b"Host: x\r\nA: b\r\n Host: y")),
    Kind("nul in a header", _get(b"GET /v1/models HTTP/1.1", b"Host: x\r\nA: b\0c")),
    Kind("nul in the URL", _get(b"GET /v1/\0models HTTP/1.1")),
    Kind("bare CR in a header", _get(b"GET /v1/models HTTP/1.1", b"Host: x\r\nA: b\rC: d")),
    Kind("two hosts", _get(b"GET /v1/models HTTP/1.1", b"Host: 127.0.0.1\r\nHost: localhost")),
    Kind("no host", _get(b"GET /v1/models HTTP/1.1", b"A: b")),
    Kind("host with a path", _get(b"GET /v1/models HTTP/1.1", b"Host: x/y")),
    Kind("host with a user", _get(b"GET /v1/models HTTP/1.1", b"Host: a@b")),
    Kind("host with a space", _get(b"GET /v1/models HTTP/1.1", b"Host: a b")),
    Kind("no version", b"GET /v1/models\r\n\r\n"),
    Kind("version 9.9", _get(b"GET /v1/models HTTP/9.9")),
    Kind("HTTP/2 preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0" * 64),
    Kind("TLS hello", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 500),
    Kind("zeros", b"\0" * 100_000),
    Kind("line feeds", b"\n" * 100_000 + b"x"),
    Kind("method of 1 MB", _get(b"A" * 1_000_000 + b" / HTTP/1.1")),
    Kind("unknown method", _get(b"BREW /v1/models HTTP/1.1")),
    Kind("CONNECT", _get(b"CONNECT 127.0.0.1:22 HTTP/1.1")),
    Kind("proxy request", _get(b"GET http://169.254.169.254/latest HTTP/1.1")),
    Kind("websocket", _get(b"GET /v1/none HTTP/1.1", b"Host: x\r\nUpgrade: websocket\r\nConnection: Upgrade")),
    Kind("expects what nobody knows", _post(b"Expect: 200-maybe\r\nContent-Length: 2", b"{}")),
    Kind("file outside", _get(b"GET /web/../../../../etc/passwd HTTP/1.1")),
    Kind("file outside, encoded", _get(b"GET /web/%2e%2e%2f%2e%2e%2fetc/passwd HTTP/1.1")),
    Kind("file outside, backslashes", _get(b"GET /web/..\\..\\etc\\passwd HTTP/1.1")),
    Kind("100 requests at once", b"GET /v1/none HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 99 + _get(b"GET /v1/none HTTP/1.1")),
)  # fmt: skip


@attack("high", "bytes that are no request: smuggling, floods, other protocols", quick=True)
def hostile_bytes(target: Target, seen: Seen) -> None:
    server = target.server()
    wrong, slow = [], []
    with Bystander(server) as other:
        for kind in SOCKET_KINDS:
            answer = wire.exchange(server, kind.data, seconds=ANSWERED_WITHIN_SECONDS, is_whole=False)
            if sum(200 <= status < 300 for status in answer.statuses) > kind.most_ok or any(
                status >= 500 and status not in (501, 505) for status in answer.statuses
            ):
                wrong.append(f"{kind.name}: {answer.statuses[:3]}")
            if answer.seconds >= ANSWERED_WITHIN_SECONDS and not answer.statuses:
                slow.append(kind.name)
    seen.none_of("served, or failed with 5xx", wrong, len(SOCKET_KINDS))
    seen.none_of("neither answered nor closed", slow, len(SOCKET_KINDS))
    other.judge(seen)


def _nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


def _field(name: str, value: bytes) -> bytes:
    return b'{"prompt": "import ", "max_tokens": 4, "' + name.encode() + b'": ' + value + b"}"


_SCHEMA = '{"type": "json_schema", "json_schema": {"name": "a", "schema": %s}}'
_DEEP_SCHEMA = '{"type":"object","properties":{"a":' * 3000 + "{}" + "}}" * 3000
BODY_KINDS: tuple[tuple[str, str, bytes], ...] = (
    *((f"body {name}", wire.COMPLETIONS, body) for name, body in {
        "empty": b"", "nul": b"\0", "not JSON": b"{", "null": b"null", "a list": b"[]", "a number": b"1", "NaN": b"NaN",
        "latin-1": b'{"prompt": "\xff"}', "UTF-16": '{"prompt": "a"}'.encode("utf-16"), "deep": _nested(100_000),
        "two values": b"{}{}", "lone surrogate": b'{"prompt": "\\ud800"}', "number of 1 MB": _field("seed", b"9" * 1_000_000),
        "exponent": _field("temperature", b"1e999999999"), "long name": b'{"' + b"a" * 1_000_000 + b'": 1}',
        "100,000 names": b"{" + b",".join(b'"a%d":1' % number for number in range(100_000)) + b"}",
    }.items()),
    *((f"{name} {value[:24].decode()}", wire.COMPLETIONS, _field(name, value)) for name, value in (
        ("max_tokens", b"-1"), ("max_tokens", b"1e18"), ("n", b"1000000"), ("temperature", b"NaN"), ("temperature", b"-1"),
        ("top_k", b"99999999999999999999"), ("logprobs", b"100000"), ("logit_bias", b'{"99999999": 1}'), ("seed", b"1e400"),
        ("stop", b'["' + b'","'.join([b"a"] * 10_000) + b'"]'), ("bad_words", b'[""]'), ("stop_token_ids", b"[-1]"),
        ("allowed_token_ids", b"[]"), ("prompt", b"[99999999]"), ("prompt", b"[[]]"), ("prompt", b"{}"), ("model", b'"../../etc"'),
        ("timeout", b"-1"), ("priority", b"1e300"), ("cache_salt", b'"' + b"a" * 10_000 + b'"'), ("best_of", b"9999"),
        ("response_format", (_SCHEMA % _DEEP_SCHEMA).encode()),
        ("response_format", (_SCHEMA % '{"$ref": "#"}').encode()),
        ("structured_outputs", b'{"regex": "' + b"((" * 50_000 + b'"}'),
        ("structured_outputs", b'{"grammar": "root ::= root"}'),
    )),
    *((f"chat {name}", wire.CHAT, b'{"messages": ' + value + b', "max_tokens": 4}') for name, value in {
        "no messages": b"[]", "message is a number": b"[1]", "role of 1 MB": b'[{"role": "' + b"a" * 1_000_000 + b'", "content": "a"}]',
        "file URL": b'[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]',
        "inner URL": b'[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}]}]',
    }.items()),
    ("a template of its own", wire.CHAT, b'{"messages": [{"role": "user", "content": "a"}], "chat_template": "{{ 9 ** 9 ** 9 }}"}'),
    ("adapter's path", "/v1/load_lora_adapter", b'{"lora_name": "a", "lora_path": "/etc"}'),
)  # fmt: skip


@attack("medium", "bodies that make no sense, in every field", quick=True)
def hostile_bodies(target: Target, seen: Seen) -> None:
    server = target.server()
    wrong, slow = [], []
    with Bystander(server) as other:
        for name, path, body in BODY_KINDS:
            answer = wire.post(server, path, body, seconds=30)
            if not 400 <= answer.status < 500:
                wrong.append(f"{name}: {answer.status}")
            if answer.seconds > ANSWERED_WITHIN_SECONDS:
                slow.append(f"{name}: {answer.seconds:.1f} s")
    seen.none_of("not refused with 4xx", wrong, len(BODY_KINDS))
    seen.none_of(f"slower than {ANSWERED_WITHIN_SECONDS:g} s", slow, len(BODY_KINDS))
    other.judge(seen)
