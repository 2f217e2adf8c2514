"""Clients that mean harm: they send hostile requests one after the other, and leave some answers unread."""

import asyncio
import contextlib
import json
from collections import Counter
from typing import Any
from urllib.parse import urlsplit

NUM_ATTACKERS = 8
_REPLY_SECONDS = 1.0


def _post(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _completion(**fields: Any) -> bytes:
    return _post("/v1/completions", json.dumps({"prompt": "import ", "max_tokens": 4, **fields}).encode())


HOSTILE = {
    "nested": _post("/v1/completions", b'{"prompt":' + b"[" * 50_000),
    "cut": _post("/v1/chat/completions", b'{"messages":')[:-4],
    "binary": bytes(range(256)) * 16,
    "long header": b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 200_000,
    "words": _completion(bad_words=["word" * 2000] * 128),
    "regex": _completion(structured_outputs={"regex": "(a{1,500}){1,500}"}),
    "types": _completion(temperature="hot", n=10**9),
    "unread": _completion(stream=True, max_tokens=1500, ignore_eos=True),
    "stored": _post("/v1/responses", json.dumps({"input": "hi " * 500, "max_output_tokens": 2, "store": True}).encode()),
    "unknown response": b"GET /v1/responses/resp_none HTTP/1.1\r\nhost: localhost\r\n\r\n",
}


async def attack(url: str, seen: Counter[str]) -> None:
    """Send all of HOSTILE in turn until cancelled, and leave those that have no answer within a second; counts them by name."""
    place = urlsplit(url)
    while True:
        for name, data in HOSTILE.items():
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(place.hostname, place.port)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_REPLY_SECONDS):
                        writer.write(data)
                        await reader.read(64)
                seen[name] += 1
                writer.transport.abort()
