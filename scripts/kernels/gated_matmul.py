"""Gate, up and the activation of dense layers in one kernel, and as XLA computes them: a product, and a pass over its result."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.checking.case import Case
from pallas_kernels.checking.gated_matmul import Shapes, case, next_tokens
from pallas_kernels.gated_matmul import PREFERENCE
from pallas_kernels.quantize.values import Sums

LLAMA_8B = Shapes("bfloat16", 4096, 14336)
LLAMA_8B_OF_FOUR = replace(LLAMA_8B, hidden=3584)
"""Its part on one of four devices."""
LLAMA_1B = Shapes("bfloat16", 2048, 8192)
GEMMA_12B = Shapes("bfloat16", 3840, 15360, "gelu_tanh")
SHARED_EXPERTS = Shapes("bfloat16", 2048, 2816)
"""DeepSeek-V2-Lite's."""
LLAMA_8B_FP8 = replace(LLAMA_8B, is_scaled=True)
TINY = Shapes("bfloat16", 64, 192)


def speed_cases(tiny: bool, tune: bool) -> list[Case]:
    """Prompts, and decodes of many rows."""
    if tiny:
        return [_case(TINY, 5)]
    found = [_case(LLAMA_8B, num_tokens) for num_tokens in (256, 512, 768, 1024, 1280, 1536, 2048, 3072, 8192)]
    found += [_case(LLAMA_8B_FP8, num_tokens) for num_tokens in (256, 1024, 3072, 8192)]
    return found + [_case(each, 8192) for each in (LLAMA_8B_OF_FOUR, LLAMA_1B, GEMMA_12B, SHARED_EXPERTS)]


def check_cases(tiny: bool) -> list[Case]:
    """Odd numbers of tokens, outputs that blocks do not divide, both activations and types."""
    if tiny:
        return [_case(TINY, 5, names=("mosaic",))]
    shapes = (
        LLAMA_1B,
        GEMMA_12B,
        LLAMA_8B_OF_FOUR,
        Shapes("float16", 512, 1344),
        Shapes("bfloat16", 64, 128),
        Shapes("bfloat16", 128, 2112, "gelu_tanh"),
        LLAMA_8B_FP8,
        Shapes("bfloat16", 128, 128, is_scaled=True),
        Shapes("bfloat16", 1152, 384, "gelu_tanh", is_scaled=True),
    )
    return [_case(each, num_tokens, names=("mosaic",)) for each in shapes for num_tokens in (1, 128, 261, 1031)]


def _case(shapes: Shapes, num_tokens: int, names: tuple[str, ...] = PREFERENCE) -> Case:
    size, out_size = 1 if shapes.is_scaled else jnp.dtype(shapes.dtype).itemsize, jnp.dtype(shapes.dtype).itemsize
    found = case(
        shapes,
        num_tokens,
        names,
        interpret=jax.default_backend() != "gpu",
        bytes=float(size * shapes.width * (num_tokens + 2 * shapes.hidden) + out_size * num_tokens * shapes.hidden),
        flops=4.0 * num_tokens * shapes.width * shapes.hidden,
        feed=next_tokens,
    )
    variants = found.variants | (
        {"xla": functools.partial(_apart_of_fp8 if shapes.is_scaled else _apart, shapes.activation)} if "xla" in names else {}
    )
    return replace(found, variants=variants, make=lambda: jax.device_put(found.make()))


def _apart(activation: str, x_TD: jax.Array, weight_D2F: jax.Array) -> Any:
    """As layers without the kernel have it."""
    sums_T2F = jnp.tensordot(x_TD, weight_D2F, 1)
    return (jax.nn.silu if activation == "silu" else jax.nn.gelu)(sums_T2F[:, 0]) * sums_T2F[:, 1]


def _apart_of_fp8(activation: str, values_TD: jax.Array, scale_T: Any, weight_2FD: jax.Array, scale_2F: Any) -> Any:
    sums_T2F = jax.lax.dot_general(values_TD, weight_2FD, (((1,), (2,)), ((), ())), preferred_element_type=jnp.bfloat16)
    sums_T2F = Sums(sums_T2F, scale_T, scale_2F).scaled(jnp.float32)
    return ((jax.nn.silu if activation == "silu" else jax.nn.gelu)(sums_T2F[:, 0]) * sums_T2F[:, 1]).astype(jnp.bfloat16)
