"""Decodes of linear attention by the kernel and by plain JAX."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.checking.case import Case
from pallas_kernels.checking.delta_decode import TOLERANCE, Shapes, case
from pallas_kernels.delta_decode import PREFERENCE, triton

QWEN3_NEXT = Shapes("bfloat16", 16, 2, 128, 128)
"""On one device."""
TINY = Shapes("float32", 2, 3, 12, 20, kernel_size=3, gate="sigmoid")


def speed_cases(tiny: bool, tune: bool) -> list[Case]:
    """Steps of a few rows, and of many."""
    if tiny:
        return [_case(TINY, 3, is_timed=True)]
    found = [_case(QWEN3_NEXT, num_rows, is_timed=True) for num_rows in (1, 8, 64, 256)]
    return [replace(each, variants=each.variants | _tuned(QWEN3_NEXT)) for each in found] if tune else found


def check_cases(tiny: bool) -> list[Case]:
    """All types, odd widths, one key head of a device, the widest keys, and more rows than a GPU computes at a time."""
    if tiny:
        return [_case(TINY, 3)]
    shapes = [Shapes(dtype, 16, 2, 128, 128) for dtype in TOLERANCE]
    shapes += [Shapes("float32", 1, 1, 64, 64), Shapes("bfloat16", 3, 4, 96, 80), Shapes("float32", 2, 1, 256, 64), TINY]
    return [_case(each, num_rows) for each in shapes for num_rows in (1, 33)]


def _case(shapes: Shapes, num_rows: int, *, is_timed: bool = False) -> Case:
    K, G, H, V = shapes.num_key_heads, shapes.group_size, shapes.key_dim, shapes.value_dim
    size = jnp.dtype(shapes.dtype).itemsize
    return case(
        shapes,
        PREFERENCE if is_timed else ("triton",),
        interpret=jax.default_backend() != "gpu",
        num_rows=num_rows,
        num_padding=0 if is_timed and num_rows > 1 else 7,
        title=f"delta decode, {num_rows} rows k{K} g{G} h{H} v{V} {shapes.dtype}",
        bytes=8.0 * num_rows * K * G * H * V + size * num_rows * K * (2 * H + G * V) * 7,
        flops=8.0 * num_rows * K * G * H * V,
        feed=_state,
    )


def _tuned(shapes: Shapes) -> dict[str, Any]:
    """With other numbers of warps."""
    options = {"gate": shapes.gate, "eps": shapes.eps, "interpret": jax.default_backend() != "gpu"}
    return {f"triton, {each} a warp": functools.partial(_of_warps, values_of_warp=each, **options) for each in (1024, 4096)}


def _of_warps(state: Any, conv_state: Any, *constants: Any, **options: Any) -> Any:
    *arrays, row, is_new = constants
    return triton.delta_decode(*arrays, conv_state, state, row, is_new, **options)


def _state(state: Any, result: Any) -> Any:
    return result[2]
