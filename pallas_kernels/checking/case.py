"""One op at one shape, with what is right."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def _result(carry: Any, result: Any) -> Any:
    return result


@dataclass(frozen=True)
class Case:
    """One op at one shape. `make()` gives (carry, constants); a variant is called as variant(carry, *constants).

    Timed calls are chained: feed(carry, result) is the next carry, and the constants rotate over copies too large for the cache.
    """

    name: str
    make: Callable[[], tuple[Any, tuple[Any, ...]]]
    variants: dict[str, Callable[..., Any]]
    """By the name that is shown."""
    error: Callable[[Any, tuple[Any, ...], Any], float]
    """How far the result of a call with (carry, constants) is off; NaN is wrong too."""
    tolerance: float
    bytes: float = 0.0
    """Bytes that one call must read and write."""
    flops: float = 0.0
    feed: Callable[[Any, Any], Any] = _result
    note: str = ""
    """Note that is shown after its speed, such as what others reach."""
