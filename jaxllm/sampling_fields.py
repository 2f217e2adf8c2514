"""What the fields of SamplingParams say of themselves in their annotations, for all interfaces that take them.

A field with a help text (the first text of its annotation) is an option of the command line; one with `InRequests` may be
set by clients, over HTTP and gRPC.
"""

import dataclasses
import functools
import operator
import types
import typing
from dataclasses import dataclass
from typing import Any


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
