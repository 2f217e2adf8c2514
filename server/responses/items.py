"""Converts input and output items of responses to chat messages."""

from collections.abc import Mapping, Sequence
from typing import Any

from server.errors import bad_request
from server.protocol.common import RequestModel
from server.protocol.nested import parse
from server.protocol.responses import (
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    Message,
    ReasoningItem,
)
from server.responses.custom_tools import as_arguments
from server.work import Work, finish

MODELS: dict[str, type[RequestModel]] = {
    "message": Message,
    "function_call": FunctionCall,
    "function_call_output": FunctionCallOutput,
    "custom_tool_call": CustomToolCall,
    "custom_tool_call_output": CustomToolCallOutput,
    "reasoning": ReasoningItem,
}
_WITH_MEDIA = ("message", "function_call_output", "custom_tool_call_output")
ITEMS_IN_A_PIECE = 256
TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Part types that hold text, with their text field."""
_MEDIA_FIELDS = {"input_image": ("image_url", "detail", "uuid"), "input_audio": ("input_audio", "uuid")}
"""The part types of images and audio, with their fields."""


def as_items(given: str | Sequence[Any]) -> list[dict[str, Any]]:
    """Check the `input` of a request; return its items. Raises ApiError that names the item."""
    return finish(checking(given))


def checking(given: str | Sequence[Any]) -> Work[list[dict[str, Any]]]:
    """Check the `input` of a request in turns of work; return its items."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    items = []
    for place, item in enumerate(given):
        items.append(_checked(item, f"input[{place}]"))
        if place % ITEMS_IN_A_PIECE == 0:
            yield None
    return items


def _checked(item: Any, where: str) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        raise bad_request(f'{where} is no object; give items such as {{"role": "user", "content": "…"}}', param=where)
    kind = item.get("type", "message")
    model = MODELS.get(kind) if isinstance(kind, str) else None
    if model is None:
        raise bad_request(f"{where}.type is {kind!r:.80}, supported are {', '.join(MODELS)}", param=f"{where}.type")
    checked = parse(model, item, where)
    for field in ("content", "output", "summary"):
        _check_parts(getattr(checked, field, None), f"{where}.{field}", takes_media=kind in _WITH_MEDIA)
    return {"type": kind, **checked.model_dump(exclude_none=True)}


def _check_parts(parts: Any, where: str, *, takes_media: bool) -> None:
    if isinstance(parts, list):
        for place, part in enumerate(parts):
            if takes_media and _is_media(part):
                _check_media(part, f"{where}[{place}]")
            else:
                _text_of_part(part, f"{where}[{place}]")


def _is_media(part: Mapping[str, Any]) -> bool:
    kind = part.get("type")
    return isinstance(kind, str) and kind in _MEDIA_FIELDS


def _check_media(part: Mapping[str, Any], where: str) -> None:
    if part["type"] == "input_audio":
        audio = part.get("input_audio")
        if not isinstance(audio, Mapping) or not isinstance(audio.get("data"), str):
            raise bad_request(
                f'{where}.input_audio must be an object {{"data": base64, "format": "wav"}}', f"{where}.input_audio"
            )
        return
    if part.get("file_id") is not None:
        raise bad_request(
            f"{where}.file_id is not supported: no files are kept here; send the image as image_url", f"{where}.file_id"
        )
    if not isinstance(part.get("image_url"), str):
        raise bad_request(f"{where}.image_url must be a string", f"{where}.image_url")


def _text_of_part(part: Mapping[str, Any], where: str = "") -> str:
    kind = part.get("type")
    if kind in ("reasoning_text", "summary_text"):
        field = "text"
    elif isinstance(kind, str) and kind in TEXT_PARTS:
        field = TEXT_PARTS[kind]
    else:
        raise bad_request(
            f"{where}.type is {kind!r:.80}, supported are {', '.join(TEXT_PARTS)}, and {' and '.join(_MEDIA_FIELDS)} in messages and "
            "outputs of calls",
            param=f"{where}.type",
        )
    if not isinstance(part.get(field), str):
        raise bad_request(f"{where}.{field} must be a string", param=f"{where}.{field}")
    return part[field]


def text_of(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    """The text of checked content parts."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(_text_of_part(part) for part in content)


def content_of(content: str | Sequence[Mapping[str, Any]] | None) -> str | list[dict[str, Any]]:
    """Checked content parts for a chat message: their text, or the parts if there are images or audio among them."""
    if content is None or isinstance(content, str) or not any(map(_is_media, content)):
        return text_of(content)
    return [
        {name: part[name] for name in ("type", *_MEDIA_FIELDS[part["type"]]) if name in part}
        if _is_media(part)
        else {"type": "text", "text": _text_of_part(part)}
        for part in content
    ]


def as_messages(items: Sequence[Mapping[str, Any]], instructions: str | None = None) -> list[dict[str, Any]]:
    """Convert items to chat messages: consecutive reasoning, text and calls of the assistant become one message.

    Instructions join a system message at the beginning of the items, because most templates accept only one.
    """
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    for item in items:
        _ADD[item["type"]](messages, item)
    if instructions is not None and len(messages) > 1 and messages[1]["role"] in ("system", "developer"):
        messages[0:2] = [{"role": "system", "content": _joined(instructions, messages[1]["content"])}]
    return messages


def _joined(instructions: str, content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return f"{instructions}\n\n{content}"
    return [{"type": "text", "text": f"{instructions}\n\n"}, *content]


def _add_message(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    content = content_of(item["content"])
    if item["role"] != "assistant":
        messages.append({"role": item["role"], "content": content})
        return
    _assistant(messages, without=("content", "tool_calls"))["content"] = content


def _add_call(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    arguments = item["arguments"] if item["type"] == "function_call" else as_arguments(item["input"])
    function = {"name": item["name"], "arguments": arguments}
    call = {"id": item["call_id"], "type": "function", "function": function}
    _assistant(messages, without=()).setdefault("tool_calls", []).append(call)


def _add_output(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content_of(item["output"])})


def _add_reasoning(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    text = text_of(item.get("content")) or text_of(item.get("summary"))
    if text:
        _assistant(messages, without=("reasoning", "content", "tool_calls"))["reasoning"] = text


def _assistant(messages: list[dict[str, Any]], *, without: Sequence[str]) -> dict[str, Any]:
    """The last message if it is the assistant's and lacks all of these keys; else a new one."""
    if not messages or messages[-1]["role"] != "assistant" or any(name in messages[-1] for name in without):
        messages.append({"role": "assistant"})
    return messages[-1]


_ADD = {
    "message": _add_message,
    "function_call": _add_call,
    "function_call_output": _add_output,
    "custom_tool_call": _add_call,
    "custom_tool_call_output": _add_output,
    "reasoning": _add_reasoning,
}
