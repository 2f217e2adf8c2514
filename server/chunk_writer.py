"""Writes the chunks of a streamed chat or completion; serializes the common part of a stream's chunks once."""

from collections.abc import Mapping
from typing import Any

import msgspec

from server.context import ServerContext
from server.protocol.common import StreamOptions
from server.sse import DONE

_json = msgspec.json.encode


class ChunkWriter:
    """Chunks of one stream. `kind` is their "object"; a text-only chunk has its text between `text_head` and `text_tail`."""

    def __init__(
        self,
        kind: str,
        text_head: bytes,
        text_tail: bytes,
        asked: StreamOptions | None,
        *,
        request_id: str,
        created: int,
        model: str,
        context: ServerContext,
    ):
        force = context.options.replies.enable_force_include_usage
        self._include_usage = force or (asked is not None and asked.include_usage)
        self.continuous_usage = asked is not None and asked.continuous_usage_stats and self._include_usage
        """Whether every chunk has the usage so far."""
        head = {
            "id": request_id,
            "object": kind,
            "created": created,
            "model": model,
            "system_fingerprint": context.fingerprint,
        }
        self._head = b"data: " + _json(head)[:-1]
        self._no_usage = b',"usage":null' if self._include_usage else b""
        self._text_head = text_head
        self._text_tail = text_tail + b',"logprobs":null,"finish_reason":null}]' + self._no_usage + b"}\n\n"

    def text(self, index: int, text: str) -> bytes:
        """A text-only chunk."""
        return b'%b,"choices":[{"index":%d%b%b%b' % (self._head, index, self._text_head, _json(text), self._text_tail)

    def chunk(
        self, choice: Mapping[str, Any], usage: Mapping[str, Any] | None = None, extra: Mapping[str, Any] | None = None
    ) -> bytes:
        """Any chunk of one choice; `extra` is added next to the choices."""
        told = self._no_usage if usage is None else b',"usage":' + _json(usage)
        return b'%b,"choices":[%b]%b%b}\n\n' % (self._head, _json(choice), told, _members(extra or {}))

    def end(self, usage: Mapping[str, Any], extra: Mapping[str, Any]) -> bytes:
        """After the last choice: a chunk with the usage, if it was asked for, and the end of the stream."""
        if not self._include_usage:
            return DONE
        return b'%b,"choices":[],"usage":%b%b}\n\n%b' % (self._head, _json(usage), _members(extra), DONE)


def _members(extra: Mapping[str, Any]) -> bytes:
    return b"".join(b',"%b":%b' % (name.encode(), _json(value)) for name, value in extra.items())
