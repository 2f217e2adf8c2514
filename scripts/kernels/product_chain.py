"""The dense layers between two attentions, for few rows: one kernel against XLA's products, both against a copy of the weights."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.checking.case import Case
from pallas_kernels.checking.product_chain import Shapes, case, layers_case
from pallas_kernels.product_chain import candidates

LLAMA_1B = Shapes(2048, 8192, 2048, 3072)
LLAMA_8B = Shapes(4096, 14336, 4096, 6144)
QWEN3_600M = Shapes(1024, 3072, 2048, 4096)
TOY = Shapes(128, 256, 128, 256)


def speed_cases(tiny: bool, tune: bool) -> list[Case]:
    """A layer from a row to 64, layers one after the other, and parts of one: the MLP, with the projection before or after it."""
    if tiny:
        return [_case(TOY, 3)]
    found = [_case(shapes, rows) for shapes in (LLAMA_1B, LLAMA_8B, QWEN3_600M) for rows in (1, 8, 16, 32, 64)]
    found += [_layers_case(LLAMA_1B, rows, 4) for rows in (1, 16, 64)]
    return found + [_case(each, 16) for each in _parts(LLAMA_1B)]


def check_cases(tiny: bool) -> list[Case]:
    """First the smallest, each with one product more; then rows around the kernel's limits, odd widths, models."""
    if tiny:
        return [_case(TOY, 5), _case(replace(TOY, of_heads=None, qkv=None), 1), _layers_case(TOY, 2, 2)]
    small = Shapes(256, 256, 384, 384)
    found = [_case(each, rows) for each in (*_parts(small), small) for rows in (1, 16)]
    found += [_case(small, rows) for rows in (2, 7, 8, 9, 13, 17, 24, 31, 32, 33, 57, 63, 64)]
    found += [_layers_case(small, rows, 3) for rows in (1, 16)]
    odd = (
        Shapes(128, 128, 128, 128),
        Shapes(896, 4864, 896, 1152),
        Shapes(1152, 6912, 1024, 1536),
        Shapes(5120, 256, 640, 640),
    )
    found += [_case(shapes, rows) for shapes in odd for rows in (1, 5, 16, 40)]
    found += [_case(each, rows) for each in _parts(LLAMA_1B) for rows in (1, 16)]
    return found + [_case(shapes, rows) for shapes in (LLAMA_1B, QWEN3_600M, LLAMA_8B) for rows in (1, 4, 8, 16, 32, 64)]


def _parts(shapes: Shapes) -> tuple[Shapes, ...]:
    mlp = replace(shapes, of_heads=None, qkv=None)
    return mlp, replace(shapes, qkv=None), replace(shapes, of_heads=None)


def _case(shapes: Shapes, num_rows: int) -> Case:
    return _on_device(case(shapes, num_rows, _implementations(shapes, num_rows)))


def _layers_case(shapes: Shapes, num_rows: int, num_layers: int) -> Case:
    return _on_device(layers_case(shapes, num_rows, num_layers, _implementations(shapes, num_rows)))


def _on_device(found: Case) -> Case:
    return replace(found, make=lambda: jax.device_put(found.make()), feed=_feed)


def _implementations(shapes: Shapes, num_rows: int) -> dict[str, bool]:
    """By name, whether it is interpreted."""
    widths = [shapes.of_heads or shapes.width, shapes.width, shapes.hidden, *([shapes.qkv] if shapes.qkv else [])]
    names = candidates(platform=jax.default_backend(), dtype=shapes.dtype, num_rows=num_rows, widths=widths)
    return dict.fromkeys(names, jax.default_backend() != "gpu")


def _feed(x_TA: jax.Array, result: Any) -> jax.Array:
    """The next input: this one, and so little of the results that it stays as it is, which XLA does not know."""
    (num_rows, A), added = x_TA.shape, jnp.zeros_like(x_TA, jnp.float32)
    for each in result:
        if each is not None:
            wide = jnp.pad(each, ((0, 0), (0, -each.shape[1] % A))).reshape(num_rows, -1, A)
            added += wide.sum(axis=1, dtype=jnp.float32)
    return (x_TA.astype(jnp.float32) + added * 2.0**-30).astype(x_TA.dtype)
