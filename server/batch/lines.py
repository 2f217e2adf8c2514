"""Reads and checks the lines of a batch's input; writes the lines of its output."""

import json
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

URLS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
)
OTHER_NAMES = ("/score", "/rerank", "/v2/rerank")
"""The last two as the server returns them."""
MAX_LINE_BYTES = 64 << 20


@dataclass(frozen=True)
class BatchLine:
    """One request of a batch, or the error in its line."""

    number: int
    """Counted from 1."""
    custom_id: str | None = None
    url: str = ""
    body: Mapping[str, Any] | None = None
    fault: str | None = None


def read_lines(path: Path) -> Iterator[BatchLine]:
    """Yield the non-blank lines of an input file. Raises OSError."""
    seen: dict[str, int] = {}
    with path.open("rb") as file:
        for number, raw in enumerate(_bounded(file), 1):
            if not raw.strip():
                continue
            line = _read(number, raw)
            if line.custom_id is not None and line.fault is None:
                first = seen.setdefault(line.custom_id, number)
                if first != number:
                    line = BatchLine(
                        number, line.custom_id, fault=f"custom_id is that of line {first} too; each must be unique"
                    )
            yield line


def answer(line: BatchLine, status: int, body: Any, request_id: str | None) -> dict[str, Any]:
    """The output line of an answered request, whether it succeeded or failed."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return {"id": _record_id(), "custom_id": line.custom_id, "response": response, "error": None}


def refusal(line: BatchLine) -> dict[str, Any]:
    """The output line for an input line that is not a valid request."""
    error = {"code": "invalid_line", "message": f"line {line.number}: {line.fault}"}
    return {"id": _record_id(), "custom_id": line.custom_id, "response": None, "error": error}


def _record_id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"


def _bounded(file: Any) -> Iterator[bytes]:
    """Iterate over lines, holding only a bounded part of the file in memory."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        if len(line) > MAX_LINE_BYTES:
            while not line.endswith(b"\n") and (rest := file.readline(MAX_LINE_BYTES)):
                line = rest
            line = b"too long"
        yield line


def _read(number: int, raw: bytes) -> BatchLine:
    if raw == b"too long":
        return BatchLine(number, fault=f"is longer than {MAX_LINE_BYTES} bytes")
    try:
        given = json.loads(raw)
    except (ValueError, RecursionError):
        return BatchLine(number, fault="is not valid JSON")
    if not isinstance(given, dict):
        return BatchLine(number, fault="must be an object with custom_id, method, url and body")
    custom_id = given.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        return BatchLine(number, fault="custom_id must be a text that is not empty")
    if given.get("method") != "POST":
        return BatchLine(number, custom_id, fault='method must be "POST"')
    url, body = given.get("url"), given.get("body")
    if url not in URLS + OTHER_NAMES:
        return BatchLine(number, custom_id, fault=f"url is {url!r:.100}, must be one of {', '.join(URLS)}")
    if not isinstance(body, dict):
        return BatchLine(number, custom_id, fault="body must be an object")
    for name in ("stream", "background"):
        if body.get(name):
            return BatchLine(number, custom_id, fault=f"body.{name} is set; a batch has whole answers only")
    return BatchLine(number, custom_id, url, body)
