"""Paged attention on Hopper GPUs: Mosaic kernels, and those of Triton where they were measured faster (docs/PERFORMANCE.md)."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from pallas_kernels._compat import has_mosaic
from pallas_kernels.paged_attention import mosaic_prefill, triton_prefill

__all__ = ["paged_attention", "paged_decode", "supports"]

MAX_MOSAIC_DECODE_ROWS = 8
"""With more, both kernels read at the same speed or Triton's faster."""


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
    interpret: bool = False,
) -> jax.Array:
    """Rows of one token go through the decode kernel, all others through the prefill kernel: over 8-bit caches that of Triton."""
    num_tokens = q_TKGH.shape[0]
    start_R = query_start_R1[:-1]
    is_single_R = query_start_R1[1:] - start_R == 1
    options: dict[str, Any] = {"scale": scale, "window": window, "soft_cap": soft_cap, "interpret": interpret}
    single_RKGH = paged_decode(
        q_TKGH.at[start_R].get(mode="clip"),
        k_pages_PKSH,
        v_pages_PKSH,
        page_table_RB,
        jnp.where(is_single_R, kv_length_R, 0),
        k_scale=k_scale,
        v_scale=v_scale,
        **options,
    )
    arrays = (q_TKGH, k_pages_PKSH, v_pages_PKSH, page_table_RB, query_start_R1, kv_length_R)
    if k_pages_PKSH.dtype.itemsize == 1:
        out_TKGH = triton_prefill.paged_attention(*arrays, min_tokens=2, k_scale=k_scale, v_scale=v_scale, **options)
    else:
        out_TKGH = mosaic_prefill.paged_attention(*arrays, **options, min_tokens=2)
    return out_TKGH.at[jnp.where(is_single_R, start_R, num_tokens)].set(single_RKGH, mode="drop")


def paged_decode(
    q_RKGH: jax.Array,
    k_pages_PKSH: jax.Array,
    v_pages_PKSH: jax.Array,
    page_table_RB: jax.Array,
    kv_length_R: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    interpret: bool = False,
) -> jax.Array:
    """By whichever kernel was measured faster: Mosaic's for few rows of wide heads, else that of Triton."""
    num_rows, _, num_groups, head_dim = q_RKGH.shape
    # Groups of three gave wrong results on the GPU, though not interpreted; powers of two are right there.
    is_proven = num_groups.bit_count() == 1
    if num_rows <= MAX_MOSAIC_DECODE_ROWS and head_dim >= 128 and is_proven:
        # Imported late: it needs Mosaic, and `supports` has to answer where there is none.
        from pallas_kernels.paged_attention import mosaic_decode as kernels
    else:
        from pallas_kernels.paged_attention import triton_decode as kernels  # type: ignore[no-redef]

    return kernels.paged_decode(
        q_RKGH,
        k_pages_PKSH,
        v_pages_PKSH,
        page_table_RB,
        kv_length_R,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        k_scale=k_scale,
        v_scale=v_scale,
        interpret=interpret,
    )


def supports(
    *,
    platform: str,
    dtype: DTypeLike,
    num_groups: int,
    head_dim: int,
    cache_dtype: DTypeLike,
    page_size: int = 16,
    interpret: bool = False,
) -> bool:
    """Head widths: their rows fill 64-wide tiles, and transposed they are the 64 rows of a product. Groups: what registers hold."""
    if (platform != "gpu" and not interpret) or not has_mosaic():
        return False
    is_16_bit = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)
    takes_cache = jnp.dtype(cache_dtype) in (jnp.dtype(dtype), jnp.float8_e4m3fn)
    takes_heads = head_dim in (64, 128, 256) and num_groups <= 32 and num_groups * head_dim <= 4096
    return is_16_bit and takes_cache and takes_heads and page_size in (16, 32, 64, 128)
