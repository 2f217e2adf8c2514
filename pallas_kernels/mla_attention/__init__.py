"""Attention over a paged cache of latents: one vector per token, of which the keys and values of all heads are products.

Shapes, common to all implementations:
    vector_TC       a latent of L values, then the rotated part of the key, E values, which all heads share
    q_TNP, q_TNE    queries of all rows, one after the other, in two parts: W_k is multiplied with the first, the second is rotated
    pages_P1SC      the pool of pages: position p of row r lies in page page_table_RB[r, p // S], slot p % S
    query_start_R1  int32[R + 1]: row r owns tokens query_start[r]:query_start[r + 1]
    kv_length_R     int32[R]: keys of row r, its own new tokens included; its queries are the last of these positions
    key_NPL         W_k: a head's key is W_k latent, and the rotated part behind it
    value_NVL       W_v: a head's value is W_v latent

What is said in `paged_attention` of padding, of slots that are not read, of types and of precision, holds here too. A float8_e4m3fn
cache holds the numbers themselves, limited to ±448. "xla" and "reference" also take the bits of such floats (`cache_write.bits`).

Dimension letters besides those of the package: N query heads, C = L + E width of a vector, V width of a head's value.
"""

import importlib
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.mla_attention.products import absorb, values_of
from pallas_kernels.mla_attention.tokens import Tokens
from pallas_kernels.paged_attention.queries import check_rows
from pallas_kernels.verified import is_verified

__all__ = [
    "Tokens",
    "absorb",
    "candidates",
    "choose",
    "latent_attention",
    "latent_decode",
    "rope_and_write",
    "supports",
    "values_of",
]

IMPLEMENTATIONS = {
    "reference": "pallas_kernels.mla_attention.reference",
    "xla": "pallas_kernels.mla_attention.xla",
    "triton": "pallas_kernels.mla_attention.triton",
    "mosaic": "pallas_kernels.mla_attention.mosaic",
}
"""Each module has rope_and_write, latent_attention, latent_decode, and supports(platform, dtype, cache_dtype, num_heads, latent_dim,
rotated_dim, plain_dim, value_dim, page_size, interpret)."""

PREFERENCE = ("triton", "xla")
"""Decodes by Mosaic were slower in every case that was measured: see docs/MEASUREMENTS.md."""
PLAIN = ("xla", "reference")
"""Implementations in plain JAX."""


def rope_and_write(
    q_TNH: jax.Array,
    vector_TC: jax.Array,
    cos_TE: jax.Array,
    sin_TE: jax.Array,
    norm_L: jax.Array,
    pages_P1SC: jax.Array,
    slot_T: jax.Array,
    *,
    eps: float,
    implementation: str,
    interpret: bool = False,
) -> tuple[Tokens, jax.Array]:
    """From the projections to attention: the tokens, with their latents normed and queries and keys rotated, and the pool with them.

    q_TNH: both parts of the queries. vector_TC: not normed. cos_TE, sin_TE: float32 [T, E / 2]; value i turns with value i + E / 2.
    norm_L: weight of the RMS norm (of `eps`) over latents. slot_T: int32, page * S + offset; a negative one is written nowhere
    (padding). No slot may appear twice. implementation: a key of IMPLEMENTATIONS, which takes the case.
    """
    module = importlib.import_module(IMPLEMENTATIONS[implementation])
    operands = (q_TNH, vector_TC, cos_TE, sin_TE, norm_L, pages_P1SC, slot_T)
    return module.rope_and_write(*operands, eps=eps, interpret=interpret)


def latent_attention(
    tokens: Tokens,
    pages_P1SC: jax.Array,
    page_table_RB: jax.Array,
    query_start_R1: jax.Array,
    kv_length_R: jax.Array,
    key_NPL: jax.Array,
    value_NVL: jax.Array,
    *,
    scale: float,
    implementation: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Causal attention of a ragged batch of tokens, which are in the cache already -> out_TNV, of the heads' values.

    scale: factor of the scores.
    implementation: a key of IMPLEMENTATIONS, or None for `choose` on the default backend.
    interpret: run a Pallas kernel as plain JAX, on any platform.
    Raises ValueError for what the implementation does not take.
    """
    q_TNP, q_TNE, latent_TL, _ = tokens
    sizes = (q_TNP.shape[1], latent_TL.shape[1], q_TNE.shape[2], q_TNP.shape[2], value_NVL.shape[1])
    module = _resolve(implementation, q_TNP.dtype, pages_P1SC, sizes, interpret)
    rows = (page_table_RB, query_start_R1, kv_length_R)
    return module.latent_attention(tokens, pages_P1SC, *rows, key_NPL, value_NVL, scale=scale, interpret=interpret)


def latent_decode(
    q_RNL: jax.Array,
    q_RNE: jax.Array,
    pages_P1SC: jax.Array,
    page_table_RB: jax.Array,
    kv_length_R: jax.Array,
    *,
    scale: float,
    num_queries: int = 1,
    implementation: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Attention where every row has one query, its last position -> weighted sums of latents [R, N, L]; zeros for a padding row.

    q_RNL: queries of latents (`absorb`); of the result, `values_of` makes that of the heads.
    num_queries: W, for a few queries of each row: see `paged_attention.paged_decode`.
    """
    check_rows(len(q_RNL), len(page_table_RB), num_queries)
    _, num_heads, latent_dim = q_RNL.shape
    sizes = (num_heads, latent_dim, q_RNE.shape[2], 128, 128)  # a decode does not see the heads' own sizes
    module = _resolve(implementation, q_RNL.dtype, pages_P1SC, sizes, interpret)
    options: dict[str, Any] = {"scale": scale, "interpret": interpret}
    if num_queries > 1:
        options["num_queries"] = num_queries
    return module.latent_decode(q_RNL, q_RNE, pages_P1SC, page_table_RB, kv_length_R, **options)


def supports(
    implementation: str,
    *,
    dtype: DTypeLike,
    cache_dtype: DTypeLike,
    page_size: int,
    interpret: bool = False,
    **sizes: int,
) -> bool:
    """Whether an implementation takes a case, on the platform it is made for. sizes: num_heads, latent_dim, rotated_dim, plain_dim,
    value_dim."""
    module = importlib.import_module(IMPLEMENTATIONS[implementation])
    case: dict[str, Any] = {"dtype": dtype, "cache_dtype": cache_dtype, "page_size": page_size, **sizes}
    # An explicit choice is not held to the platform: a program may be compiled here for a GPU elsewhere.
    return bool(module.supports(platform="gpu", interpret=interpret, **case))


def candidates(*, platform: str, dtype: DTypeLike, cache_dtype: DTypeLike, page_size: int, **sizes: int) -> tuple[str, ...]:
    """The names of PREFERENCE that take a case and are plain JAX or were verified on the kind of the first device, the fastest first."""
    case: dict[str, Any] = {"dtype": dtype, "cache_dtype": cache_dtype, "page_size": page_size, **sizes}
    trusted = platform == "gpu" and is_verified(jax.local_devices()[0].device_kind, "mla_attention")
    return tuple(
        name
        for name in PREFERENCE
        if (trusted or name in PLAIN) and importlib.import_module(IMPLEMENTATIONS[name]).supports(platform=platform, **case)
    )


def choose(*, platform: str, dtype: DTypeLike, cache_dtype: DTypeLike, page_size: int, **sizes: int) -> str:
    """The first of `candidates`; "xla" takes every case."""
    return candidates(platform=platform, dtype=dtype, cache_dtype=cache_dtype, page_size=page_size, **sizes)[0]


def _resolve(
    implementation: str | None, dtype: jnp.dtype, pages: jax.Array, sizes: tuple[int, int, int, int, int], interpret: bool
) -> ModuleType:
    """sizes: N, L, E, P, V."""
    num_heads, latent_dim, rotated_dim, plain_dim, value_dim = sizes
    if pages.shape[1] != 1 or pages.shape[3] != latent_dim + rotated_dim:
        raise ValueError(
            f"latents of {latent_dim} and rotated parts of {rotated_dim} values do not fit pages {list(pages.shape)}; expected "
            f"[P, 1, S, {latent_dim + rotated_dim}]"
        )
    names = ("num_heads", "latent_dim", "rotated_dim", "plain_dim", "value_dim")
    case: dict[str, Any] = dict(zip(names, sizes, strict=True))
    case |= {"dtype": dtype, "cache_dtype": pages.dtype, "page_size": pages.shape[2]}
    if implementation is None:
        implementation = choose(platform=jax.default_backend(), **case)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"no implementation {implementation!r} of latent attention; there are {', '.join(IMPLEMENTATIONS)}")
    if not supports(implementation, **case, interpret=interpret):
        raise ValueError(
            f"implementation {implementation!r} of latent attention does not take {num_heads} heads of {plain_dim} + {rotated_dim} "
            f"values and values of {value_dim} over latents of {latent_dim}, in {dtype} over a cache of {pages.dtype} with pages of "
            f"{pages.shape[2]}; use 'xla'"
        )
    return importlib.import_module(IMPLEMENTATIONS[implementation])
