"""Paged attention on Hopper GPUs: Mosaic kernels, and those of Triton where they were measured faster (docs/PERFORMANCE.md)."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from pallas_kernels.paged_attention import mosaic_prefill, triton_decode, triton_prefill
from pallas_kernels.paged_attention.parts import Part
from pallas_kernels.paged_attention.ragged import by_row_length

__all__ = ["paged_attention", "paged_decode", "supports"]

MAX_MOSAIC_DECODE_ROWS, MAX_NARROW_DECODE_ROWS, MAX_ROWS_OF_THREE_WORKERS = 8, 128, 512
"""With more, both kernels read at the same speed or Triton's faster: of caches of the queries' type, and of 8 bits, where 64 and 256 rows
were measured, by two CTAs of a core and by three workers of a CTA."""


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
    takes_cache = k_pages_PKSH.dtype.itemsize > 1 or q_TKGH.shape[3] <= mosaic_prefill.MAX_NARROW_WIDTH
    kernels = mosaic_prefill if takes_cache else triton_prefill
    prefill = partial(kernels.paged_attention, **options, **scales)
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
    """By whichever kernel was measured faster: Mosaic's for few rows of wide heads, else that of Triton, which also takes parts."""
    # Imported late: it needs Mosaic, and `supports` has to answer where there is none.
    from pallas_kernels.paged_attention import mosaic_decode

    num_rows, (_, _, num_groups, head_dim), itemsize = len(kv_length_R), q_RKGH.shape, k_pages_PKSH.dtype.itemsize
    most = MAX_NARROW_DECODE_ROWS if itemsize == 1 else MAX_MOSAIC_DECODE_ROWS
    if mosaic_decode.takes_three_workers(num_rows, num_groups, head_dim, itemsize, num_queries):
        most = MAX_ROWS_OF_THREE_WORKERS
    is_by_mosaic = num_rows <= most and head_dim >= 128 and part is None
    kernels = mosaic_decode if is_by_mosaic else triton_decode
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
    """What both Mosaic kernels take. Groups: what registers hold. An 8-bit cache of heads of 256: the prefill then is Triton's."""
    if not mosaic_prefill.supports(
        platform=platform, dtype=dtype, num_groups=num_groups, head_dim=head_dim, page_size=page_size, interpret=interpret
    ):
        return False
    from pallas_kernels.paged_attention.mosaic_decode import PAGE_SIZES

    takes_cache = jnp.dtype(cache_dtype) in (jnp.dtype(dtype), jnp.float8_e4m3fn)
    return takes_cache and num_groups <= 32 and num_groups * head_dim <= 4096 and page_size in PAGE_SIZES
