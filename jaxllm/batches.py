"""Reads the arguments of calls that take one thing or many: prompts, conversations, parameters."""

import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxllm.errors import InvalidRequestError

Messages = Sequence[Mapping[str, Any]]
_REPORTED_FAULTS = 10


def prompt_list(prompts: Any) -> list[Any]:
    """One prompt or many as a list."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise InvalidRequestError(f"prompts is a {type(prompts).__name__}, must be a prompt or a list of prompts", "prompts")
    if prompts and isinstance(prompts[0], numbers.Integral):
        return [list(prompts)]
    return list(prompts)


def conversations(messages: Any) -> list[Messages]:
    """One conversation or many as a list."""
    is_one = isinstance(messages, (str, Mapping)) or not messages or isinstance(messages[0], Mapping)
    return [messages] if is_one else list(messages)


def each(items: Sequence[Any], make: Callable[[Any], Any], what: str) -> list[Any]:
    """Return make(item) for all items, or raise one InvalidRequestError that names all failures."""
    made, faults = [], []
    for place, item in enumerate(items):
        try:
            made.append(make(item))
        except InvalidRequestError as error:
            faults.append((place, error))
    if not faults:
        return made
    first = faults[0][1]
    if len(items) == 1:
        raise first
    text = "; ".join(f"{what} {place}: {error}" for place, error in faults[:_REPORTED_FAULTS])
    more = f"; and {len(faults) - _REPORTED_FAULTS} more" if len(faults) > _REPORTED_FAULTS else ""
    raise InvalidRequestError(
        f"{len(faults)} of {len(items)} {what}s cannot be served, none was run: {text}{more}", first.param
    )


def one_each(params: Any, count: int, name: str) -> list[Any]:
    """Expand one parameter object for all prompts, or one each, to a list of `count`."""
    if not isinstance(params, Sequence):
        return [params] * count
    if len(params) != count:
        raise InvalidRequestError(f"{name} has {len(params)} entries for {count} prompts; give one for all or one each", name)
    return list(params)
