"""Checks how many entries and characters the fields of a body have, before their values are validated.

The limits are those of the models' fields (`Field(max_length=…)`), and what follows from the served model.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from annotated_types import MaxLen
from pydantic import AliasChoices
from pydantic.fields import FieldInfo

from server.errors import ApiError, bad_request
from server.protocol.common import RequestModel

_CONVERSATIONS = ("messages", "input", "documents")
_IN_MESSAGES = ("content", "tool_calls", "output")


class BodyLimits(NamedTuple):
    """Limits of the served model."""

    max_model_len: int
    """No conversation has more messages, parts of messages and tool calls than this: each takes a token."""
    vocab_size: int
    """No list of token ids that may be sampled has more entries."""


NO_LIMITS = BodyLimits(1 << 62, 1 << 62)


def check_sizes(body: Mapping[str, Any], model: type[RequestModel], limits: BodyLimits) -> None:
    """Raise ApiError for a field with too many entries or characters."""
    lengths, conversations = max_lengths(model), _conversations(model)
    for name, value in body.items():
        if (most := lengths.get(name)) is not None:
            _check(value, name, most)
        elif name in conversations and isinstance(value, list) and value and isinstance(value[0], (dict, list)):
            _check_conversation(value, name, limits.max_model_len)
        elif name == "allowed_token_ids":
            _check(value, name, limits.vocab_size, "the size of the vocabulary")


def _check(value: Any, name: str, most: int, why: str = "") -> None:
    if isinstance(value, (str, list, dict)) and len(value) > most:
        noun = "characters" if isinstance(value, str) else "entries"
        raise bad_request(f"{name} has {len(value)} {noun}, at most {most} are possible{', ' * bool(why)}{why}", name)


def _check_conversation(value: list[Any], name: str, most: int) -> None:
    """Count messages with their parts and calls; of each conversation, if there are several."""
    if isinstance(value[0], list):
        for each in value:
            if isinstance(each, list) and each and isinstance(each[0], dict):
                _check_conversation(each, name, most)
        return
    count = len(value)
    for message in value:
        if isinstance(message, dict):
            count += sum(len(parts) for field in _IN_MESSAGES if isinstance(parts := message.get(field), list))
    if count > most:
        raise too_many(count, name, most)


def too_many(count: int, name: str, max_model_len: int) -> ApiError:
    """The error for a conversation that has more entries than the context has tokens."""
    return bad_request(
        f"{name} has {count} entries, with parts and calls; this model's maximum context length is {max_model_len} tokens; shorten it",
        name,
        "context_length_exceeded",
    )


@functools.cache
def _conversations(model: type[RequestModel]) -> tuple[str, ...]:
    """The fields of a model that may hold a conversation; documents are a part of one."""
    has_one = "messages" in model.model_fields or "input" in model.model_fields
    return _CONVERSATIONS if has_one else ()


@functools.cache
def max_lengths(model: type[RequestModel]) -> dict[str, int]:
    """The maximum length of each field of a model that has one, by all its names."""
    found = {}
    for name, field in model.model_fields.items():
        if (most := _max_length(field)) is not None:
            others = field.validation_alias.choices if isinstance(field.validation_alias, AliasChoices) else [field.alias]
            found.update(dict.fromkeys((name, *(other for other in others if isinstance(other, str))), most))
    return found


def _max_length(field: FieldInfo) -> int | None:
    """The limit of a field, or of its value other than null."""
    for part in (field, *_choices(field.annotation)):
        notes = part.metadata if isinstance(part, FieldInfo) else getattr(part, "__metadata__", ())
        for note in notes:
            for each in note.metadata if isinstance(note, FieldInfo) else (note,):
                if isinstance(each, MaxLen):
                    return each.max_length
    return None


def _choices(annotation: Any) -> tuple[Any, ...]:
    return getattr(annotation, "__args__", ()) if not hasattr(annotation, "__metadata__") else (annotation,)
