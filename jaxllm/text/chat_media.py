"""Takes the images and videos out of a conversation, for all APIs of chats and `LLM.chat`; templates see where they were."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxllm.errors import InvalidRequestError
from jaxllm.log import warn_once

_URL_TYPES = ("image_url", "input_image")
"""Parts whose image_url is an address, or an object with it: those of chat completions and of the Responses API."""
_OBJECT_TYPES = ("image_pil", "image")
"""Parts of scripts, with the image itself, or of `transformers`, also with its address, which may be called `url`."""
_VIDEO_TYPES = ("video_url", "video")
"""Parts that are videos: with an address, as vLLM has them, and of scripts, with the frames themselves."""
A = {"image": "an image", "video": "a video", "audio": "audio"}
MANY = {"image": "images", "video": "videos", "audio": "clips of audio"}
PARTS: Mapping[str, Mapping[str, str]] = {"image": {"type": "image"}, "video": {"type": "video"}}
"""The part that chat templates receive for an item, by its kind."""


@dataclass(frozen=True)
class MediaRef:
    """An item of a conversation: where it is, or the item itself."""

    kind: str
    """"image" or "video"."""
    source: Any
    """An address (data:, http:, https:, file:), the bytes of a file, a Pillow image, an array, frames; None: what came with this uuid."""
    uuid: str | None
    """The caller's name of the content."""
    name: str
    """Its name in errors, e.g. messages[0].content[1]."""


def split_media(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[MediaRef]]:
    """Messages in OpenAI's shape with one of PARTS in place of each image and video, for `render_chat`; and these, in their order.

    What is none of them and no text stays, and `render_chat` refuses it. Raises InvalidRequestError, whose param is the part.
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
    """The part, or one of PARTS if it is an image or a video, which is added to `found`."""
    type = _media_type(part)
    if type is None:
        return part
    kind = "video" if type in _VIDEO_TYPES else "image"
    uuid = part.get("uuid")
    if uuid is not None and not isinstance(uuid, str):
        raise InvalidRequestError(f"{name} has the uuid {uuid!r}, must be a string", name)
    key = _key(type)
    if key not in part and type in ("image", "video"):
        key = "url"
    source = _address(part, key, name) if key.endswith("url") else part.get(type)
    if source is None and uuid is None:
        raise InvalidRequestError(f"{name} has no {kind}: {_key(type)} is missing", name)
    found.append(MediaRef(kind, source, uuid, name))
    return dict(PARTS[kind])


def _media_type(part: Any) -> str | None:
    """The type of an image or a video, which vLLM lets parts leave out; None: the part is neither."""
    if not isinstance(part, Mapping):
        return None
    if "type" in part:
        return part["type"] if part["type"] in (*_URL_TYPES, *_OBJECT_TYPES, *_VIDEO_TYPES) else None
    return next((key for key in ("image_url", *_OBJECT_TYPES, *_VIDEO_TYPES) if key in part), None)


def _address(part: Mapping[str, Any], key: str, name: str) -> str | None:
    if part.get("file_id") is not None:
        raise InvalidRequestError(f"{name} has a file_id, but no images are kept here; send it as image_url", name)
    given: Any = part.get(key)
    detail = part.get("detail")
    if isinstance(given, Mapping):
        given, detail = given.get("url"), given.get("detail", detail)
    if given is not None and not isinstance(given, str):
        a = "an" if key.startswith("image") else "a"
        raise InvalidRequestError(f"{name} has {a} {key} of type {type(given).__name__}, must be a string", name)
    if detail not in (None, "auto"):
        warn_once("detail of images has no effect: their size and mm_processor_kwargs decide how many tokens they have")
    return given


def _key(type: str) -> str:
    return "image_url" if type in _URL_TYPES else type
