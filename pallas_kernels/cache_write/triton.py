"""The cache write as one Pallas-Triton launch for keys and values, in place through aliased operands."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import ArrayLike

from pallas_kernels._compat import load, store, triton_call
from pallas_kernels.cache_write.xla import to_cache_type
from pallas_kernels.paged_attention.triton_decode import kv_scale_operand


def supports(*, platform: str, interpret: bool = False, **_: object) -> bool:
    return platform == "gpu" or interpret


def write_cache(
    k_pages_PKSH: jax.Array,
    v_pages_PKSH: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    slot_T: jax.Array,
    *,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    kv_scale = kv_scale_operand(k_scale, v_scale)
    return triton_call(
        functools.partial(_write_kernel, has_kv_scale=len(kv_scale) == 1),
        name="write_cache",
        grid=(slot_T.shape[0],),
        out_shape=(
            jax.ShapeDtypeStruct(k_pages_PKSH.shape, k_pages_PKSH.dtype),
            jax.ShapeDtypeStruct(v_pages_PKSH.shape, v_pages_PKSH.dtype),
        ),
        num_warps=4,
        num_stages=1,
        interpret=interpret,
        input_output_aliases={0: 0, 1: 1},
    )(k_pages_PKSH, v_pages_PKSH, k_TKH, v_TKH, slot_T, *kv_scale)


def _write_kernel(_k_pages_ref, _v_pages_ref, k_ref, v_ref, slot_ref, *refs, has_kv_scale: bool) -> None:
    """One token: its K heads as one flat vector of K * H lanes. refs: kv_scale [2] if there is one, then the caches."""
    kv_scale_ref, k_out_ref, v_out_ref = refs if has_kv_scale else (None, *refs)
    _, num_kv_heads, head_dim = k_ref.shape
    page_size = k_out_ref.shape[2]
    token = pl.program_id(0)
    slot = slot_ref[token]
    page, offset = lax.div(jnp.maximum(slot, 0), page_size), lax.rem(jnp.maximum(slot, 0), page_size)
    lane = jnp.arange(1 << (num_kv_heads * head_dim - 1).bit_length())
    head, dim = lax.div(lane, head_dim), lax.rem(lane, head_dim)
    in_lane = lane < num_kv_heads * head_dim
    mask = in_lane & (slot >= 0)
    for i, (source, target) in enumerate(((k_ref, k_out_ref), (v_ref, v_out_ref))):
        x = load(source.at[token, head, dim], mask=in_lane, other=0.0)
        x = to_cache_type(x, target.dtype, None if kv_scale_ref is None else kv_scale_ref[i])
        store(target.at[page, head, offset, dim], x, mask=mask)
