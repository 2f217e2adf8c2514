"""Paged attention by plain Triton kernels, called through jax-triton: where Triton kernels go when Pallas-Triton is gone.

An optional extra (`pip install 'jaxllm[jax-triton]'`), never chosen by itself: Pallas-Triton is as fast and needs nothing more. It
stays for the day on which JAX drops Pallas-Triton, and `scripts/check_gpu.py` checks it where the extra is installed. The
kernels are in jax_triton_kernels.py.
"""

import importlib.metadata
import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.paged_attention import triton_decode, triton_prefill
from pallas_kernels.paged_attention.queries import in_parts
from pallas_kernels.paged_attention.tiles import make_tiles
from pallas_kernels.paged_attention.triton_decode import LOG2E
from pallas_kernels.sizes import next_power_of_two

LEAST_VERSIONS = {"jax-triton": (0, 4), "triton": (3, 7)}
"""Older ones import too, and fail when a kernel is called."""


def missing() -> str | None:
    """What has to be installed before this implementation can be used, in words; None if nothing."""
    absent = []
    for name, least in LEAST_VERSIONS.items():
        found = _installed(name)
        if found is None:
            absent.append(name)
        elif tuple(map(int, found.split(".")[:2])) < least:
            absent.append(f"{name} {least[0]}.{least[1]} or later ({found})")
    if not absent:
        return None
    python = "" if sys.version_info >= (3, 12) else f" under Python 3.12 or later (this is {sys.version.split()[0]})"
    return f"needs {' and '.join(absent)}: pip install 'jaxllm[jax-triton]'{python}"


def _installed(name: str) -> str | None:
    """The version of a package; None if it is not there."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def supports(
    *,
    platform: str,
    dtype: DTypeLike,
    num_groups: int,
    head_dim: int,
    cache_dtype: DTypeLike,
    has_sinks: bool = False,
    interpret: bool = False,
    **_: object,
) -> bool:
    if platform != "gpu" or interpret or has_sinks or missing() is not None or jnp.dtype(cache_dtype) != jnp.dtype(dtype):
        return False
    return jnp.dtype(dtype) in (jnp.float32, jnp.bfloat16, jnp.float16) and num_groups <= 64 and 16 <= head_dim <= 256


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
    num_queries: int = 1,
    interpret: bool = False,
    tiles: triton_decode.DecodeTiles | None = None,
    **others: None,
) -> jax.Array:
    """Compiled for the GPU only: there is no interpreter inside JAX. others: the dispatcher's options that must be absent."""
    assert not interpret and not any(other is not None for other in others.values()), "the dispatcher refuses these"
    if num_queries > 1:
        options: dict[str, Any] = {"scale": scale, "window": window, "soft_cap": soft_cap}
        pages = (k_pages_PKSH, v_pages_PKSH)
        return in_parts(paged_decode, 1, (q_RKGH,), pages, page_table_RB, kv_length_R, num_queries=num_queries, **options)
    kernels, call = _kernels()
    num_rows, num_kv_heads, num_groups, head_dim = q_RKGH.shape
    num_slots = page_table_RB.shape[1] * k_pages_PKSH.shape[2]
    if tiles is None:
        itemsize = k_pages_PKSH.dtype.itemsize
        tiles = triton_decode.pick_tiles(num_rows, num_kv_heads, head_dim, itemsize, num_slots, window)
    splits = tiles.num_splits
    num_lines = num_rows * num_kv_heads * num_groups
    out_type = jax.ShapeDtypeStruct(q_RKGH.shape, q_RKGH.dtype)
    partial_type = out_type if splits == 1 else jax.ShapeDtypeStruct((splits, num_lines, head_dim), jnp.float32)
    partial, lse = call(
        q_RKGH,
        k_pages_PKSH,
        v_pages_PKSH,
        page_table_RB,
        kv_length_R,
        kernel=kernels.decode_kernel,
        name="paged_decode",
        out_type=(partial_type, jax.ShapeDtypeStruct((splits, num_lines if splits > 1 else 1), jnp.float32)),
        grid=(num_kv_heads, num_rows, splits),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        BLOCK_M=max(16, next_power_of_two(num_groups)),
        BLOCK_K=tiles.block_k,
        NUM_SPLITS=splits,
        **_shape_constants(q_RKGH, k_pages_PKSH, page_table_RB, scale, window, soft_cap),
    )
    if splits == 1:
        return partial
    return call(
        partial,
        lse,
        kernel=kernels.combine_kernel,
        name="paged_decode_combine",
        out_type=out_type,
        grid=(num_lines,),
        num_warps=1 if splits <= 8 else 4,
        num_stages=1,
        NUM_LINES=num_lines,
        HEAD_DIM=head_dim,
        PADDED_DIM=next_power_of_two(head_dim),
        NUM_SPLITS=splits,
        PADDED_SPLITS=next_power_of_two(splits),
    )


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
    interpret: bool = False,
    tiles: triton_prefill.PrefillTiles | None = None,
    **others: None,
) -> jax.Array:
    """Every row goes through the prefill kernel, in which a row of one token takes a whole tile."""
    assert not interpret and not any(other is not None for other in others.values()), "the dispatcher refuses these"
    kernels, call = _kernels()
    num_tokens, num_kv_heads, num_groups, head_dim = q_TKGH.shape
    if tiles is None:
        itemsize = jnp.promote_types(q_TKGH.dtype, k_pages_PKSH.dtype).itemsize
        tiles = triton_prefill.pick_tiles(num_tokens, num_groups, head_dim, itemsize)
    table_N4 = make_tiles(query_start_R1, kv_length_R, num_tokens, tiles.block_m // num_groups)
    return call(
        q_TKGH,
        k_pages_PKSH,
        v_pages_PKSH,
        page_table_RB,
        table_N4,
        kernel=kernels.prefill_kernel,
        name="paged_attention",
        out_type=jax.ShapeDtypeStruct(q_TKGH.shape, q_TKGH.dtype),
        grid=(table_N4.shape[0], num_kv_heads),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        NUM_TILES=table_N4.shape[0],
        BLOCK_M=tiles.block_m,
        BLOCK_K=tiles.block_k,
        **_shape_constants(q_TKGH, k_pages_PKSH, page_table_RB, scale, window, soft_cap),
    )


def _shape_constants(
    q: jax.Array, k_pages: jax.Array, page_table: jax.Array, scale: float, window: int | None, soft_cap: float | None
) -> dict[str, Any]:
    """What both kernels are compiled for."""
    _, num_kv_heads, num_groups, head_dim = q.shape
    return {
        "SCORE_SCALE": scale * LOG2E,
        "SOFT_CAP": None if soft_cap is None else soft_cap * LOG2E,
        "WINDOW": window,
        "IN_FLOAT32": q.dtype != k_pages.dtype,
        "NUM_ROWS": page_table.shape[0],
        "NUM_KV_HEADS": num_kv_heads,
        "NUM_GROUPS": num_groups,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": next_power_of_two(head_dim),
        "PAGE_SIZE": k_pages.shape[2],
        "TABLE_WIDTH": page_table.shape[1],
    }


def _kernels() -> tuple[Any, Any]:
    """The kernels, and what calls them."""
    reason = missing()
    if reason is not None:
        raise ModuleNotFoundError(f"attention implementation 'jax_triton' {reason}")
    import jax_triton

    from pallas_kernels.paged_attention import jax_triton_kernels

    return jax_triton_kernels, jax_triton.triton_call
