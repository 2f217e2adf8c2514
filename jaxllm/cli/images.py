"""Images, videos and audio of the command line: --image FILE, --video FILE and --audio FILE, and /image FILE … of a conversation."""

import argparse
import base64
import mimetypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxllm.cli.parser import Parser
from jaxllm.errors import ConfigError

KINDS = {"image": "sees images", "video": "sees videos", "audio": "hears"}
"""Kinds of files, and what a model does that takes them."""


def add_image_argument(parser: Parser, about: str) -> None:
    """`about`: which message or prompt the files go with."""
    for kind, does in KINDS.items():
        text = f"{kind} {about}, for a model that {does}; give it several times for several"
        parser.add_argument(f"--{kind}", action="append", default=[], metavar="FILE", help=text)


def read_image(path: str, kind: str) -> bytes:
    """The bytes of the file. Raises ConfigError."""
    try:
        return Path(path).expanduser().read_bytes()
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"cannot read the {kind} {path}: {getattr(error, 'strerror', None) or error}") from None


def image_part(path: str, kind: str) -> dict[str, Any]:
    """The image, video or audio in a file as a part of a message, in a form that files and servers take too. Raises ConfigError."""
    type, content = mimetypes.guess_type(path)[0] or "application/octet-stream", read_image(path, kind)
    return {"type": f"{kind}_url", f"{kind}_url": {"url": f"data:{type};base64,{base64.b64encode(content).decode()}"}}


def given_files(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    """Kind and path of each image, video and audio file of the command line."""
    return [(kind, path) for kind in KINDS for path in getattr(arguments, kind)]


def with_images(message: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The message with images before its text."""
    return {**message, "content": [*parts, {"type": "text", "text": message["content"]}]} if parts else dict(message)


def text_of(message: Mapping[str, Any]) -> str:
    """A message's text, without its images."""
    content = message["content"]
    if not isinstance(content, list):
        return str(content)
    return " ".join(
        str(part.get("text", f"[{part.get('type', 'image')}]")) if isinstance(part, Mapping) else str(part) for part in content
    )
