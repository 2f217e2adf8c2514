"""Takes images, videos and audio out of a conversation, for all APIs of chats and `LLM.chat`; templates see where they were."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxllm.errors import InvalidRequestError
from jaxllm.log import warn_once

_KINDS = {
    **dict.fromkeys(("image_url", "input_image", "image_pil", "image"), "image"),
    **dict.fromkeys(("video_url", "video"), "video"),
    **dict.fromkeys(("audio_url", "input_audio", "audio"), "audio"),
}
"""The kind of an item by the type of its part. Types that end in _url have an address, or an object with it, as chat completions and vLLM
have them; input_image is that of the Responses API, input_audio has base64 and its format. The others are of scripts, with the item
itself, or its address, as `transformers` has it, which may be called `url`."""
A = {"image": "an image", "video": "a video", "audio": "audio"}
MANY = {"image": "images", "video": "videos", "audio": "clips of audio"}
PARTS: Mapping[str, Mapping[str, str]] = {
    "image": {"type": "image"},
    "video": {"type": "video"},
    "audio": {"type": "audio", "audio": ""},
}
"""The part that chat templates receive for an item, by its kind. Those of Qwen 2 Audio look for the key audio."""


@dataclass(frozen=True)
class MediaRef:
    """An item of a conversation: where it is, or the item itself."""

    kind: str
    """"image", "video" or "audio"."""
    source: Any
    """An address (data:, http:, https:, file:), the bytes of a file, a Pillow image, an array, frames, samples; None: what came with
    this uuid."""
    uuid: str | None
    """The caller's name of the content."""
    name: str
    """Its name in errors, e.g. messages[0].content[1]."""


def split_media(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[MediaRef]]:
    """Messages in OpenAI's shape with one of PARTS in place of each item, for `render_chat`; and these, in their order.

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
    """The part, or one of PARTS if it is an item, which is added to `found`."""
    type = _media_type(part)
    if type is None:
        return part
    kind = _KINDS[type]
    uuid = part.get("uuid")
    if uuid is not None and not isinstance(uuid, str):
        raise InvalidRequestError(f"{name} has the uuid {uuid!r}, must be a string", name)
    key = called = "image_url" if type == "input_image" else type
    if key not in part and type in ("image", "video", "audio"):
        key = "url"
    source: Any
    if key == "input_audio":
        source = _inline(part.get(key), name)
    else:
        source = _address(part, key, name) if key.endswith("url") else part.get(type)
    if source is None and uuid is None:
        raise InvalidRequestError(f"{name} has no {kind}: {called} is missing", name)
    found.append(MediaRef(kind, source, uuid, name))
    return dict(PARTS[kind])


def _media_type(part: Any) -> str | None:
    """The type of an item's part, which vLLM lets parts leave out; None: the part has none."""
    if not isinstance(part, Mapping):
        return None
    if "type" in part:
        return part["type"] if isinstance(part["type"], str) and part["type"] in _KINDS else None
    return next((type for type in _KINDS if type in part), None)


def _inline(given: Any, name: str) -> str | None:
    """The address of the audio in an input_audio. What its format is, the content says."""
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise InvalidRequestError(
            f'{name} has an input_audio of type {type(given).__name__}, must be an object {{"data": base64, "format": "wav"}}',
            name,
        )
    data, format = given.get("data"), given.get("format", "wav")
    if data is None:
        return None
    if not isinstance(data, str) or not isinstance(format, str):
        raise InvalidRequestError(f"{name} has an input_audio whose data or format is no string; data is base64", name)
    return f"data:audio/{format.partition(',')[0]};base64,{data}"


def _address(part: Mapping[str, Any], key: str, name: str) -> str | None:
    if part.get("file_id") is not None:
        raise InvalidRequestError(f"{name} has a file_id, but no images are kept here; send it as {key}", name)
    given: Any = part.get(key)
    detail = part.get("detail")
    if isinstance(given, Mapping):
        given, detail = given.get("url"), given.get("detail", detail)
    if given is not None and not isinstance(given, str):
        a = "an" if key.startswith(("image", "audio")) else "a"
        raise InvalidRequestError(f"{name} has {a} {key} of type {type(given).__name__}, must be a string", name)
    if detail not in (None, "auto"):
        warn_once("detail of images has no effect: their size and mm_processor_kwargs decide how many tokens they have")
    return given
