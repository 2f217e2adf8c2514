"""All of it as one Pallas-Triton launch; the caches are written in place through aliased operands.

A program takes one token and a few of its KV heads:

    qkv[t]      head k:  | q q q q | key | value |     a head is read as two halves, because value i turns with value i + H/2
                            |         |      |
                 norm, rotate    norm, rotate |
                            |         |      |
    q_out[t, k]  <----------+         |      +------>  v_pages[page, k, offset]
                                      +------------->  k_pages[page, k, offset]
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import ArrayLike, DTypeLike

from pallas_kernels._compat import load, store, triton_call
from pallas_kernels.cache_write import to_cache_type
from pallas_kernels.sizes import next_power_of_two

_COMPUTED = (jnp.float32, jnp.bfloat16, jnp.float16)


@dataclass(frozen=True)
class Tiles:
    kv_heads: int
    """KV heads of a program, a power of two; what exceeds the heads there are is masked."""
    num_warps: int


def supports(
    *, platform: str, dtype: DTypeLike, cache_dtype: DTypeLike, cache_size: int, head_dim: int, interpret: bool = False
) -> bool:
    # Pallas-Triton counts values in 32 bits, with a sign, in arrays of up to 2**32 bytes, and in 64 bits beyond.
    countable = cache_size <= 2**31 or cache_size * jnp.dtype(cache_dtype).itemsize > 2**32
    return (
        (platform == "gpu" or interpret)
        and head_dim % 2 == 0
        and jnp.dtype(dtype) in _COMPUTED
        and jnp.dtype(cache_dtype) in (*_COMPUTED, jnp.float8_e4m3fn)
        and countable
    )


def pick_tiles(num_tokens: int, num_kv_heads: int, num_groups: int, head_dim: int) -> Tiles:
    """Few tokens: a warp per KV head, for the shortest way through. Many tokens: programs that keep more loads in flight."""
    if num_tokens * num_kv_heads <= 4096:
        return Tiles(1, 1 if next_power_of_two(num_groups) * next_power_of_two(head_dim) <= 1024 else 4)
    return Tiles(
        min(next_power_of_two(num_kv_heads), max(1, 4096 // (next_power_of_two(num_groups) * next_power_of_two(head_dim)))), 4
    )


def rope_and_write(
    qkv_TKGH: jax.Array,
    cos_TH: jax.Array,
    sin_TH: jax.Array,
    k_pages_PKSH: jax.Array,
    v_pages_PKSH: jax.Array,
    slot_T: jax.Array,
    *,
    q_norm_H: jax.Array | None = None,
    k_norm_H: jax.Array | None = None,
    eps: float = 1e-6,
    norm_offset: float = 0.0,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    interpret: bool = False,
    tiles: Tiles | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    num_tokens, num_kv_heads, num_slices, head_dim = qkv_TKGH.shape
    tiles = tiles or pick_tiles(num_tokens, num_kv_heads, num_slices - 2, head_dim)
    norms = [] if q_norm_H is None or k_norm_H is None else [q_norm_H, k_norm_H]
    scales = []
    if k_scale is not None or v_scale is not None:
        both = (jnp.asarray(1.0 if scale is None else scale, jnp.float32) for scale in (k_scale, v_scale))
        # One operand: where both are slices of one array, XLA passes that array.
        scales = [jnp.stack([scale.reshape(()) for scale in both])]
    return triton_call(
        functools.partial(
            _kernel, tiles=tiles, eps=eps, norm_offset=norm_offset, has_norms=bool(norms), has_scales=bool(scales)
        ),
        name="rope_and_write",
        grid=(num_tokens, pl.cdiv(num_kv_heads, tiles.kv_heads)),
        out_shape=(
            jax.ShapeDtypeStruct((num_tokens, num_kv_heads, num_slices - 2, head_dim), qkv_TKGH.dtype),
            jax.ShapeDtypeStruct(k_pages_PKSH.shape, k_pages_PKSH.dtype),
            jax.ShapeDtypeStruct(v_pages_PKSH.shape, v_pages_PKSH.dtype),
        ),
        num_warps=tiles.num_warps,
        num_stages=1,
        interpret=interpret,
        input_output_aliases={0: 1, 1: 2},
    )(k_pages_PKSH, v_pages_PKSH, qkv_TKGH, cos_TH, sin_TH, slot_T, *norms, *scales)


def _kernel(
    _k_pages_ref,
    _v_pages_ref,
    qkv_ref,
    cos_ref,
    sin_ref,
    slot_ref,
    *refs,
    tiles: Tiles,
    eps: float,
    norm_offset: float,
    has_norms: bool,
    has_scales: bool,
) -> None:
    *optional, q_out_ref, k_pages_ref, v_pages_ref = refs
    k_scale, v_scale = (optional[-1][0], optional[-1][1]) if has_scales else (None, None)
    _, num_kv_heads, num_slices, head_dim = qkv_ref.shape
    num_groups, half, page_size = num_slices - 2, head_dim // 2, k_pages_ref.shape[2]

    token = pl.program_id(0)
    head_K = pl.program_id(1) * tiles.kv_heads + jnp.arange(tiles.kv_heads)
    dim_H = jnp.arange(next_power_of_two(half))
    in_half_H = dim_H < half
    angles = [load(ref.at[token, dim_H], mask=in_half_H, other=0.0) for ref in (cos_ref, sin_ref)]
    slot = slot_ref[token]
    page, offset = lax.div(jnp.maximum(slot, 0), page_size), lax.rem(jnp.maximum(slot, 0), page_size)

    # A head's query has an axis more than its key and value.
    head_K1, dim_1H = head_K[:, None], dim_H[None, :]
    in_head_KH = (head_K1 < num_kv_heads) & in_half_H[None, :]
    head_K11, dim_11H, group_1G1 = (
        head_K[:, None, None],
        dim_H[None, None, :],
        jnp.arange(next_power_of_two(num_groups))[None, :, None],
    )
    in_head_KGH = (head_K11 < num_kv_heads) & (group_1G1 < num_groups) & in_half_H[None, None, :]

    def halves(ref, *index, mask):
        """The two halves of heads: the last index is that of the first half."""
        return [load(ref.at[(*index[:-1], index[-1] + start)], mask=mask, other=0.0) for start in (0, half)]

    q_KGH = halves(qkv_ref, token, head_K11, group_1G1, dim_11H, mask=in_head_KGH)
    k_KH = halves(qkv_ref, token, head_K1, num_groups, dim_1H, mask=in_head_KH)
    v_KH = halves(qkv_ref, token, head_K1, num_groups + 1, dim_1H, mask=in_head_KH)
    if has_norms:
        q_norm, k_norm = (halves(ref, dim_H, mask=in_half_H) for ref in optional[:2])
        norm = functools.partial(_norm, head_dim=head_dim, eps=eps, offset=norm_offset)
        q_KGH, k_KH = norm(q_KGH, q_norm), norm(k_KH, k_norm)
    q_KGH, k_KH = _rotate(q_KGH, *angles), _rotate(k_KH, *angles)

    for start, q, k, v in zip((0, half), q_KGH, k_KH, v_KH, strict=True):
        store(q_out_ref.at[token, head_K11, group_1G1, dim_11H + start], q, mask=in_head_KGH)
        for x, pages_ref, scale in ((k, k_pages_ref, k_scale), (v, v_pages_ref, v_scale)):
            store(
                pages_ref.at[page, head_K1, offset, dim_1H + start],
                to_cache_type(x, pages_ref.dtype, scale),
                mask=in_head_KH & (slot >= 0),
            )


def _norm(halves: list[jax.Array], weights: list[jax.Array], *, head_dim: int, eps: float, offset: float) -> list[jax.Array]:
    """RMS norm of heads [..., H] in two halves."""
    dtype = halves[0].dtype
    first, second = (x.astype(jnp.float32) for x in halves)
    mean = jnp.sum(first * first + second * second, axis=-1, keepdims=True) / head_dim
    factor = lax.rsqrt(mean + eps)
    wide = [w.astype(jnp.float32) + offset if offset else w.astype(jnp.float32) for w in weights]
    return [(x * factor * w).astype(dtype) for x, w in zip((first, second), wide, strict=True)]


def _rotate(halves: list[jax.Array], cos_H: jax.Array, sin_H: jax.Array) -> list[jax.Array]:
    dtype = halves[0].dtype
    first, second = (x.astype(jnp.float32) for x in halves)
    return [(first * cos_H - second * sin_H).astype(dtype), (second * cos_H + first * sin_H).astype(dtype)]
