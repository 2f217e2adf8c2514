"""Products with weights of 4 and 8 bits: few rows against a copy, many against the products' peak, and XLA's product in bfloat16."""

import functools
from collections.abc import Callable
from dataclasses import astuple, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.checking.case import Case
from pallas_kernels.checking.quantized_matmul import (
    TOLERANCE_OF_SUMS,
    Shapes,
    bits_of,
    decoding_arrays,
    decoding_error,
    distance,
    host_arrays,
    host_error,
    tolerance,
)
from pallas_kernels.quantized_matmul import DECODERS, GROUPS, PLAIN, candidates, few, many, product
from pallas_kernels.quantized_matmul.few import SUMMED_GROUP, FewSizes
from pallas_kernels.quantized_matmul.many import ManySizes
from pallas_kernels.quantized_matmul.mosaic import FEW_ROWS
from pallas_kernels.quantized_matmul.packed import MIDDLES

INT4 = Shapes("int4", 1, 1, 128)
INT4_ZEROS = Shapes("int4", 1, 1, 128, "float16", has_zeros=True)
"""AWQ, and GPTQ with zero points."""
FP8 = Shapes("e4m3", 1, 1, None, "float32")
INT8 = Shapes("int8", 1, 1, None)
UINT8 = Shapes("uint8b128", 1, 1, 128, "float16", has_zeros=True)
"""GPTQ of 8 bits."""
NF4 = Shapes("nf4", 1, 1, 64, "float32")
"""bitsandbytes."""
NVFP4 = Shapes("e2m1", 1, 1, 16, "float8_e4m3fn", has_factor=True)
MXFP4 = Shapes("e2m1", 1, 1, 32, "uint8")
FORMATS = (INT4, INT4_ZEROS, FP8, INT8, UINT8, NVFP4, MXFP4, NF4)
QKV, OUT, GATE_UP, DOWN = LLAMA_8B = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
"""Outputs and inputs of Llama-3.1-8B's products."""
HEAD = Shapes("uint8b128", 128256, 4096, None, "float32", result="float32")
"""Its head in 8 bits."""
FEW_SIZES = {
    4: (FewSizes(4, 1, 3), FewSizes(4, 1, 5), FewSizes(2, 2, 6), FewSizes(2, 4, 4), FewSizes(2, 4, 6), FewSizes(3, 4, 4)),
    8: (FewSizes(4, 1, 2), FewSizes(2, 2, 3), FewSizes(2, 4, 3), FewSizes(3, 4, 2)),
}
MANY_SIZES = (
    *(ManySizes(4, 64, parts, 8) for parts in (1, 2, 4)),
    *(ManySizes(2, 64, parts, 12) for parts in (1, 2)),
    *(ManySizes(2, 128, parts, 7) for parts in (1, 2)),
    *(ManySizes(3, 128, parts, 4) for parts in (1, 2)),
    ManySizes(2, 256, 1, 4),
)
HEAD_SIZES = (
    *(FewSizes(2, 1, 2), FewSizes(3, 1, 2)),
    *(ManySizes(4, 64, 1, 6), ManySizes(3, 64, 1, 7), ManySizes(2, 64, 1, 9), ManySizes(2, 128, 1, 6), ManySizes(3, 128, 1, 4)),
)
"""To try; of more rows than `FEW_ROWS` of the head."""
TOY = Shapes("int4", 72, 128, 32, dtype="float32")


def speed_cases(tiny: bool, tune: bool) -> list[Case]:
    """Llama-3.1-8B's products in int4, in fp8 for few rows, and by XLA in bfloat16; gate and up in all formats."""
    if tiny:
        return [_case(TOY, 3), _dense_case((72, 128), 3, "float32")]
    found = []
    for sizes in LLAMA_8B:
        found += [_dense_case(sizes, num_rows) for num_rows in (8, 64, 256, 8192)]
        found += [_case(_of_size(INT4, sizes), num_rows, tune=tune) for num_rows in (8, 16, 64, 256, 8192)]
        found += [_case(_of_size(FP8, sizes), num_rows, tune=tune) for num_rows in (8, 16)]
    for num_rows in (8, 64, 256):
        found += [
            _dense_case((HEAD.num_outputs, HEAD.num_inputs), num_rows, result="float32"),
            _case(HEAD, num_rows, tune=tune),
        ]
    return found + [
        _case(_of_size(shapes, GATE_UP), num_rows, tune=tune)
        for shapes in FORMATS
        for num_rows in (8, 64, 8192)
        if shapes != INT4 and (shapes, num_rows) != (FP8, 8)
    ]


def check_cases(tiny: bool) -> list[Case]:
    """Every number to the bit; every format at rows around the kernels' limits; sizes of models, and those that tiles do not divide."""
    if tiny:
        return [_case(TOY, 5), _case(replace(TOY, number="e4m3", group=None), 20)]
    found = [_decoding(Shapes(number, 256, 64, None)) for number in DECODERS]
    found += [_decoding(Shapes(number, 256, 256, group)) for number in DECODERS for group in GROUPS]
    found += [_decoding(Shapes(number, 256, 256, group, has_zeros=True)) for number in MIDDLES for group in GROUPS]
    small = [_of_size(shapes, (1024, 2048)) for shapes in FORMATS]
    found += [_case(shapes, num_rows) for shapes in (small[0], small[2]) for num_rows in (7, 8, 16, 17, 127)]
    small += [replace(small[0], group=group) for group in (32, 64, 2048)]
    small += [replace(small[1], group=group, scale_type="float32") for group in (32, 64)]
    small.append(replace(small[1], group=None))
    small.append(replace(small[2], group=128))
    # The kernel for many rows where the other one would be chosen.
    found += [_many(shapes, num_rows) for shapes in (small[0], small[2]) for num_rows in (8, 24, 64)]
    found += [_case(shapes, num_rows, plain=num_rows == 9) for shapes in small for num_rows in (1, 9, 64, 257)]
    by_32 = [replace(shapes, group=32) for shapes in (INT4, INT4_ZEROS)]
    for sizes in ((2880, 2880), (200, 2880), (1000, 1536), (64, 64), (72, 96), (5120, 640), (320, 14336)):
        found += [_case(_of_size(shapes, sizes), num_rows) for shapes in (*by_32, FP8) for num_rows in (3, 16, 130)]
    found += [_divided(_of_size(shapes, (1000, 2880)), num_rows) for shapes in (*by_32, FP8) for num_rows in (8, 136)]
    found += [_case(_of_size(shapes, sizes), rows) for shapes in (INT4, FP8) for sizes in LLAMA_8B for rows in (1, 16, 257)]
    found += [
        _sums(_of_size(shapes, sizes), rows) for shapes in (INT4, INT4_ZEROS, FP8) for sizes in LLAMA_8B for rows in (8, 16)
    ]
    # A head, one device's part of it, and one that tiles do not divide.
    found += [_case(HEAD, num_rows) for num_rows in (1, 8, 64, 256)]
    return found + [_case(_of_size(HEAD, sizes), rows) for sizes in ((16032, 4096), (32040, 2880)) for rows in (7, 33, 257)]


def _of_size(shapes: Shapes, sizes: tuple[int, int]) -> Shapes:
    return replace(shapes, num_outputs=sizes[0], num_inputs=sizes[1])


def _case(shapes: Shapes, num_rows: int, *, plain: bool = False, tune: bool = False) -> Case:
    """plain: with plain JAX, too."""
    names = candidates(platform=jax.default_backend(), dtype=shapes.dtype)
    names = names if plain else names[:1]
    # Calls of a program share what is traced and compiled.
    call = functools.partial(product, dtype=shapes.result)
    variants: dict[str, Callable[..., Any]] = {name: jax.jit(functools.partial(call, implementation=name)) for name in names}
    if tune and "mosaic" in names:
        variants |= _tuned(shapes, num_rows)
    bits = bits_of(shapes.number)
    of_groups = 0 if shapes.group is None else 16 * (1 + shapes.has_zeros) / shapes.group
    return Case(
        f"quantized, {shapes}, {num_rows} rows",
        lambda: jax.device_put(host_arrays(shapes, num_rows)),
        variants,
        functools.partial(host_error, shapes),
        TOLERANCE_OF_SUMS[False] if shapes.is_exact and names[0] not in PLAIN else tolerance(shapes),
        bytes=shapes.num_outputs * shapes.num_inputs * (bits + of_groups) / 8 + _bytes_of_rows(shapes, num_rows),
        flops=2.0 * num_rows * shapes.num_outputs * shapes.num_inputs,
        feed=_feed,
    )


def _sums(shapes: Shapes, num_rows: int) -> Case:
    """The kernel for few rows with results in float32."""
    is_grouped = shapes.group == SUMMED_GROUP
    return Case(
        f"quantized, {shapes}, {num_rows} rows in float32",
        lambda: jax.device_put(host_arrays(shapes, num_rows)),
        {"mosaic": functools.partial(few.product, dtype=jnp.float32, interpret=jax.default_backend() != "gpu")},
        functools.partial(host_error, shapes),
        TOLERANCE_OF_SUMS[is_grouped],
    )


def _divided(shapes: Shapes, num_rows: int) -> Case:
    """Inputs divided between CTAs, by both kernels."""
    interpret = jax.default_backend() != "gpu"
    calls: list[Callable[..., Any]] = []
    if num_rows <= FEW_ROWS:
        calls += [functools.partial(few.product, sizes=FewSizes(*sizes)) for sizes in ((4, 2, 2), (2, 4, 2), (3, 4, 3))]
    else:
        calls += [
            functools.partial(many.product, sizes=ManySizes(*sizes)) for sizes in ((2, 72, 2, 3), (3, 96, 4, 3), (4, 64, 4, 4))
        ]
    return Case(
        f"quantized, {shapes}, {num_rows} rows divided",
        lambda: jax.device_put(host_arrays(shapes, num_rows)),
        {f"mosaic {_sizes_of(call)}": functools.partial(call, interpret=interpret) for call in calls},
        functools.partial(host_error, shapes),
        tolerance(shapes),
    )


def _many(shapes: Shapes, num_rows: int) -> Case:
    """The kernel for many rows."""
    return Case(
        f"quantized, {shapes}, {num_rows} rows as many",
        lambda: jax.device_put(host_arrays(shapes, num_rows)),
        {"mosaic": functools.partial(many.product, interpret=jax.default_backend() != "gpu")},
        functools.partial(host_error, shapes),
        tolerance(shapes),
    )


def _decoding(shapes: Shapes) -> Case:
    """Both kernels, each with a row for every input."""
    interpret = jax.default_backend() != "gpu"
    return Case(
        f"quantized, {shapes} decoded",
        lambda: jax.device_put(decoding_arrays(shapes)),
        {
            "mosaic few": functools.partial(few.product, sizes=FewSizes(2, 1, 1), interpret=interpret),
            "mosaic many": functools.partial(many.product, interpret=interpret),
        },
        functools.partial(decoding_error, shapes),
        0.0,
    )


def _dense_case(sizes: tuple[int, int], num_rows: int, dtype: str = "bfloat16", result: str | None = None) -> Case:
    N, K = sizes

    @jax.jit
    def draw() -> tuple[jax.Array, tuple[jax.Array]]:
        of_x, of_weight = jax.random.split(jax.random.key(0))
        return jax.random.normal(of_x, (num_rows, K), dtype), (jax.random.normal(of_weight, (N, K), dtype),)

    def dense(x: jax.Array, weight: jax.Array) -> jax.Array:
        return lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=result)

    def error(x: Any, constants: Any, got: Any) -> float:
        """Distance of the first row."""
        first, weight = (np.asarray(array).astype(np.float64) for array in (x[:1], constants[0]))
        return distance(np.asarray(got)[:1].astype(np.float64), first @ weight.T)

    shapes = Shapes("int8", N, K, None, dtype=dtype, result=result)
    return Case(
        f"quantized, {dtype} {N}x{K}{f' to {result}' if result else ''}, {num_rows} rows",
        draw,
        {"xla": dense},
        error,
        tolerance(shapes),
        bytes=float(jnp.dtype(dtype).itemsize * N * K) + _bytes_of_rows(shapes, num_rows),
        flops=2.0 * num_rows * N * K,
        feed=_feed,
    )


def _bytes_of_rows(shapes: Shapes, num_rows: int) -> float:
    result = jnp.dtype(shapes.result or shapes.dtype).itemsize * shapes.num_outputs
    return float(num_rows * (result + jnp.dtype(shapes.dtype).itemsize * shapes.num_inputs))


def _feed(x_TK: jax.Array, result_TN: jax.Array) -> jax.Array:
    """The next input: this one, and so little of all of the result that it stays as it is, which XLA does not know."""
    (num_rows, K), N = x_TK.shape, result_TN.shape[1]
    folded_TK = jnp.pad(result_TN, ((0, 0), (0, -N % K))).reshape(num_rows, -1, K).sum(axis=1, dtype=jnp.float32)
    return (x_TK.astype(jnp.float32) + folded_TK * 2.0**-30).astype(x_TK.dtype)


def _tuned(shapes: Shapes, num_rows: int) -> dict[str, Callable[..., Any]]:
    """The kernels with other sizes, and the one for few rows with more of them."""
    if num_rows <= FEW_ROWS:
        tried: tuple[FewSizes | ManySizes, ...] = FEW_SIZES[bits_of(shapes.number)]
    else:
        tried = HEAD_SIZES if shapes.result else MANY_SIZES
    calls = [_with_sizes(sizes, shapes) for sizes in tried if not isinstance(sizes, ManySizes) or sizes.tile_rows <= num_rows]
    return {f"mosaic {_sizes_of(call)}": jax.jit(call) for call in calls}


def _with_sizes(sizes: FewSizes | ManySizes, shapes: Shapes) -> functools.partial[Any]:
    kernel: Any = few if isinstance(sizes, FewSizes) else many
    return functools.partial(kernel.product, dtype=shapes.result, sizes=sizes)


def _sizes_of(call: Any) -> str:
    sizes = call.keywords["sizes"]
    return f"{type(sizes).__name__.removesuffix('Sizes').lower()} {'-'.join(map(str, astuple(sizes)))}"
