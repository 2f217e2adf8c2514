"""Reads the pictures at the addresses that requests give: data: URLs, files below an allowed directory, and http(s) URLs."""

import asyncio
import base64
import binascii
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from jaxllm.errors import InvalidRequestError
from jaxllm.media.fetch import MediaFetcher
from jaxllm.media.media import Media

MAX_BYTES = 20 * 2**20
"""Of the file of one picture."""
_WHITE = b" \t\r\n\f"


class Options(Protocol):
    """The options of an engine that say what may be read."""

    @property
    def allowed_media_domains(self) -> list[str] | None: ...
    @property
    def allowed_local_media_path(self) -> str | None: ...


class Reference(Protocol):
    """An item of a conversation or a prompt."""

    @property
    def kind(self) -> str: ...
    @property
    def source(self) -> Any:
        """An address, or the item itself, or None: the item that came before with the uuid."""

    @property
    def uuid(self) -> str | None: ...
    @property
    def name(self) -> str:
        """What errors call it."""


class MediaReader:
    """Reads what references name. Thread-safe. `read` is for event loops, `read_now` for scripts."""

    def __init__(self, options: Options, *, max_bytes: int = MAX_BYTES, fetcher: MediaFetcher | None = None):
        directory = options.allowed_local_media_path
        self._directory = None if directory is None else Path(directory).expanduser().resolve()
        self._max_bytes = max_bytes
        self._fetcher = fetcher or MediaFetcher(options.allowed_media_domains or (), max_bytes=max_bytes)

    def close(self) -> None:
        """End its threads."""
        self._fetcher.close()

    async def read(self, references: Sequence[Reference]) -> list[Media]:
        """The items with their contents. Raises InvalidRequestError, whose param is the name of the item, or MediaFetchError."""
        if not references:
            return []
        away = [place for place, each in enumerate(references) if _scheme(each) in ("http", "https")]
        urls, names = [references[place].source for place in away], [references[place].name for place in away]
        for url, name in zip(urls, names, strict=True):
            self._fetcher.check(url, name)  # before anything is read
        found = await asyncio.to_thread(lambda: [self._read_here(each) for each in references])
        for place, data in zip(away, await self._fetcher.fetch(urls, names), strict=True):
            found[place] = data
        return [Media(each.kind, data, each.uuid, each.name) for each, data in zip(references, found, strict=True)]

    def read_now(self, references: Sequence[Reference]) -> list[Media]:
        """`read` in a thread of its own, so that it can be called inside of an event loop too."""
        with ThreadPoolExecutor(1, "jaxllm-media") as thread:
            return thread.submit(asyncio.run, self.read(references)).result()

    def _read_here(self, reference: Reference) -> Any:
        """What a reference names on this machine; None for http(s)."""
        if not isinstance(reference.source, str):
            return reference.source
        if (scheme := _scheme(reference)) in ("http", "https"):
            return None
        if scheme == "data":
            return self._decode(reference.source, reference.name)
        if scheme == "file":
            return self._read_file(reference.source, reference.name)
        raise InvalidRequestError(
            f"{reference.name} has no address of a picture; give data:image/png;base64,… or an http or https URL", reference.name
        )

    def _decode(self, url: str, name: str) -> bytes:
        head, comma, text = url.partition(",")
        if not comma or head.rpartition(";")[2].strip().lower() != "base64":
            raise InvalidRequestError(f"{name} is a data URL without base64; give data:image/png;base64,…", name)
        if len(text) * 3 // 4 > self._max_bytes + 2:
            raise self._too_large(name)
        try:
            data = base64.b64decode(text.encode("ascii").translate(None, _WHITE), validate=True)
        except (UnicodeEncodeError, binascii.Error):
            raise InvalidRequestError(f"{name} is not valid base64", name) from None
        if not data:
            raise InvalidRequestError(f"{name} is an empty picture", name)
        return data

    def _read_file(self, url: str, name: str) -> bytes:
        if self._directory is None:
            raise InvalidRequestError(
                f"{name} is a file of the server, and none may be read (--allowed-local-media-path names a directory); send the "
                "picture itself",
                name,
            )
        try:
            parts = urlsplit(url)
            path = Path(unquote(parts.path)).resolve()
            is_below = parts.netloc in ("", "localhost") and path.is_relative_to(self._directory)
            if not is_below or not path.is_file():  # others, such as pipes, may block
                raise OSError
            with open(path, "rb") as file:
                data = file.read(self._max_bytes + 1)
        except (OSError, ValueError):
            raise InvalidRequestError(f"{name} is no readable file below --allowed-local-media-path", name) from None
        if len(data) > self._max_bytes:
            raise self._too_large(name)
        return data

    def _too_large(self, name: str) -> InvalidRequestError:
        return InvalidRequestError(f"{name} has more than {self._max_bytes} bytes; send a smaller picture", name)


def _scheme(reference: Reference) -> str:
    """How the address of an item begins; empty: it has none."""
    source = reference.source
    return source[:16].partition(":")[0].lower() if isinstance(source, str) and ":" in source[:16] else ""
