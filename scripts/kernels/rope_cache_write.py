"""Norm, rope and cache write in one, by every implementation: queries near those of plain XLA, the caches near too and else untouched.

In a chain the queries take their place in the next call's projection: else plain XLA would leave their computation out. What that
copy costs counts for every variant; XLA can fuse it, a kernel cannot.
"""

import functools
import importlib
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.checking.case import Case
from pallas_kernels.checking.rope_cache_write import TOLERANCE, worst_error
from pallas_kernels.rope_cache_write import IMPLEMENTATIONS, rope_and_write


def speed_cases(tiny: bool, tune: bool) -> list[Case]:
    """A decode's and a prefill's number of tokens at the shapes of Llama-3.1-8B, and with norms at those of Qwen3."""
    if tiny:
        return [_case(5, 2, 2, 16, num_pages=8)]
    plain = [_case(tokens, 8, 4, 128, num_pages=8192) for tokens in (1, 64, 256, 8192)]
    return [*plain, _case(64, 8, 4, 64, num_pages=8192), _case(64, 8, 2, 128, num_pages=8192, norm=True)]


def check_cases(tiny: bool) -> list[Case]:
    """Odd numbers of tokens, widths and groups, with and without norms, some tokens dropped."""
    if tiny:
        return [_case(5, 2, 2, 32, num_pages=8, norm=norm) for norm in (False, True)]
    shapes = ((1, 8, 4, 128), (13, 8, 1, 64), (512, 1, 8, 256), (100, 3, 5, 80), (8192, 8, 4, 128))
    return [
        _case(*shape, num_pages=1024, norm=norm, dtype=dtype)
        for shape in shapes
        for norm, dtype in ((False, "bfloat16"), (True, "bfloat16"), (True, "float32"))
    ]


def _case(
    tokens: int, heads: int, groups: int, dim: int, *, num_pages: int, norm: bool = False, dtype: str = "bfloat16"
) -> Case:
    @jax.jit
    def make() -> tuple[Any, tuple[Any, ...]]:
        keys = iter(jax.random.split(jax.random.key(0), 8))

        def normal(*shape: int) -> jax.Array:
            return jax.random.normal(next(keys), shape, jnp.dtype(dtype))

        caches = tuple(normal(num_pages, heads, 16, dim) for _ in range(2))
        angle = jax.random.uniform(next(keys), (tokens, dim // 2), jnp.float32, 0, 2 * math.pi)
        norms = (1 + 0.1 * normal(dim), 1 + 0.1 * normal(dim)) if norm else (None, None)
        slot = np.random.default_rng(0).permutation(num_pages * 16)[:tokens]
        slot[3::7] = -1
        qkv = normal(tokens, heads, groups + 2, dim)
        return (qkv, *caches), (jnp.cos(angle), jnp.sin(angle), jnp.asarray(slot.astype(np.int32)), *norms)

    itemsize = jnp.dtype(dtype).itemsize
    on_gpu = jax.default_backend() == "gpu"
    case = {
        "dtype": jnp.dtype(dtype),
        "cache_dtype": jnp.dtype(dtype),
        "cache_size": num_pages * heads * 16 * dim,
        "head_dim": dim,
    }
    takes = {
        name: importlib.import_module(path).supports(platform=jax.default_backend(), interpret=not on_gpu, **case)
        for name, path in IMPLEMENTATIONS.items()
    }
    return Case(
        f"rope, write {tokens} tokens k{heads} g{groups} h{dim}{' norm' * norm}{'' if dtype == 'bfloat16' else ' ' + dtype}",
        make,
        {name: functools.partial(_run, name, not on_gpu) for name in IMPLEMENTATIONS if takes[name]},
        worst_error,
        TOLERANCE[dtype],
        # Queries, keys and values are read and written, the angles read.
        bytes=tokens * (2.0 * heads * (groups + 2) * dim * itemsize + 4 * dim),
        feed=lambda carry, result: (carry[0].at[:, :, :groups].set(result[0]), *result[1:]),
    )


def _run(implementation: str, interpret: bool, carry: Any, cos: Any, sin: Any, slot: Any, q_norm: Any, k_norm: Any) -> Any:
    options = {"q_norm_H": q_norm, "k_norm_H": k_norm, "implementation": implementation, "interpret": interpret}
    qkv, *caches = carry
    return rope_and_write(qkv, cos, sin, *caches, slot, **options)
