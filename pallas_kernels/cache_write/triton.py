"""The cache write as one Pallas-Triton launch for keys and values, in place through aliased operands."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels._compat import load, store, triton_call


def supports(*, platform: str, interpret: bool = False, **_: object) -> bool:
    return platform == "gpu" or interpret


def write_cache(
    k_pages_PKSH: jax.Array,
    v_pages_PKSH: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    slot_T: jax.Array,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    return triton_call(
        _write_kernel,
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
    )(k_pages_PKSH, v_pages_PKSH, k_TKH, v_TKH, slot_T)


def _write_kernel(_k_pages_ref, _v_pages_ref, k_ref, v_ref, slot_ref, k_out_ref, v_out_ref) -> None:
    """One token: its K heads as one flat vector of K * H lanes."""
    _, num_kv_heads, head_dim = k_ref.shape
    page_size = k_out_ref.shape[2]
    token = pl.program_id(0)
    slot = slot_ref[token]
    page, offset = lax.div(jnp.maximum(slot, 0), page_size), lax.rem(jnp.maximum(slot, 0), page_size)
    lane = jnp.arange(1 << (num_kv_heads * head_dim - 1).bit_length())
    head, dim = lax.div(lane, head_dim), lax.rem(lane, head_dim)
    in_lane = lane < num_kv_heads * head_dim
    mask = in_lane & (slot >= 0)
    for source, target in ((k_ref, k_out_ref), (v_ref, v_out_ref)):
        x = load(source.at[token, head, dim], mask=in_lane, other=0.0)
        store(target.at[page, head, offset, dim], x.astype(target.dtype), mask=mask)
