"""Reads images, videos and audio at the addresses that requests give: data: URLs, files below an allowed directory, http(s) URLs."""

import asyncio
import base64
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote, urlsplit

from jaxllm.errors import InvalidRequestError
from jaxllm.media.media import Media
from jaxllm.media.options import MediaOptions

if TYPE_CHECKING:
    from jaxllm.media.fetch import MediaFetcher

PIECE_CHARACTERS = 1 << 20
"""Characters of base64 that are decoded at once; no other thread runs meanwhile."""
MAX_FRAMES = 1 << 14
"""Frames of data:video/jpeg: a body of commas would have millions, all of them empty."""
_FETCHED = ("http", "https", "file")
MAX_FILE_BYTES = 128 << 20
"""Limit of all file: addresses of a request together, whose body does not count them."""
_EXAMPLES = {"image": "data:image/png", "video": "data:video/mp4", "audio": "data:audio/wav"}
_NOUNS = {"image": "image", "video": "video", "audio": "clip of audio"}


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
        """Its name in errors."""


class MediaReader:
    """Reads what references name. Thread-safe. `read` is for event loops, `read_now` for scripts."""

    def __init__(
        self,
        options: MediaOptions,
        fetcher: "MediaFetcher | None" = None,
        on_fetched: Callable[[int], None] = lambda num_bytes: None,
    ):
        """on_fetched: called with the number of bytes that came from other hosts or from files, for each request that has some."""
        self._on_fetched = on_fetched
        directory = options.allowed_local_media_path
        self._directory = None if directory is None else Path(directory).expanduser().resolve()
        self._max_bytes = options.max_bytes
        self._fetcher = fetcher
        if fetcher is None and options.allowed_media_domains:
            from jaxllm.media.fetch import MediaFetcher  # imports an HTTP client

            self._fetcher = MediaFetcher(
                options.allowed_media_domains, max_bytes=options.max_bytes, timeout_seconds=options.mm_fetch_timeout
            )

    def close(self) -> None:
        """End its threads."""
        if self._fetcher is not None:
            self._fetcher.close()

    async def read(self, references: Sequence[Reference]) -> list[Media]:
        """The items with their contents. Raises InvalidRequestError, whose param is the name of the item, or MediaFetchError."""
        if not references:
            return []
        away = [place for place, each in enumerate(references) if is_remote(each)]
        fetched = await self._fetch([references[place] for place in away]) if away else []
        found = await asyncio.to_thread(self._read_all, references)
        for place, data in zip(away, fetched, strict=True):
            found[place] = data
        if fetched := [found[place] for place, each in enumerate(references) if _scheme(each) in _FETCHED]:
            self._on_fetched(sum(map(len, fetched)))
        return [Media(each.kind, data, each.uuid, each.name) for each, data in zip(references, found, strict=True)]

    def read_now(self, references: Sequence[Reference]) -> list[Media]:
        """Runs `read` in a separate thread, so that it can also be called inside an event loop."""
        with ThreadPoolExecutor(1, "jaxllm-media") as thread:
            return thread.submit(asyncio.run, self.read(references)).result()

    async def _fetch(self, references: Sequence[Reference]) -> list[bytes]:
        names, kinds = [each.name for each in references], [each.kind for each in references]
        if self._fetcher is None:
            raise InvalidRequestError(
                f"{names[0]} is a URL; this server fetches none (--allowed-media-domains names hosts that it may ask); send the "
                f"{kinds[0]} as data:{kinds[0]}/…;base64,…",
                names[0],
            )
        return await self._fetcher.fetch([each.source for each in references], names, kinds)

    def _read_all(self, references: Sequence[Reference]) -> list[Any]:
        found, left = [], MAX_FILE_BYTES
        for each in references:
            found.append(data := self._read_here(each))
            if _scheme(each) == "file" and (left := left - len(data)) < 0:
                raise InvalidRequestError(
                    f"the files of this request have more than {MAX_FILE_BYTES} bytes; send fewer", each.name
                )
        return found

    def _read_here(self, reference: Reference) -> Any:
        """Source of a reference that needs no network: an object, or bytes; None for http(s)."""
        if not isinstance(reference.source, str):
            return reference.source
        if is_remote(reference):
            return None
        if (scheme := _scheme(reference)) == "data":
            return self._decode(reference)
        if scheme == "file":
            return self._read_file(reference)
        kind = {"image": "an image", "video": "a video", "audio": "audio"}[reference.kind]
        raise InvalidRequestError(
            f"{reference.name} has no address of {kind}; give {_EXAMPLES[reference.kind]};base64,… or an http or https URL",
            reference.name,
        )

    def _decode(self, reference: Reference) -> bytes | list[bytes]:
        """The bytes of a file, or of each frame of data:video/jpeg."""
        name = reference.name
        head, comma, text = reference.source.partition(",")
        if not comma or head.rpartition(";")[2].strip().lower() != "base64":
            raise InvalidRequestError(f"{name} is a data URL without base64; give {_EXAMPLES[reference.kind]};base64,…", name)
        if len(text) * 3 // 4 > self._max_bytes(reference.kind) + 2:
            raise self._too_large(reference)
        is_frames = reference.kind == "video" and head[5:].partition(";")[0].strip().lower() == "video/jpeg"
        if is_frames and text.count(",") >= MAX_FRAMES:
            raise InvalidRequestError(f"{name} has more than {MAX_FRAMES} frames; send fewer", name)
        try:
            data = [_from_base64(each) for each in (text.split(",") if is_frames else (text,))]
        except ValueError:
            raise InvalidRequestError(f"{name} is not valid base64", name) from None
        if not all(data):
            raise InvalidRequestError(f"{name} is an empty {'clip of audio' if reference.kind == 'audio' else 'image'}", name)
        return data if is_frames else data[0]

    def _read_file(self, reference: Reference) -> bytes:
        name, url = reference.name, reference.source
        if self._directory is None:
            raise InvalidRequestError(
                f"{name} is a file of the server, and none may be read (--allowed-local-media-path names a directory); send the "
                f"{reference.kind} itself",
                name,
            )
        try:
            parts = urlsplit(url)
            path = Path(unquote(parts.path)).resolve()
            is_below = parts.netloc in ("", "localhost") and path.is_relative_to(self._directory)
            if not is_below or not path.is_file():  # others, such as pipes, may block
                raise OSError
            with open(path, "rb") as file:
                data = file.read(self._max_bytes(reference.kind) + 1)
        except (OSError, ValueError):
            raise InvalidRequestError(f"{name} is no readable file below --allowed-local-media-path", name) from None
        if len(data) > self._max_bytes(reference.kind):
            raise self._too_large(reference)
        return data

    def _too_large(self, reference: Reference) -> InvalidRequestError:
        most, what = self._max_bytes(reference.kind), _NOUNS[reference.kind]
        return InvalidRequestError(f"{reference.name} has more than {most} bytes; send a smaller {what}", reference.name)


def _from_base64(text: str) -> bytes:
    """Raises ValueError."""
    if any(white in text for white in " \t\r\n\f"):
        text = "".join(text.split())
    if text.find("=", 0, len(text) - 2) >= 0:
        raise ValueError("there is padding before the end")
    starts = range(0, len(text), PIECE_CHARACTERS)
    return b"".join(base64.b64decode(text[start : start + PIECE_CHARACTERS], validate=True) for start in starts)


def is_remote(reference: Reference) -> bool:
    """Whether an item is fetched from another host."""
    return _scheme(reference) in ("http", "https")


def _scheme(reference: Reference) -> str:
    """How the address of an item begins; empty: it has none."""
    source = reference.source
    return source[:16].partition(":")[0].lower() if isinstance(source, str) and ":" in source[:16] else ""
