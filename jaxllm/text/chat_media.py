"""Takes the images out of a conversation, for all APIs of chats and `LLM.chat`; templates see where they were."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxllm.errors import InvalidRequestError
from jaxllm.log import warn_once

_URL_TYPES = ("image_url", "input_image")
"""Parts whose image_url is an address, or an object with it: those of chat completions and of the Responses API."""
_OBJECT_TYPES = ("image_pil", "image")
"""Parts of scripts, with the image itself, or of `transformers`, also with its address."""
IMAGE_PART: Mapping[str, str] = {"type": "image"}
"""What chat templates see of an image."""


@dataclass(frozen=True)
class MediaRef:
    """An item of a conversation: where it is, or the item itself."""

    kind: str
    """"image"."""
    source: Any
    """An address (data:, http:, https:, file:), the bytes of a file, a Pillow image, or an array; None: what was sent with this uuid."""
    uuid: str | None
    """The caller's name of the content."""
    name: str
    """What errors call it: messages[0].content[1]."""


def split_media(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[MediaRef]]:
    """Messages in OpenAI's shape with IMAGE_PART in place of each image, for `render_chat`; and the images, in their order.

    What is neither text nor an image stays, and `render_chat` refuses it. Raises InvalidRequestError, whose param is the part.
    """
    found: list[MediaRef] = []
    split: list[Any] = []
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        return messages, found  # type: ignore[return-value]
    for number, message in enumerate(messages):
        content: Any = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, Sequence) and not isinstance(content, str):
            parts = [_taken(part, f"messages[{number}].content[{place}]", found) for place, part in enumerate(content)]
            message = {**message, "content": parts}
        split.append(message)
    return split, found


def _taken(part: Any, name: str, found: list[MediaRef]) -> Any:
    """The part, or IMAGE_PART if it is an image, which is added to `found`."""
    kind = _image_type(part)
    if kind is None:
        return part
    uuid = part.get("uuid")
    if uuid is not None and not isinstance(uuid, str):
        raise InvalidRequestError(f"{name} has the uuid {uuid!r}, must be a string", name)
    source = _address(part, name) if kind in _URL_TYPES else part.get(kind)
    if source is None and uuid is None:
        raise InvalidRequestError(f"{name} has no image: {_key(kind)} is missing", name)
    found.append(MediaRef("image", source, uuid, name))
    return dict(IMAGE_PART)


def _image_type(part: Any) -> str | None:
    """The type of an image, which vLLM lets parts leave out; None: the part is no image."""
    if not isinstance(part, Mapping):
        return None
    if "type" in part:
        return part["type"] if part["type"] in (*_URL_TYPES, *_OBJECT_TYPES) else None
    return next((key for key in ("image_url", *_OBJECT_TYPES) if key in part), None)


def _address(part: Mapping[str, Any], name: str) -> str | None:
    if part.get("file_id") is not None:
        raise InvalidRequestError(f"{name} has a file_id, but no images are kept here; send it as image_url", name)
    given: Any = part.get("image_url")
    detail = part.get("detail")
    if isinstance(given, Mapping):
        given, detail = given.get("url"), given.get("detail", detail)
    if given is not None and not isinstance(given, str):
        raise InvalidRequestError(f"{name} has an image_url of type {type(given).__name__}, must be a string", name)
    if detail not in (None, "auto"):
        warn_once("detail of images has no effect: their size and mm_processor_kwargs decide how many tokens they have")
    return given


def _key(kind: str) -> str:
    return "image_url" if kind in _URL_TYPES else kind
