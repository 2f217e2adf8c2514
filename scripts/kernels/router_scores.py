"""Routers behind a norm by the kernel and by plain JAX."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.checking.case import Case
from pallas_kernels.checking.router_scores import TOLERANCE, Shapes, case
from pallas_kernels.router_scores import PREFERENCE, triton

QWEN3_NEXT = Shapes("bfloat16", 512, 2048, weight_offset=1.0)
QWEN3_30B = Shapes("bfloat16", 128, 2048)
QWEN3_5_35B = Shapes("bfloat16", 256, 2048, weight_offset=1.0)
GPT_OSS_20B = Shapes("bfloat16", 32, 2880, eps=1e-5, has_bias=True)
DEEPSEEK_V2_LITE = Shapes("bfloat16", 64, 2048)
TINY = Shapes("float32", 5, 20, eps=1e-3)


def speed_cases(tiny: bool, tune: bool) -> list[Case]:
    """Steps of few tokens."""
    if tiny:
        return [_case(TINY, 3)]
    sizes = [(QWEN3_5_35B, num_tokens) for num_tokens in (1, 8, 16)]
    sizes += [(shapes, num_tokens) for shapes in (QWEN3_30B, GPT_OSS_20B) for num_tokens in (1, 16, 64)]
    found = [(shapes, _case(shapes, num_tokens)) for shapes, num_tokens in sizes]
    return [replace(case, variants=case.variants | _tuned(shapes)) if tune else case for shapes, case in found]


def check_cases(tiny: bool) -> list[Case]:
    """All types, odd widths, the widest."""
    if tiny:
        return [_case(TINY, 3, names=("triton",))]
    shapes = [replace(QWEN3_5_35B, dtype=dtype) for dtype in TOLERANCE]
    shapes += [QWEN3_NEXT, DEEPSEEK_V2_LITE, GPT_OSS_20B, Shapes("bfloat16", 129, 7168), Shapes("float32", 8, 8192), TINY]
    return [_case(each, num_tokens, names=("triton",)) for each in shapes for num_tokens in (1, 16)]


def _case(shapes: Shapes, num_tokens: int, names: tuple[str, ...] = PREFERENCE) -> Case:
    size = jnp.dtype(shapes.dtype).itemsize
    return case(
        shapes,
        names,
        interpret=jax.default_backend() != "gpu",
        num_tokens=num_tokens,
        num_padding=7 if num_tokens == 1 else 0,
        title=f"router scores, {num_tokens} tokens e{shapes.num_experts} d{shapes.width} {shapes.dtype}",
        bytes=float(size * shapes.width * (shapes.num_experts + num_tokens) + 4 * num_tokens * shapes.num_experts),
        flops=2.0 * num_tokens * shapes.num_experts * shapes.width,
        feed=_next,
    )


def _tuned(shapes: Shapes) -> dict[str, Any]:
    """With other numbers of experts in a program."""
    options = {"eps": shapes.eps, "weight_offset": shapes.weight_offset, "interpret": jax.default_backend() != "gpu"}
    return {f"triton, {each} experts": functools.partial(_of_blocks, block_e=each, **options) for each in (1, 4, 8)}


def _of_blocks(x: Any, weight: Any, router: Any, is_real: Any, bias: Any, **options: Any) -> Any:
    return triton.router_scores(x, weight, router, is_real, bias, **options)


def _next(x: Any, result: Any) -> Any:
    return x + (result[:, :1] * 1e-6).astype(x.dtype)
