"""What each kernel is timed and checked on: a file per op.

`bench_kernels.py` times its `speed_cases`, `check_gpu.py` runs its `check_cases`.
To add an op: a file with both functions, each giving a list of `Case`, and a line in OPS.
"""

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

OPS = {
    "attention": "scripts.kernels.attention",
    "write": "scripts.kernels.cache_write",
    "rope": "scripts.kernels.rope_cache_write",
    "sampling": "scripts.kernels.sampling",
}
"""Each module has speed_cases(tiny, tune) and check_cases(tiny)."""


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
    """What one call must read and write."""
    flops: float = 0.0
    feed: Callable[[Any, Any], Any] = _result


def cases(kind: str, names: Iterable[str], **options: bool) -> list[tuple[str, Case]]:
    """The `speed` or `check` cases of some ops, each with its op's name."""
    found = []
    for name in names:
        if name not in OPS:
            raise SystemExit(f"no op {name!r}; there are {', '.join(OPS)}")
        module = importlib.import_module(OPS[name])
        found += [(name, case) for case in getattr(module, f"{kind}_cases")(**options)]
    return found
