"""Arrays on the devices of a mesh: made of others by programs that are compiled once, and deleted."""

import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
from jax.sharding import NamedSharding


def convert(
    function: Callable[..., Any], place: NamedSharding | tuple[NamedSharding, ...] | None, *arrays: Any, **static: Hashable
) -> Any:
    """`function(*arrays, **static)` in these shardings. Waits for it: else what is sent of many weights would be alive at once.

    function: of a module; each distinct shape, and not each weight, costs a program. place: None: where the arrays are.
    """
    return jax.block_until_ready(_program(function, place, tuple(static.items()))(*arrays))


@functools.lru_cache(maxsize=512)
def _program(function: Callable[..., Any], place: Any, static: tuple[tuple[str, Hashable], ...]) -> Callable[..., Any]:
    options = {} if place is None else {"out_shardings": place}
    return jax.jit(functools.partial(function, **dict(static)), **options)


def delete(arrays: Any) -> None:
    """Release the device memory of a tree of arrays at once, even if references to them remain."""
    for array in jax.tree.leaves(arrays):
        if isinstance(array, jax.Array) and not array.is_deleted():
            array.delete()
