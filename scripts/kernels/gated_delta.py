"""The gated delta rule by the kernel and by plain JAX."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.checking.case import Case
from pallas_kernels.checking.gated_delta import TOLERANCE, Shapes, gated_delta_of_state, host_arrays, host_error
from pallas_kernels.gated_delta import IMPLEMENTATIONS, PLAIN, PREFERENCE

QWEN3_NEXT = Shapes("bfloat16", 16, 2, 128, 128)
"""On one device."""
TINY = Shapes("float32", 2, 3, 12, 20)


def speed_cases(tiny: bool, tune: bool) -> list[Case]:
    """Steps of single tokens, a prompt, several prompts, and a prompt among single tokens."""
    if tiny:
        return [_case(TINY, counts, is_timed=True) for counts in (None, (1, 9, 1))]
    return [
        *(_case(QWEN3_NEXT, None, num_rows=num_rows, is_timed=True) for num_rows in (8, 64, 256)),
        *(_case(QWEN3_NEXT, counts, is_timed=True) for counts in ((2048,), (512,) * 8, (*(1,) * 63, 1985))),
    ]


def check_cases(tiny: bool) -> list[Case]:
    """All types, odd widths, one key head of a device, rows of a token and of more than a chunk."""
    if tiny:
        return [_case(TINY, counts) for counts in (None, (1, 70, 2))]
    shapes = [Shapes(dtype, 4, 2, 128, 128) for dtype in TOLERANCE]
    shapes += [Shapes("float32", 1, 1, 64, 64), Shapes("bfloat16", 3, 4, 96, 80), Shapes("float32", 2, 1, 256, 128), TINY]
    return [_case(each, counts) for each in shapes for counts in (None, (1,), (2,), (200, 1, 64, 1, 65), (1,) * 40 + (9,))]


def _case(shapes: Shapes, counts: tuple[int, ...] | None, *, num_rows: int = 33, is_timed: bool = False) -> Case:
    on_gpu = jax.default_backend() == "gpu"
    names = PREFERENCE if is_timed else [name for name in IMPLEMENTATIONS if name not in PLAIN]
    variants = {name: functools.partial(gated_delta_of_state, implementation=name, interpret=not on_gpu) for name in names}
    K, G, H, V = shapes.num_key_heads, shapes.group_size, shapes.key_dim, shapes.value_dim
    rows, num_tokens = (num_rows, num_rows) if counts is None else (len(counts), sum(counts))

    def make() -> tuple[Any, tuple[Any, ...]]:
        return jax.device_put(host_arrays(shapes, counts, num_rows, num_padding=0 if is_timed else 3))

    what = f"{rows} single tokens" if counts is None else f"{num_tokens} tokens of {rows} rows"
    return Case(
        f"delta, {what} k{K} g{G} h{H} v{V} {shapes.dtype}",
        make,
        variants,
        host_error,
        TOLERANCE[shapes.dtype],
        bytes=8.0 * rows * K * G * H * V + jnp.dtype(shapes.dtype).itemsize * num_tokens * K * 2 * (H + G * V),
        flops=6.0 * num_tokens * K * G * H * V,
        feed=_state,
    )


def _state(state: Any, result: Any) -> Any:
    return result[1]
