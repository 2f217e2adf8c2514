"""Paged attention on Hopper GPUs: Mosaic kernels, and those of Triton where they were measured faster (docs/PERFORMANCE.md)."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from pallas_kernels.paged_attention import mosaic_prefill, triton_prefill
from pallas_kernels.paged_attention.parts import Part
from pallas_kernels.paged_attention.ragged import by_row_length

__all__ = ["paged_attention", "paged_decode", "supports"]

MAX_MOSAIC_DECODE_ROWS = 8
"""With more rows of about equal length both kernels read at the same speed or Triton's faster."""
MAX_UNEVEN_ROWS, LONG_ROW = 64, 16384
"""So many rows, if they may have so many keys, are Mosaic's too: it gives each core an even share of all keys. One row of 65536 beside
15 of 1024 takes 107 us, and 716 in the parts of a row that Triton's programs have (one H200, 8 KV heads). Even rows take 2 to 6 % longer
from 8192 keys on, and more where they are short, which a whole step of 64 rows with 1024 keys does not show."""


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
    options: dict[str, Any] = {"scale": scale, "window": window, "soft_cap": soft_cap}
    options |= {"sinks_KG": sinks_KG, "part": part, "interpret": interpret}
    scales: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale}
    if k_pages_PKSH.dtype.itemsize == 1:
        prefill = partial(triton_prefill.paged_attention, **options, **scales)
    else:
        prefill = partial(mosaic_prefill.paged_attention, **options)
    decode = partial(paged_decode, **options, **scales)
    return by_row_length(decode, prefill, q_TKGH, k_pages_PKSH, v_pages_PKSH, page_table_RB, query_start_R1, kv_length_R)


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
    sinks_KG: jax.Array | None = None,
    num_queries: int = 1,
    part: Part | None = None,
    interpret: bool = False,
) -> Any:
    """By whichever kernel was measured faster, see `takes_mosaic`; that of Triton also takes parts."""
    num_slots = page_table_RB.shape[1] * k_pages_PKSH.shape[2]
    longest = num_slots if window is None else min(window, num_slots)
    if part is None and takes_mosaic(len(kv_length_R), longest, q_RKGH.shape[3], num_queries):
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
        sinks_KG=sinks_KG,
        num_queries=num_queries,
        **({} if part is None else {"part": part}),  # type: ignore[arg-type]
        interpret=interpret,
    )


def takes_mosaic(num_rows: int, longest: int, head_dim: int, num_queries: int = 1) -> bool:
    """Whether a decode goes through the Mosaic kernel. longest: keys that a row may have at most."""
    is_uneven = num_rows <= MAX_UNEVEN_ROWS and longest >= LONG_ROW and num_queries == 1
    return head_dim >= 128 and (num_rows <= MAX_MOSAIC_DECODE_ROWS or is_uneven)


def supports(
    *,
    platform: str,
    dtype: DTypeLike,
    num_groups: int,
    head_dim: int,
    cache_dtype: DTypeLike,
    page_size: int = 16,
    interpret: bool = False,
    **_: object,
) -> bool:
    """What both Mosaic kernels take. Groups: what registers hold. An 8-bit cache: the prefill then is Triton's."""
    if not mosaic_prefill.supports(
        platform=platform, dtype=dtype, num_groups=num_groups, head_dim=head_dim, page_size=page_size, interpret=interpret
    ):
        return False
    from pallas_kernels.paged_attention.mosaic_decode import PAGE_SIZES

    takes_cache = jnp.dtype(cache_dtype) in (jnp.dtype(dtype), jnp.float8_e4m3fn)
    return takes_cache and num_groups <= 32 and num_groups * head_dim <= 4096 and page_size in PAGE_SIZES
