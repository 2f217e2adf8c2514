"""Low-rank changes by the kernels and by plain JAX."""

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.checking.case import Case
from pallas_kernels.checking.lora import TOLERANCE, Shapes, host_arrays, host_error, run
from pallas_kernels.lora import IMPLEMENTATIONS, PLAIN, Parts

PRODUCTS = {
    "qkv": (4096, Parts(8, (4, 1, 1), 128)),
    "out": (4096, Parts(1, (1,), 4096)),
    "gate_up": (4096, Parts(1, (1, 1), 14336)),
    "down": (14336, Parts(1, (1,), 4096)),
}
"""Of Llama-3.1-8B."""


def speed_cases(tiny: bool, tune: bool) -> list[Case]:
    """The products of a layer of Llama-3.1-8B, from a token to a prompt."""
    if tiny:
        return [_case("toy", Shapes("bfloat16", 2, 8, 32, Parts(1, (1, 1), 24)), 5, is_timed=True)]
    return [
        _case(name, Shapes("bfloat16", 8, 16, width, parts), num_tokens, is_timed=True)
        for num_tokens in (1, 64, 256, 2048)
        for name, (width, parts) in PRODUCTS.items()
    ]


def check_cases(tiny: bool) -> list[Case]:
    """All types, ranks from 8 to 256, one slot and many, a token and many, odd widths."""
    if tiny:
        return [_case("toy", Shapes("float32", 3, 8, 40, Parts(2, (2, 1), 12)), 6)]
    odd = Parts(3, (2, 1, 1), 40)
    rows = (
        ("qkv", "bfloat16", 1, 8, (1, 2048)),
        ("qkv", "bfloat16", 8, 16, (1, 8, 64, 256, 2048)),
        ("qkv", "float16", 16, 64, (8, 64)),
        ("qkv", "bfloat16", 1, 256, (64,)),
        ("out", "bfloat16", 64, 16, (33,)),
        ("out", "float32", 8, 16, (1, 64, 1000)),
        ("out", "bfloat16", 2, 512, (5, 300)),
        ("gate_up", "bfloat16", 8, 16, (1, 64, 2048)),
        ("gate_up", "bfloat16", 16, 64, (256,)),
        ("down", "bfloat16", 16, 64, (1, 8, 2048)),
        ("down", "bfloat16", 8, 16, (64,)),
    )
    found = [
        _case(name, Shapes(dtype, num_slots, rank, PRODUCTS[name][0], PRODUCTS[name][1]), num_tokens)
        for name, dtype, num_slots, rank, counts in rows
        for num_tokens in counts
    ]
    for num_tokens in (1, 64, 256, 2048):
        found.append(_case("odd", Shapes("float32", 8, 8, 200, odd), num_tokens))
        found.append(_case("odd", Shapes("bfloat16", 3, 32, 200, odd, adapter_dtype="float32"), num_tokens))
    return found


def _case(name: str, shapes: Shapes, num_tokens: int, *, is_timed: bool = False) -> Case:
    on_gpu, parts = jax.default_backend() == "gpu", shapes.parts
    takes = [
        implementation
        for implementation, path in IMPLEMENTATIONS.items()
        if (implementation not in PLAIN or (is_timed and implementation == "xla"))
        and importlib.import_module(path).supports(platform=jax.default_backend(), dtype=shapes.dtype, interpret=not on_gpu)
    ]
    variants = {key: functools.partial(run, parts=parts, implementation=key, interpret=not on_gpu) for key in takes}

    def make() -> tuple[Any, tuple[Any, ...]]:
        return jax.device_put(host_arrays(shapes, num_tokens, shapes.num_slots))

    itemsize = jnp.dtype(shapes.dtype).itemsize
    rows = parts.num_modules * shapes.rank
    values = num_tokens * (shapes.width + 2 * parts.num_columns)
    values += min(shapes.num_slots, num_tokens) * (rows * shapes.width + shapes.rank * parts.num_columns)
    return Case(
        f"lora {name}, {num_tokens} tokens s{shapes.num_slots} r{shapes.rank} {shapes.dtype}",
        make,
        variants,
        functools.partial(host_error, parts=parts),
        TOLERANCE[shapes.dtype],
        bytes=float(itemsize * values),
        flops=2.0 * num_tokens * (rows * shapes.width + shapes.rank * parts.num_columns),
        feed=_halved,
    )


def _halved(y: jax.Array, result: jax.Array) -> jax.Array:
    """Half of the sum, which stays finite."""
    return result * jnp.asarray(0.5, result.dtype)
