"""Attention over a paged cache of latents: one vector per token is the key of all heads, and its first values are their value.

Shapes, common to all implementations:
    q_TNC           queries of all rows, one after the other
    pages_P1SC      the pool of pages: position p of row r lies in page page_table_RB[r, p // S], slot p % S
    query_start_R1  int32[R + 1]: row r owns tokens query_start[r]:query_start[r + 1]
    kv_length_R     int32[R]: keys of row r, its own new tokens included; its queries are the last of these positions
    result          [T, N, V] in the type of q

What is said in `paged_attention` of padding, of slots that are not read, of types and of precision, holds here too. A float8_e4m3fn
cache holds the numbers themselves, limited to ±448.

Dimension letters besides those of the package: N query heads, C width of a vector, V width of its part that is the value.
"""

import importlib
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.cache_write import to_cache_type
from pallas_kernels.cache_write.bits import as_stored, value_type
from pallas_kernels.verified import is_verified

IMPLEMENTATIONS = {
    "reference": "pallas_kernels.mla_attention.reference",
    "xla": "pallas_kernels.mla_attention.xla",
    "triton": "pallas_kernels.mla_attention.triton",
    "mosaic": "pallas_kernels.mla_attention.mosaic",
}
"""Each module has latent_attention, latent_decode, and supports(platform, dtype, cache_dtype, num_heads, width, value_dim, page_size,
interpret)."""

PREFERENCE = ("triton", "xla")
"""Mosaic's speed is not measured yet."""
PLAIN = ("xla", "reference")
"""Implementations in plain JAX."""


def latent_attention(
    q_TNC: jax.Array,
    pages_P1SC: jax.Array,
    page_table_RB: jax.Array,
    query_start_R1: jax.Array,
    kv_length_R: jax.Array,
    *,
    value_dim: int,
    scale: float,
    implementation: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Causal attention of a ragged batch of queries over their rows' vectors -> out_TNV.

    value_dim: V. scale: factor of the scores.
    implementation: a key of IMPLEMENTATIONS, or None for `choose` on the default backend.
    interpret: run a Pallas kernel as plain JAX, on any platform.
    Raises ValueError for what the implementation does not take.
    """
    module = _resolve(implementation, q_TNC, pages_P1SC, value_dim, interpret)
    rows = (page_table_RB, query_start_R1, kv_length_R)
    return module.latent_attention(q_TNC, pages_P1SC, *rows, value_dim=value_dim, scale=scale, interpret=interpret)


def latent_decode(
    q_RNC: jax.Array,
    pages_P1SC: jax.Array,
    page_table_RB: jax.Array,
    kv_length_R: jax.Array,
    *,
    value_dim: int,
    scale: float,
    implementation: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """`latent_attention` where every row has one query, its last position -> out_RNV; a padding row gives zeros."""
    module = _resolve(implementation, q_RNC, pages_P1SC, value_dim, interpret)
    rows = (page_table_RB, kv_length_R)
    return module.latent_decode(q_RNC, pages_P1SC, *rows, value_dim=value_dim, scale=scale, interpret=interpret)


def write_latents(pages_P1SC: jax.Array, latent_TC: jax.Array, slot_T: jax.Array) -> jax.Array:
    """The pool with one vector per token written into its slot, int32: page * S + offset; by an XLA scatter, in place when donated.

    A negative slot is dropped (padding). No slot may appear twice.
    """
    num_pages, _, page_size, _ = pages_P1SC.shape
    page_T = jnp.where(slot_T < 0, num_pages, slot_T // page_size)  # past the end: dropped
    new_TC = as_stored(to_cache_type(latent_TC, value_type(pages_P1SC.dtype), None), pages_P1SC.dtype)
    return pages_P1SC.at[page_T, 0, jnp.maximum(slot_T, 0) % page_size].set(new_TC, mode="drop")


def supports(
    implementation: str,
    *,
    dtype: DTypeLike,
    cache_dtype: DTypeLike,
    num_heads: int,
    width: int,
    value_dim: int,
    page_size: int,
    interpret: bool = False,
) -> bool:
    """Whether an implementation takes a case, on the platform it is made for. width: C. num_heads: N."""
    module = importlib.import_module(IMPLEMENTATIONS[implementation])
    case = _case(dtype, cache_dtype, num_heads, width, value_dim, page_size)
    # An explicit choice is not held to the platform: a program may be compiled here for a GPU elsewhere.
    return bool(module.supports(platform="gpu", interpret=interpret, **case))


def candidates(
    *, platform: str, dtype: DTypeLike, cache_dtype: DTypeLike, num_heads: int, width: int, value_dim: int, page_size: int
) -> tuple[str, ...]:
    """The names of PREFERENCE that take a case and are plain JAX or were verified on the kind of the first device, the fastest first."""
    case = _case(dtype, cache_dtype, num_heads, width, value_dim, page_size)
    trusted = platform == "gpu" and is_verified(jax.local_devices()[0].device_kind, "mla_attention")
    return tuple(
        name
        for name in PREFERENCE
        if (trusted or name in PLAIN) and importlib.import_module(IMPLEMENTATIONS[name]).supports(platform=platform, **case)
    )


def choose(
    *, platform: str, dtype: DTypeLike, cache_dtype: DTypeLike, num_heads: int, width: int, value_dim: int, page_size: int
) -> str:
    """The first of `candidates`; "xla" takes every case."""
    return candidates(platform=platform, **_case(dtype, cache_dtype, num_heads, width, value_dim, page_size))[0]


def _case(
    dtype: DTypeLike, cache_dtype: DTypeLike, num_heads: int, width: int, value_dim: int, page_size: int
) -> dict[str, Any]:
    sizes = {"num_heads": num_heads, "width": width, "value_dim": value_dim, "page_size": page_size}
    return {"dtype": dtype, "cache_dtype": cache_dtype, **sizes}


def _resolve(implementation: str | None, q: jax.Array, pages: jax.Array, value_dim: int, interpret: bool) -> ModuleType:
    num_heads, width = q.shape[1:]
    if pages.shape[1] != 1 or pages.shape[3] != width or not 0 < value_dim <= width:
        raise ValueError(
            f"queries {list(q.shape)}, pages {list(pages.shape)} and values of width {value_dim} do not fit together; expected "
            "[T, N, C], [P, 1, S, C] and at most C"
        )
    case = _case(q.dtype, pages.dtype, num_heads, width, value_dim, pages.shape[2])
    if implementation is None:
        implementation = choose(platform=jax.default_backend(), **case)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"no implementation {implementation!r} of latent attention; there are {', '.join(IMPLEMENTATIONS)}")
    if not supports(implementation, **case, interpret=interpret):
        raise ValueError(
            f"implementation {implementation!r} of latent attention does not take {num_heads} heads over vectors of {width} values, of "
            f"which {value_dim} are the value, in {q.dtype} over a cache of {pages.dtype} with pages of {pages.shape[2]}; use 'xla'"
        )
    return importlib.import_module(IMPLEMENTATIONS[implementation])
