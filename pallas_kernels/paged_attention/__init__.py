"""Attention over a paged key-value cache: one signature, several implementations.

Shapes, common to all of them:
    q_TKGH          queries of all rows, one after the other; query head n of the model is k * G + g
    k_pages_PKSH    the pool of pages: position p of row r lies in page page_table_RB[r, p // S], slot p % S; v_pages_PKSH alike
    query_start_R1  int32[R + 1]: row r owns tokens query_start[r]:query_start[r + 1]
    kv_length_R     int32[R]: keys of row r, its own new tokens included; its queries are the last of these positions

A padding row has kv_length 0 and no tokens. Tokens from query_start[R] on are padding, their results finite.
Only slots below kv_length of the pages in a row's table are read, or what else is read cannot reach a result (it may be NaN).
The caches have the type of the queries, another of 16 or 32 bits, or float8_e4m3fn; "xla" and "reference" also take the bits of
such floats (`cache_write.bits`).
Products accumulate in float32, float32 operands are multiplied in full precision, the softmax is float32.
"""

import importlib
from types import ModuleType
from typing import Any

import jax
from jax.typing import ArrayLike, DTypeLike

from pallas_kernels.paged_attention.parts import Part
from pallas_kernels.paged_attention.queries import check_rows

IMPLEMENTATIONS = {
    "reference": "pallas_kernels.paged_attention.reference",
    "xla": "pallas_kernels.paged_attention.xla",
    "triton": "pallas_kernels.paged_attention.triton",
    "mosaic": "pallas_kernels.paged_attention.mosaic",
    "jax_triton": "pallas_kernels.paged_attention.jax_triton",
}
"""Each module has paged_attention, paged_decode, and supports(platform, dtype, num_groups, head_dim, cache_dtype, page_size,
has_sinks, interpret).

One that needs packages which may not be there also has missing(), and supports nothing without them.
"""

PREFERENCE = ("mosaic", "triton", "xla")
TAKING_PARTS = ("reference", "xla", "triton", "mosaic")
"""Those whose functions take `part`."""


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
    implementation: str | None = None,
    interpret: bool = False,
) -> Any:
    """Causal attention of a ragged batch of queries over their rows' keys -> out_TKGH, of q's type.

    window: a query sees only the last `window` positions, itself included.
    soft_cap: scores s become soft_cap * tanh(s / soft_cap).
    k_scale, v_scale: float32 scalars, what the stored keys and values are multiplied with; None: nothing. For float8_e4m3fn caches.
    sinks_KG: float32, a score of each query head that takes part in the softmax as if it were that of a key whose value is zero;
        neither scaled nor capped. None: no such score.
    part: the cache holds a part of the keys: page b of row r is page_table_RB[r, b] of every part, and kv_length_R counts the keys of
        all. The result is then (out_TKGH, lse_TKG), over the keys of this part: lse is the natural logarithm of the softmax's sum,
        float32, `parts.NO_KEYS` where the part has no key for a query, whose out is zeros. `parts.combine` makes attention of
        all parts, and takes the sinks, which must not be given here.
    implementation: a key of IMPLEMENTATIONS, or None for the first of PREFERENCE that takes the case on the default backend.
    interpret: run a Pallas kernel as plain JAX, on any platform.
    """
    module = _resolve(implementation, q_TKGH, k_pages_PKSH, sinks_KG is not None, interpret, part)
    return module.paged_attention(
        q_TKGH,
        k_pages_PKSH,
        v_pages_PKSH,
        page_table_RB,
        query_start_R1,
        kv_length_R,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        k_scale=k_scale,
        v_scale=v_scale,
        sinks_KG=sinks_KG,
        interpret=interpret,
        **_named(part),
    )


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
    implementation: str | None = None,
    interpret: bool = False,
) -> Any:
    """`paged_attention` where every row has one query, its last position -> out_RKGH; a padding row gives zeros.

    num_queries: W, for a few queries of each row, its last W positions: q and the result are [R * W, K, G, H], query w of row r at
        r * W + w. A row has at least W keys, or none (padding).
    part: as of `paged_attention`, for one query a row.
    Raises ValueError for what the implementation does not take, and if there are not W queries for each row of the page table.
    """
    check_rows(len(q_RKGH), len(page_table_RB), num_queries)
    if part is not None and num_queries > 1:
        raise ValueError(
            f"a decode over a part of the keys takes one query a row, num_queries is {num_queries}; use paged_attention"
        )
    module = _resolve(implementation, q_RKGH, k_pages_PKSH, sinks_KG is not None, interpret, part)
    several = {"num_queries": num_queries} if num_queries > 1 else {}
    return module.paged_decode(
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
        interpret=interpret,
        **several,
        **_named(part),
    )


def _named(part: Part | None) -> dict[str, Part]:
    """As an argument, of those that take it."""
    return {} if part is None else {"part": part}


def supports(
    implementation: str,
    *,
    dtype: DTypeLike,
    num_groups: int,
    head_dim: int,
    cache_dtype: DTypeLike | None = None,
    page_size: int = 16,
    has_sinks: bool = False,
    has_part: bool = False,
    interpret: bool = False,
) -> bool:
    """Whether an implementation takes a case, on the platform it is made for. cache_dtype: None for that of the queries."""
    if has_part and implementation not in TAKING_PARTS:
        return False
    module = importlib.import_module(IMPLEMENTATIONS[implementation])
    return module.supports(
        platform="gpu",
        dtype=dtype,
        num_groups=num_groups,
        head_dim=head_dim,
        cache_dtype=cache_dtype or dtype,
        page_size=page_size,
        has_sinks=has_sinks,
        interpret=interpret,
    )


def missing(implementation: str) -> str | None:
    """What must be installed before an implementation can be used, in words; None if nothing."""
    module = importlib.import_module(IMPLEMENTATIONS[implementation])
    return module.missing() if hasattr(module, "missing") else None


def candidates(
    *,
    platform: str,
    dtype: DTypeLike,
    num_groups: int,
    head_dim: int,
    cache_dtype: DTypeLike | None = None,
    page_size: int = 16,
    has_sinks: bool = False,
    has_part: bool = False,
) -> tuple[str, ...]:
    """The names of PREFERENCE that take a case, the fastest first; "reference" where none does."""
    case = {"dtype": dtype, "num_groups": num_groups, "head_dim": head_dim, "page_size": page_size, "has_sinks": has_sinks}
    found = [
        name
        for name in PREFERENCE
        if (name in TAKING_PARTS or not has_part)
        and importlib.import_module(IMPLEMENTATIONS[name]).supports(platform=platform, cache_dtype=cache_dtype or dtype, **case)
    ]
    return tuple(found) or ("reference",)


def choose(
    *,
    platform: str,
    dtype: DTypeLike,
    num_groups: int,
    head_dim: int,
    cache_dtype: DTypeLike | None = None,
    page_size: int = 16,
    has_sinks: bool = False,
    has_part: bool = False,
) -> str:
    """The name of the fastest implementation for a case: the first of `candidates`."""
    case = {"dtype": dtype, "num_groups": num_groups, "head_dim": head_dim, "cache_dtype": cache_dtype, "page_size": page_size}
    case |= {"has_sinks": has_sinks, "has_part": has_part}
    return candidates(platform=platform, **case)[0]  # type: ignore[arg-type]


def _resolve(
    implementation: str | None, q: jax.Array, pages: jax.Array, has_sinks: bool, interpret: bool, part: Part | None
) -> ModuleType:
    if part is not None and has_sinks:
        raise ValueError("sinks count once for all parts of the keys: give them to parts.combine, not beside part")
    num_groups, head_dim = q.shape[-2:]
    case = {
        "dtype": q.dtype,
        "num_groups": num_groups,
        "head_dim": head_dim,
        "cache_dtype": pages.dtype,
        "page_size": pages.shape[2],
        "has_sinks": has_sinks,
        "has_part": part is not None,
    }
    if implementation is None:
        implementation = choose(platform=jax.default_backend(), **case)  # type: ignore[arg-type]
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"no attention implementation {implementation!r}; there are {', '.join(IMPLEMENTATIONS)}")
    reason = missing(implementation)
    if reason is not None:
        raise ValueError(f"attention implementation {implementation!r} {reason}")
    # An explicit choice is not held to the platform: a program may be compiled here for a GPU elsewhere.
    if not supports(implementation, **case, interpret=interpret):  # type: ignore[arg-type]
        raise ValueError(
            f"attention implementation {implementation!r} does not take {num_groups} query heads per key-value head "
            f"of width {head_dim} in {q.dtype} over a cache of {pages.dtype} with pages of {pages.shape[2]}"
            f"{' and sinks' if has_sinks else ''}{' and parts of the keys' if part is not None else ''}; use 'xla'"
        )
    return importlib.import_module(IMPLEMENTATIONS[implementation])
