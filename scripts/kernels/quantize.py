"""Quantisation of what products with fp8 weights take, with the norm or activation before, by the kernels and by plain JAX."""

import importlib
from dataclasses import replace

import jax

from pallas_kernels.checking.case import Case
from pallas_kernels.checking.quantize import case
from pallas_kernels.quantize import IMPLEMENTATIONS, PREFERENCE

_LLAMA_8B = (("add_norm_quantize", 4096), ("quantize", 4096), ("silu_up_quantize", 14336))


def speed_cases(tiny: bool, tune: bool) -> list[Case]:
    """Llama-3.1-8B, a decode and a prompt."""
    if tiny:
        return [_case(function, 5, 48) for function, _ in _LLAMA_8B]
    return [_case(function, num_tokens, width) for num_tokens in (16, 64, 256, 8192) for function, width in _LLAMA_8B]


def check_cases(tiny: bool) -> list[Case]:
    """Odd numbers of tokens and widths, up to the widest."""
    if tiny:
        return [_case(function, 3, 40) for function, _ in _LLAMA_8B]
    sizes = ((1, 4096), (7, 3584), (64, 8192), (261, 5120), (1031, 2880), (2, 32768))
    hidden = ((1, 14336), (9, 18944), (64, 28672), (261, 12288), (1031, 2880), (2, 32768))
    functions = [(name, sizes if name != "silu_up_quantize" else hidden) for name, _ in _LLAMA_8B]
    found = [_case(name, *size) for name, own in functions for size in own]
    return [*found, *(_case(name, 37, 1152, dtype=dtype) for dtype in ("float32", "float16") for name, _ in functions)]


def _case(function: str, num_tokens: int, width: int, *, dtype: str = "bfloat16") -> Case:
    on_gpu = jax.default_backend() == "gpu"
    options = {"platform": jax.default_backend(), "dtype": dtype, "widths": (width,), "interpret": not on_gpu}
    takes = [name for name in PREFERENCE if importlib.import_module(IMPLEMENTATIONS[name]).supports(**options)]
    found = case(function, num_tokens, width, implementations=tuple(takes), dtype=dtype, interpret=not on_gpu)
    return replace(found, make=lambda: jax.device_put(found.make()))
