"""Paged attention in plain JAX whose cost follows the keys that there are, not the width of the page table: the path for CPUs.

Both functions walk the keys in chunks of whole pages with an online softmax in float32; the number of chunks is a value on the
device. Decodes go through a few rows of about the same length at once, so that the cost follows the sum of the lengths and not
rows times the longest. Longer queries go one tile of tokens after the other (see tiles.py), each up to its own causal limit.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from pallas_kernels.cache_write.bits import as_values
from pallas_kernels.paged_attention.parts import NO_KEYS, Part
from pallas_kernels.paged_attention.tiles import COUNT, POSITION, ROW, TOKEN, make_tiles

MASKED = -1e30  # finite, so that a wholly masked chunk gives no NaN; the first valid score wipes what it added
TILE_TOKENS = 32
GROUP_ROWS = 4  # fewer: too many small operations; more: rows wait for the longest of their group
DECODE_CHUNK_BYTES, TILE_CHUNK_BYTES = 1 << 17, 1 << 20  # a chunk should stay in a core's cache between copy and product
MIN_CHUNK, MAX_CHUNK = 64, 256  # tokens


def supports(**_: object) -> bool:
    return True


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
    asked, num_groups = q_RKGH.shape, q_RKGH.shape[2]
    if num_queries > 1:
        # The queries of a row are more groups of its heads.
        q_RKGH = _as_groups(q_RKGH, num_queries)
        sinks_KG = None if sinks_KG is None else jnp.tile(sinks_KG, (1, num_queries))
        behind_G = num_queries - 1 - jnp.arange(num_queries * num_groups, dtype=jnp.int32) // num_groups
    num_rows = len(q_RKGH)
    group = min(GROUP_ROWS, num_rows)
    chunk_pages = _chunk_pages(DECODE_CHUNK_BYTES // group, k_pages_PKSH, page_table_RB.shape[1])
    chunk = chunk_pages * k_pages_PKSH.shape[2]
    first_R = None if window is None else kv_length_R - (window + num_queries - 1)
    if part is not None:
        page_size = k_pages_PKSH.shape[2]
        first_R = None if first_R is None else part.keys_before(first_R, page_size)
        kv_length_R = part.keys_before(kv_length_R, page_size)
    # By length, so that the rows of a group end together. The padding has no keys and comes first.
    order_R = jnp.argsort(kv_length_R)
    padding = -num_rows % group
    length_R = jnp.pad(kv_length_R[order_R], (padding, 0))
    first_R = None if first_R is None else jnp.pad(first_R[order_R], (padding, 0))
    table_RB = jnp.pad(_pad_table(page_table_RB, chunk_pages)[order_R], ((padding, 0), (0, 0)))
    q = jnp.pad(q_RKGH[order_R].astype(jnp.float32) * _times(scale, k_scale), ((padding, 0), (0, 0), (0, 0), (0, 0)))

    def group_body(index, outs):
        row = index * group
        q_rKGH = lax.dynamic_slice_in_dim(q, row, group, axis=0)
        length_r = lax.dynamic_slice_in_dim(length_R, row, group, axis=0)
        first_r = None if first_R is None else lax.dynamic_slice_in_dim(first_R, row, group, axis=0)

        def body(chunk_index, carry):
            acc_rKGH, max_rKG, sum_rKG = carry
            position_L = chunk_index * chunk + jnp.arange(chunk, dtype=jnp.int32)
            valid_rL = position_L[None] < length_r[:, None]
            if first_r is not None:
                valid_rL &= position_L[None] >= first_r[:, None]
            pages_rc = lax.dynamic_slice(table_RB, (row, chunk_index * chunk_pages), (group, chunk_pages))
            k_rKLH = _gather(k_pages_PKSH, pages_rc)
            # Slots outside the row's keys may hold NaN, which a weight of zero would not remove.
            v_rKLH = jnp.where(valid_rL[:, None, :, None], _gather(v_pages_PKSH, pages_rc), 0.0)
            scores_rKGL = _einsum("rkgh,rklh->rkgl", q_rKGH, k_rKLH)
            if soft_cap is not None:
                scores_rKGL = soft_cap * jnp.tanh(scores_rKGL / soft_cap)
            seen = valid_rL[:, None, None]
            if num_queries > 1:
                end_rG1 = length_r[:, None, None] - behind_G[None, :, None]
                seen_rGL = position_L < end_rG1
                if window is not None:
                    seen_rGL &= position_L >= end_rG1 - window
                seen = seen_rGL[:, None]
            scores_rKGL = jnp.where(seen, scores_rKGL, MASKED)
            new_max_rKG = jnp.maximum(max_rKG, scores_rKGL.max(axis=3))
            weights_rKGL = jnp.exp(scores_rKGL - new_max_rKG[..., None])
            shrink_rKG = jnp.exp(max_rKG - new_max_rKG)
            acc_rKGH = acc_rKGH * shrink_rKG[..., None] + _einsum("rkgl,rklh->rkgh", weights_rKGL, v_rKLH)
            return acc_rKGH, new_max_rKG, sum_rKG * shrink_rKG + weights_rKGL.sum(axis=3)

        end = (jnp.max(length_r) + (chunk - 1)) // chunk
        begin = jnp.int32(0)
        has_keys_r = length_r > 0
        if first_r is not None:
            # The row that begins first decides; rows without keys do not count.
            earliest = jnp.min(jnp.where(has_keys_r, first_r, jnp.iinfo(jnp.int32).max))
            begin = jnp.minimum(jnp.maximum(earliest, 0) // chunk, end)
            has_keys_r &= first_r < length_r  # all keys in its window may be in other parts
        carry = _empty_softmax(q_rKGH.shape, sinks_KG)
        acc_rKGH, max_rKG, sum_rKG = lax.fori_loop(begin, end, body, carry)
        out_rKGH = acc_rKGH / jnp.where(sum_rKG == 0, 1.0, sum_rKG)[..., None]
        # A row without keys saw masked scores only, and summed them.
        out_rKGH = jnp.where(has_keys_r[:, None, None, None], out_rKGH * _times(1.0, v_scale), 0.0)
        lse_rKG = jnp.where(has_keys_r[:, None, None], max_rKG + jnp.log(sum_rKG), NO_KEYS)
        return _placed(outs, (out_rKGH, lse_rKG), row)

    empty = (jnp.zeros(q.shape, q_RKGH.dtype), *([] if part is None else [jnp.zeros(q.shape[:3], jnp.float32)]))
    sorted_ = lax.fori_loop(0, q.shape[0] // group, group_body, empty)
    out_RKGH, *lse_RKG = (jnp.zeros_like(x[padding:]).at[order_R].set(x[padding:]) for x in sorted_)
    if part is not None:
        return out_RKGH, *lse_RKG
    if num_queries == 1:
        return out_RKGH
    return out_RKGH.reshape(num_rows, -1, num_queries, *asked[2:]).swapaxes(1, 2).reshape(asked)


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
    num_tokens, num_kv_heads, num_groups, head_dim = q_TKGH.shape
    num_rows = page_table_RB.shape[0]
    tile_tokens = min(TILE_TOKENS, num_tokens)
    chunk_pages = _chunk_pages(TILE_CHUNK_BYTES, k_pages_PKSH, page_table_RB.shape[1])
    chunk = chunk_pages * k_pages_PKSH.shape[2]
    table_RB = _pad_table(page_table_RB, chunk_pages)
    single_R = query_start_R1[1:] - query_start_R1[:-1] == 1
    tiles_N4 = make_tiles(query_start_R1, kv_length_R, num_tokens, tile_tokens, min_tokens=2)
    num_tiles = jnp.sum((tiles_N4[:, COUNT] > 0) & (tiles_N4[:, ROW] < num_rows))
    # Room for the last tile to be read and written whole.
    q = jnp.pad(q_TKGH, ((0, tile_tokens), (0, 0), (0, 0), (0, 0)))

    page_size = k_pages_PKSH.shape[2]

    def keys_before(position: jax.Array) -> jax.Array:
        return position if part is None else part.keys_before(position, page_size)

    def tile_body(tile, outs):
        row, token, count, position = (tiles_N4[tile, column] for column in (ROW, TOKEN, COUNT, POSITION))
        q_tKGH = lax.dynamic_slice_in_dim(q, token, tile_tokens, axis=0)
        q_KMH = q_tKGH.astype(jnp.float32).swapaxes(0, 1).reshape(num_kv_heads, tile_tokens * num_groups, head_dim)
        q_KMH = q_KMH * _times(scale, k_scale)
        line_M = jnp.arange(tile_tokens * num_groups, dtype=jnp.int32)
        position_M = position + line_M // num_groups
        end_M = keys_before(position_M + 1)
        first_M = None if window is None else keys_before(position_M - (window - 1))
        stop, first = keys_before(position + count), None if window is None else keys_before(position - (window - 1))

        def body(index, carry):
            acc_KMH, max_KM, sum_KM = carry
            position_L = index * chunk + jnp.arange(chunk, dtype=jnp.int32)
            visible_ML = position_L[None] < end_M[:, None]
            if first_M is not None:
                visible_ML &= position_L[None] >= first_M[:, None]
            pages_1c = lax.dynamic_slice(table_RB, (row, index * chunk_pages), (1, chunk_pages))
            k_KLH = _gather(k_pages_PKSH, pages_1c)[0]
            # Slots outside the row's keys may hold NaN, and so may pages before the window, which may be another row's by now.
            readable_L = position_L < stop
            if first is not None:
                readable_L &= position_L >= first
            v_KLH = jnp.where(readable_L[None, :, None], _gather(v_pages_PKSH, pages_1c)[0], 0.0)
            scores_KML = _einsum("kmh,klh->kml", q_KMH, k_KLH)
            if soft_cap is not None:
                scores_KML = soft_cap * jnp.tanh(scores_KML / soft_cap)
            scores_KML = jnp.where(visible_ML & readable_L[None], scores_KML, MASKED)
            new_max_KM = jnp.maximum(max_KM, scores_KML.max(axis=2))
            weights_KML = jnp.exp(scores_KML - new_max_KM[..., None])
            shrink_KM = jnp.exp(max_KM - new_max_KM)
            acc_KMH = acc_KMH * shrink_KM[..., None] + _einsum("kml,klh->kmh", weights_KML, v_KLH)
            return acc_KMH, new_max_KM, sum_KM * shrink_KM + weights_KML.sum(axis=2)

        end = (stop + (chunk - 1)) // chunk
        begin = jnp.int32(0) if first is None else jnp.maximum(first, 0) // chunk
        carry = _empty_softmax(q_KMH.shape, None if sinks_KG is None else jnp.tile(sinks_KG, (1, tile_tokens)))
        acc_KMH, max_KM, sum_KM = lax.fori_loop(begin, end, body, carry)
        out_KMH = acc_KMH / jnp.where(sum_KM == 0, 1.0, sum_KM)[..., None]
        # Lines past the tile's tokens are zeros; where they are tokens of the next tile, that tile writes over them.
        has_keys_M = line_M < count * num_groups
        if part is not None:  # of a cache of all keys, each query sees its own
            has_keys_M &= end_M > (0 if first_M is None else first_M)
        out_KMH = jnp.where(has_keys_M[None, :, None], out_KMH * _times(1.0, v_scale), 0.0)
        lse_KM = jnp.where(has_keys_M, max_KM + jnp.log(sum_KM), NO_KEYS)

        def by_token(x_KM: jax.Array) -> jax.Array:
            return x_KM.reshape(num_kv_heads, tile_tokens, num_groups, *x_KM.shape[2:]).swapaxes(0, 1)

        return _placed(outs, (by_token(out_KMH), by_token(lse_KM)), token)

    empty = (jnp.zeros_like(q), *([] if part is None else [jnp.full(q.shape[:3], NO_KEYS, jnp.float32)]))
    outs = lax.fori_loop(0, num_tiles, tile_body, empty)

    # Rows of one token would waste a tile each: they go together, as a decode.
    token_R = query_start_R1[:-1]
    singles = paged_decode(
        q_TKGH[jnp.minimum(token_R, num_tokens - 1)],
        k_pages_PKSH,
        v_pages_PKSH,
        page_table_RB,
        jnp.where(single_R, kv_length_R, 0),
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        k_scale=k_scale,
        v_scale=v_scale,
        sinks_KG=sinks_KG,
        part=part,
    )
    target_R = jnp.where(single_R, token_R, num_tokens)
    if part is None:
        return outs[0][:num_tokens].at[target_R].set(singles, mode="drop")
    return tuple(x[:num_tokens].at[target_R].set(single, mode="drop") for x, single in zip(outs, singles, strict=True))


def _placed(arrays: tuple[jax.Array, ...], parts: tuple[jax.Array, ...], start: jax.Array) -> tuple[jax.Array, ...]:
    """Arrays with these parts from a row on; parts without an array are left out."""
    return tuple(
        lax.dynamic_update_slice_in_dim(x, part.astype(x.dtype), start, axis=0) for x, part in zip(arrays, parts, strict=False)
    )


def _as_groups(q_RKGH: jax.Array, num_queries: int) -> jax.Array:
    """[R * W, K, G, H] -> [R, K, W * G, H]."""
    q = q_RKGH.reshape(-1, num_queries, *q_RKGH.shape[1:]).swapaxes(1, 2)
    return q.reshape(*q.shape[:2], -1, q.shape[-1])


def _empty_softmax(shape: tuple[int, ...], sinks: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Accumulator, maximum and sum before the first key. A sink is a score that was seen already, of a value of zero."""
    if sinks is None:
        return jnp.zeros(shape, jnp.float32), jnp.full(shape[:-1], MASKED, jnp.float32), jnp.zeros(shape[:-1], jnp.float32)
    return jnp.zeros(shape, jnp.float32), jnp.broadcast_to(sinks, shape[:-1]), jnp.ones(shape[:-1], jnp.float32)


def _times(factor: float, stored_scale: ArrayLike | None) -> ArrayLike:
    return factor if stored_scale is None else factor * jnp.asarray(stored_scale, jnp.float32)


def _chunk_pages(row_bytes: int, pages_PKSH: jax.Array, table_width: int) -> int:
    """Pages per chunk: about `row_bytes` of float32 keys of a row, between MIN_CHUNK and MAX_CHUNK tokens."""
    _, num_kv_heads, page_size, head_dim = pages_PKSH.shape
    tokens = row_bytes // (num_kv_heads * head_dim * 4)
    tokens = min(max(tokens, MIN_CHUNK), MAX_CHUNK)
    return min(max(1, tokens // page_size), table_width)


def _pad_table(page_table_RB: jax.Array, chunk_pages: int) -> jax.Array:
    """The table with whole chunks: a slice past its end would be shifted back to other positions."""
    return jnp.pad(page_table_RB, ((0, 0), (0, -page_table_RB.shape[1] % chunk_pages)))


def _gather(pages_PKSH: jax.Array, index_Rc: jax.Array) -> jax.Array:
    """The given pages of each row as one run of tokens per head, float32 -> [R, K, c * S, H]. One copy, in this order."""
    num_pages, num_kv_heads, page_size, head_dim = pages_PKSH.shape
    heads = pages_PKSH.reshape(num_pages * num_kv_heads, page_size, head_dim)
    index_RKc = index_Rc[:, None, :] * num_kv_heads + jnp.arange(num_kv_heads, dtype=jnp.int32)[None, :, None]
    num_rows, num_chunk_pages = index_Rc.shape
    x = as_values(heads.at[index_RKc].get(mode="clip")).astype(jnp.float32)
    return x.reshape(num_rows, num_kv_heads, num_chunk_pages * page_size, head_dim)


def _einsum(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(spec, a, b, precision=lax.Precision.HIGHEST)
