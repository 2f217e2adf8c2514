"""Mamba-2's recurrence by the kernel and by plain JAX."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.checking.case import Case
from pallas_kernels.checking.state_space import TOLERANCE, Shapes, host_arrays, host_error, state_space_of_state
from pallas_kernels.state_space import IMPLEMENTATIONS, PLAIN, PREFERENCE

NEMOTRON_3_NANO = Shapes("bfloat16", 8, 8, 64, 128)
"""On one device."""
TINY = Shapes("float32", 2, 3, 12, 20)


def speed_cases(tiny: bool, tune: bool) -> list[Case]:
    """Steps of single tokens, a prompt, and a prompt among single tokens."""
    if tiny:
        return [_case(TINY, counts, is_timed=True) for counts in (None, (1, 9, 1))]
    steps = [*((None, num_rows) for num_rows in (8, 64, 256)), *((counts, 0) for counts in ((2048,), (*(1,) * 63, 1985)))]
    return [_case(NEMOTRON_3_NANO, counts, num_rows=num_rows, is_timed=True) for counts, num_rows in steps]


def check_cases(tiny: bool) -> list[Case]:
    """All types, odd widths, one group of a device, rows of a token and of more than a chunk."""
    if tiny:
        return [_case(TINY, counts) for counts in (None, (1, 140, 2))]
    shapes = [Shapes(dtype, 2, 8, 64, 128) for dtype in TOLERANCE]
    shapes += [Shapes("bfloat16", 1, 24, 64, 128), Shapes("float32", 3, 2, 48, 80), Shapes("bfloat16", 1, 2, 64, 256), TINY]
    return [_case(each, counts) for each in shapes for counts in (None, (1,), (200, 1, 128, 1, 65))]


def _case(shapes: Shapes, counts: tuple[int, ...] | None, *, num_rows: int = 33, is_timed: bool = False) -> Case:
    on_gpu = jax.default_backend() == "gpu"
    names = PREFERENCE if is_timed else [name for name in IMPLEMENTATIONS if name not in PLAIN]
    variants = {name: functools.partial(state_space_of_state, implementation=name, interpret=not on_gpu) for name in names}
    K, G, P, S = shapes.num_groups, shapes.group_size, shapes.head_dim, shapes.state_size
    rows, num_tokens = (num_rows, num_rows) if counts is None else (len(counts), sum(counts))

    def make() -> tuple[Any, tuple[Any, ...]]:
        return jax.device_put(host_arrays(shapes, counts, num_rows, num_padding=0 if is_timed else 3))

    what = f"{rows} single tokens" if counts is None else f"{num_tokens} tokens of {rows} rows"
    return Case(
        f"state space, {what} k{K} g{G} p{P} s{S} {shapes.dtype}",
        make,
        variants,
        host_error,
        TOLERANCE[shapes.dtype],
        bytes=8.0 * rows * K * G * P * S + jnp.dtype(shapes.dtype).itemsize * num_tokens * K * 2 * (S + G * P),
        flops=5.0 * num_tokens * K * G * P * S,
        feed=_state,
    )


def _state(state: Any, result: Any) -> Any:
    return result[1]
