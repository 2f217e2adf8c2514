"""A place at which failures can be injected (`jaxllm.engine.fault_points`). Packages list theirs in a module `fault_points`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Side = Literal["core", "client"]


@dataclass(frozen=True)
class Place:
    """A function in which faults can be injected."""

    side: Side
    module: str
    function: str
    """Qualified: a class's method, or a function of the module."""
    request_id: Callable[..., str | None] = lambda *args, **kwargs: None
    """Returns the id of the request, or the name of the adapter, that a call with these arguments concerns, if any."""
    corrupt: Callable[..., None] | None = None
    """Changes a bit of what a call with these arguments reads or writes, if it can."""


def flip_bit(data: memoryview) -> None:
    """Change a bit in the middle."""
    data[len(data) // 2] ^= 1
