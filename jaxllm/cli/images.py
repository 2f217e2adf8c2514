"""Images of the command line: --image FILE, and /image FILE of a conversation."""

import base64
import mimetypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxllm.cli.parser import Parser
from jaxllm.errors import ConfigError


def add_image_argument(parser: Parser, about: str) -> None:
    """`about`: which message or prompt the images go with."""
    parser.add_argument(
        "--image", action="append", default=[], metavar="FILE", help=f"{about}; give it several times for several"
    )


def read_image(path: str) -> bytes:
    """The bytes of the file. Raises ConfigError."""
    try:
        return Path(path).expanduser().read_bytes()
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"cannot read the image {path}: {getattr(error, 'strerror', None) or error}") from None


def image_part(path: str) -> dict[str, Any]:
    """The image in a file as a part of a message, in a form that files and servers take too. Raises ConfigError."""
    kind, content = mimetypes.guess_type(path)[0] or "application/octet-stream", read_image(path)
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{base64.b64encode(content).decode()}"}}


def with_images(message: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The message with images before its text."""
    if not parts:
        return dict(message)
    return {**message, "content": [*parts, {"type": "text", "text": message["content"]}]}


def text_of(message: Mapping[str, Any]) -> str:
    """A message's text, without its images."""
    content = message["content"]
    if not isinstance(content, list):
        return str(content)
    return " ".join(
        str(part.get("text", f"[{part.get('type', 'image')}]")) if isinstance(part, Mapping) else str(part) for part in content
    )
