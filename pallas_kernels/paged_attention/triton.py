"""Paged attention by Pallas-Triton, for a decode and for a ragged batch. Deprecated in JAX 0.11: nothing else depends on it."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from pallas_kernels._compat import triton_converts_fp8
from pallas_kernels.paged_attention import triton_prefill
from pallas_kernels.paged_attention.parts import Part
from pallas_kernels.paged_attention.ragged import by_row_length
from pallas_kernels.paged_attention.triton_decode import paged_decode

__all__ = ["paged_attention", "paged_decode", "supports"]


def paged_attention(
    q_TKGH: jax.Array,
    k_pages_PKSH: jax.Array,
    v_pages_PKSH: jax.Array,
    page_table_RB: jax.Array,
    query_start_R1: jax.Array,
    kv_length_R: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    sinks_KG: jax.Array | None = None,
    part: Part | None = None,
    interpret: bool = False,
) -> Any:
    options = {
        "scale": scale,
        "window": window,
        "soft_cap": soft_cap,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "sinks_KG": sinks_KG,
        "part": part,
        "interpret": interpret,
    }
    decode, prefill = partial(paged_decode, **options), partial(triton_prefill.paged_attention, **options)  # type: ignore[arg-type]
    return by_row_length(decode, prefill, q_TKGH, k_pages_PKSH, v_pages_PKSH, page_table_RB, query_start_R1, kv_length_R)


def supports(
    *,
    platform: str,
    dtype: DTypeLike,
    num_groups: int,
    head_dim: int,
    cache_dtype: DTypeLike,
    interpret: bool = False,
    **_: object,
) -> bool:
    if platform != "gpu" and not interpret:
        return False
    wide = (jnp.float32, jnp.bfloat16, jnp.float16)
    cache_fits = jnp.dtype(cache_dtype) in wide or (jnp.dtype(cache_dtype) == jnp.float8_e4m3fn and triton_converts_fp8())
    return jnp.dtype(dtype) in wide and cache_fits and num_groups <= 64 and 16 <= head_dim <= 256
