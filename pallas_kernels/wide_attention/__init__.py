"""Attention over a paged key-value cache of heads wider than the kernels of `paged_attention` take: the same functions and arguments.

Wide heads are an op of their own so that a model with both widths uses, for each, what was verified for it. Plain JAX is that of
`paged_attention`.
"""

import importlib
from types import ModuleType
from typing import Any

import jax
from jax.typing import DTypeLike

from pallas_kernels.paged_attention.parts import Part
from pallas_kernels.paged_attention.queries import check_rows

WIDEST_OF_OTHERS = 256
"""Width of the widest heads that the kernels of `paged_attention` take."""
IMPLEMENTATIONS = {
    "reference": "pallas_kernels.paged_attention.reference",
    "xla": "pallas_kernels.paged_attention.xla",
    "triton": "pallas_kernels.wide_attention.triton",
}
"""As those of `paged_attention`."""
PREFERENCE = ("triton", "xla")


def is_wide(head_dim: int) -> bool:
    """Whether heads of this width are for this op."""
    return head_dim > WIDEST_OF_OTHERS


def paged_attention(
    q_TKGH: jax.Array,
    *arrays: jax.Array,
    implementation: str,
    sinks_KG: jax.Array | None = None,
    part: Part | None = None,
    interpret: bool = False,
    **options: Any,
) -> Any:
    """As `paged_attention.paged_attention`, by a key of IMPLEMENTATIONS."""
    module, own = _resolve(implementation, q_TKGH, arrays[0], sinks_KG, part, interpret)
    return module.paged_attention(q_TKGH, *arrays, interpret=interpret, **own, **options)


def paged_decode(
    q_RKGH: jax.Array,
    *arrays: jax.Array,
    implementation: str,
    num_queries: int = 1,
    sinks_KG: jax.Array | None = None,
    part: Part | None = None,
    interpret: bool = False,
    **options: Any,
) -> Any:
    """As `paged_attention.paged_decode`, by a key of IMPLEMENTATIONS."""
    check_rows(len(q_RKGH), len(arrays[2]), num_queries)
    module, own = _resolve(implementation, q_RKGH, arrays[0], sinks_KG, part, interpret)
    several = {"num_queries": num_queries} if num_queries > 1 else {}
    return module.paged_decode(q_RKGH, *arrays, interpret=interpret, **several, **own, **options)


def supports(
    implementation: str, *, platform: str = "gpu", dtype: DTypeLike, cache_dtype: DTypeLike | None = None, **case: Any
) -> bool:
    """Whether an implementation takes a case, which is that of `paged_attention.supports`."""
    module = importlib.import_module(IMPLEMENTATIONS[implementation])
    return module.supports(platform=platform, dtype=dtype, cache_dtype=cache_dtype or dtype, **case)


def candidates(**case: Any) -> tuple[str, ...]:
    """The names of PREFERENCE that take a case, as of `supports`, the fastest first."""
    return tuple(name for name in PREFERENCE if supports(name, **case))


def named(implementation: str) -> str:
    """The implementation for a name of `paged_attention`: the one kernel that there is stands for all of its kernels for GPUs."""
    return implementation if implementation in IMPLEMENTATIONS else "triton"


def _resolve(
    implementation: str, q: jax.Array, k_pages: jax.Array, sinks_KG: Any, part: Part | None, interpret: bool
) -> tuple[ModuleType, dict[str, Any]]:
    """The module of an implementation, and the arguments that only some take."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"no implementation {implementation!r} of attention with wide heads; there are {', '.join(IMPLEMENTATIONS)}"
        )
    num_groups, head_dim = q.shape[-2:]
    own = {name: value for name, value in (("sinks_KG", sinks_KG), ("part", part)) if value is not None}
    case: dict[str, Any] = {"dtype": q.dtype, "num_groups": num_groups, "head_dim": head_dim, "cache_dtype": k_pages.dtype}
    case |= {"has_sinks": sinks_KG is not None, "has_part": part is not None}
    # An explicit choice is not held to the platform: a program may be compiled here for a GPU elsewhere.
    if not supports(implementation, **case, interpret=interpret):
        raise ValueError(
            f"attention with wide heads by {implementation!r} does not take {num_groups} query heads per key-value head of width "
            f"{head_dim} in {q.dtype} over a cache of {k_pages.dtype}{' with ' * bool(own)}{' and '.join(own)}; use 'xla'"
        )
    return importlib.import_module(IMPLEMENTATIONS[implementation]), own
