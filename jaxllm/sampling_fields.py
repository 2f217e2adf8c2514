"""Ranges and descriptions of SamplingParams' fields, for all interfaces that take them, and the checks of values.

A field with a help text (the first text of its annotation) is an option of the command line; one with `InRequests` may be
set by clients, over HTTP and gRPC.
"""

import dataclasses
import functools
import math
import numbers
import operator
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxllm.errors import InvalidRequestError


@dataclass(frozen=True)
class Range:
    """The values that a number may have; None: no limit."""

    low: float | None = None
    high: float | None = None
    low_open: bool = False
    """Whether `low` itself is refused."""


@dataclass(frozen=True, eq=False)
class InRequests:
    """Marks a field that requests to a server may set."""

    passed_on: bool = True
    """Whether the Responses and the Messages API take it too. If not, they have a field of their own for it, or none."""
    model_default: bool = False
    """Whether a model's generation_config.json may set the default."""
    neutral: tuple[Any, ...] = ()
    """Values that ask for nothing. Clients send them of their own accord, so beam search takes them, and no others."""


@dataclass(frozen=True)
class SamplingField:
    """A field as its annotation describes it."""

    type: Any
    """Without None."""
    takes_none: bool
    default: Any
    range: Range | None
    in_requests: InRequests | None

    @functools.cached_property
    def plain_default(self) -> Any:
        """The default, if it needs no check and no conversion; else what no value is."""
        return self.default if type(self.default) is self.type else object()


def read_fields(kind: type) -> dict[str, SamplingField]:
    """The fields of a dataclass by name."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {field.name: _read(hints[field.name], field.default) for field in dataclasses.fields(kind)}


def _read(annotated: Any, default: Any) -> SamplingField:
    of_type, *notes = typing.get_args(annotated) if typing.get_origin(annotated) is typing.Annotated else (annotated,)
    kinds = typing.get_args(of_type) if typing.get_origin(of_type) in (typing.Union, types.UnionType) else (of_type,)
    without_none = functools.reduce(operator.or_, (kind for kind in kinds if kind is not type(None)))
    found = {type(note): note for note in notes}
    return SamplingField(without_none, type(None) in kinds, default, found.get(Range), found.get(InRequests))


def check_plain(params: Any, fields: Mapping[str, SamplingField]) -> None:
    """Check switches and the numbers that have a range, and make the numbers Python's. Raises InvalidRequestError."""
    for name, described in fields.items():
        value = getattr(params, name)
        if value is described.plain_default or (value is None and described.takes_none):
            continue
        if (limits := described.range) is not None:
            number = (
                checked_float(name, value, limits.low, limits.high, low_open=limits.low_open)
                if described.type is float
                else checked_int(name, value, limits.low, limits.high)
            )
            setattr(params, name, number)
        elif described.type is bool and not isinstance(value, bool):
            raise wrong(name, value, "true or false")


def wrong(name: str, value: Any, must_be: str, param: str | None = None) -> InvalidRequestError:
    """The error for a value."""
    return InvalidRequestError(f"{name} is {value!r}, must be {must_be}", param or name)


def checked_int(name: str, value: Any, low: float | None = None, high: float | None = None) -> int:
    """The integer, if it is one within the limits. Raises InvalidRequestError."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise wrong(name, value, "an integer")
    number = int(value)
    if (low is not None and number < low) or (high is not None and number > high):
        raise wrong(name, number, _range_text(low, high))
    return number


def checked_float(
    name: str,
    value: Any,
    low: float | None = None,
    high: float | None = None,
    *,
    low_open: bool = False,
    param: str | None = None,
) -> float:
    """The number, if it is finite and within the limits. `param`: the field to blame, if not `name`.

    Raises InvalidRequestError.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise wrong(name, value, "a number", param)
    number = float(value)
    too_low = low is not None and (number <= low if low_open else number < low)
    if not math.isfinite(number) or too_low or (high is not None and number > high):
        must_be = _range_text(low, high, low_open) if low is not None else ""
        raise wrong(name, number, f"finite{' and ' * bool(must_be)}{must_be}" if high is None else must_be, param)
    return number


def _items(name: str, values: Any, of: str) -> list[Any]:
    if values is None:
        return []
    if isinstance(values, (str, bytes, Mapping)) or not hasattr(values, "__iter__"):
        raise wrong(name, values, f"a list of {of}")
    return list(values)


def checked_token_ids(name: str, values: Any) -> list[int]:
    """The values as a list of integers, empty for None. Raises InvalidRequestError."""
    ids = _items(name, values, "token ids")
    if set(map(type, ids)) <= {int}:
        return ids
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, numbers.Integral):
            raise InvalidRequestError(f"{name} holds {token!r}, must hold integers only", name)
    return [int(token) for token in ids]


def checked_strings(name: str, values: Any) -> list[str]:
    """The values as a list of texts that are not empty, itself empty for None. Raises InvalidRequestError."""
    strings = _items(name, values, "strings")
    for text in strings:
        if not isinstance(text, str):
            raise InvalidRequestError(f"{name} holds {text!r}, must hold strings only", name)
        if not text:
            raise InvalidRequestError(f"{name} holds an empty string, must hold strings of at least 1 character", name)
    return strings


def _range_text(low: float | None, high: float | None, low_open: bool = False) -> str:
    bounds = []
    if low is not None:
        bounds.append(f"{'above' if low_open else 'at least'} {low}")
    if high is not None:
        bounds.append(f"at most {high}")
    return " and ".join(bounds)
