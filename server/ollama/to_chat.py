"""Converts ollama's requests to the equivalent chat and completion requests."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.sampling_params import IN_REQUESTS
from server.errors import bad_request
from server.protocol.ollama import (
    LOADING,
    NEUTRAL,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaRequest,
    Options,
)

_SAME = Options.model_fields.keys() & IN_REQUESTS.keys()


def sampling_fields(body: OllamaRequest, max_tokens: str, max_model_len: int, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Request fields for `options` and `format`, over `defaults`; the maximum number of tokens is called `max_tokens`."""
    fields: dict[str, Any] = {"stream": body.stream is not False}
    if body.options is not None:
        _check(body.options)
        fields |= body.options.model_dump(include=_SAME, exclude_none=True)
        fields["repetition_penalty"] = body.options.repeat_penalty
        limit = body.options.num_predict
        # -1: unlimited, -2: up to the context length, which ends the answer in any case
        fields[max_tokens] = None if limit is None or limit < 0 else min(limit, max_model_len)
    if body.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif isinstance(body.format, dict):
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": body.format}}
    return {**defaults, **{name: value for name, value in fields.items() if value is not None}}


def _check(options: Options) -> None:
    for name, value in (options.model_extra or {}).items():
        if name not in LOADING and (name not in NEUTRAL or value != NEUTRAL[name]):
            hint = f"; it may be {NEUTRAL[name]}" if name in NEUTRAL else f"; known are {', '.join(Options.model_fields)}"
            raise bad_request(f"options has {name[:100]!r}, which is not supported{hint}", "options", "unsupported_parameter")


def chat_fields(
    body: OllamaChatRequest | OllamaGenerateRequest, max_model_len: int, defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """The fields of a chat request, over `defaults`. Raises ApiError."""
    fields = sampling_fields(body, "max_completion_tokens", max_model_len, defaults)
    if isinstance(body.think, str):
        fields["reasoning_effort"] = body.think
    if isinstance(body, OllamaGenerateRequest):
        system = [] if not body.system else [{"role": "system", "content": body.system}]
        return {**fields, "messages": [*system, {"role": "user", "content": _content(body.prompt, body.images)}]}
    if body.tools:
        fields["tools"] = body.tools
    return {**fields, "messages": _messages(body.messages)}


def _content(text: str | None, images: Sequence[str] | None) -> str | list[dict[str, Any]]:
    """The content of a message: its images stand before its text, as in ollama. They are base64, or data: URLs."""
    if not images:
        return text or ""
    urls = [image if image.startswith("data:") else f"data:image;base64,{image}" for image in images]
    return [*({"type": "image_url", "image_url": url} for url in urls), {"type": "text", "text": text or ""}]


def _messages(given: list[OllamaMessage]) -> list[dict[str, Any]]:
    """Messages in OpenAI's format. Calls have no ids here: results match calls by order."""
    found, open_ids, num_calls = [], [], 0
    for message in given:
        fields: dict[str, Any] = {"role": message.role, "content": _content(message.content, message.images)}
        if message.thinking:
            fields["reasoning"] = message.thinking
        if message.tool_calls:
            calls = []
            for call in message.tool_calls:
                num_calls += 1
                open_ids.append(f"call{num_calls:05d}")
                calls.append({**call.model_dump(exclude_none=True), "id": open_ids[-1]})
            fields["tool_calls"] = calls
        if message.role == "tool":
            fields["tool_call_id"] = open_ids.pop(0) if open_ids else "call00000"
            if message.tool_name:
                fields["name"] = message.tool_name
        found.append(fields)
    return found
