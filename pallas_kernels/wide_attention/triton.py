"""Attention with wide heads by Pallas-Triton, for a decode and for a ragged batch."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels._compat import triton_converts_fp8
from pallas_kernels.paged_attention.ragged import by_row_length
from pallas_kernels.wide_attention import prompts
from pallas_kernels.wide_attention.decode import paged_decode

__all__ = ["paged_attention", "paged_decode", "supports"]

WIDEST, MOST_GROUPS = 512, 32
_COMPUTED = (jnp.float32, jnp.bfloat16, jnp.float16)


def paged_attention(*arrays: jax.Array, tiles: prompts.PromptTiles | None = None, **options: Any) -> jax.Array:
    """See `paged_attention.paged_attention`. tiles: those of rows of more than a token."""
    prefill = partial(prompts.paged_attention, tiles=tiles, **options)
    return by_row_length(partial(paged_decode, **options), prefill, *arrays)


def supports(
    *,
    platform: str,
    dtype: DTypeLike,
    num_groups: int,
    head_dim: int,
    cache_dtype: DTypeLike,
    has_sinks: bool = False,
    has_part: bool = False,
    interpret: bool = False,
    **_: object,
) -> bool:
    if (platform != "gpu" and not interpret) or has_sinks or has_part:
        return False
    cache_fits = jnp.dtype(cache_dtype) in _COMPUTED or (jnp.dtype(cache_dtype) == jnp.float8_e4m3fn and triton_converts_fp8())
    return jnp.dtype(dtype) in _COMPUTED and cache_fits and num_groups <= MOST_GROUPS and 16 <= head_dim <= WIDEST
