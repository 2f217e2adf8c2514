"""Programs that a request will need, as an executor foresees them. Does not import JAX."""

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class StepLimit:
    """A limit of steps that compute items of a request."""

    num_tokens: int
    """The most that programs can compute which are there, or which the request waits for."""
    until: "Future[Any]"
    """The program of the largest steps."""


@dataclass(frozen=True)
class Foreseen:
    """Programs that a request needs and that are being made."""

    awaited: Mapping[str, "Future[Any]"] = field(default_factory=dict)
    """Programs that it waits for, by their names in the log. Each has the error if it cannot be compiled."""
    limit: StepLimit | None = None


NOTHING_AWAITED = Foreseen()
