"""From the QKV projection to attention in one op: norm and rotate queries and keys, write keys and values into a paged cache.

Shapes, common to all implementations:
    qkv_TKGH        [T, K, G + 2, H]: per token and KV head its G query heads, its key, its value
    cos_TH, sin_TH  float32 [T, H / 2] of the tokens' angles; value i of a head turns with value i + H / 2 (arXiv:2104.09864)
    k_pages_PKSH    the pool of pages, in place when donated; v_pages_PKSH alike
    slot_T          int32: page * S + offset of each token; a negative slot is written nowhere, its queries are computed all the same

Norm and rotation are computed in float32; each is rounded to the type of qkv. A cache of float8_e4m3fn holds values divided by
their scale, limited to ±448; a cache of another type holds them as they are. "xla" also
takes caches of the bits of such floats (`cache_write.bits`).
"""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from pallas_kernels.cache_write.bits import value_type

IMPLEMENTATIONS = {
    "xla": "pallas_kernels.rope_cache_write.xla",
    "triton": "pallas_kernels.rope_cache_write.triton",
}
"""Each module has rope_and_write and supports(platform, dtype, cache_dtype, cache_size, head_dim, interpret)."""

PREFERENCE = ("triton", "xla")


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
    implementation: str | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries [T, K, G, H] ready for attention, and both caches with the tokens in their slots. No slot may appear twice.

    q_norm_H, k_norm_H: weights of an RMS norm (of `eps`) over each head before the rotation; both or neither. norm_offset: added to
        them, in float32.
    k_scale, v_scale: scalars of a float8_e4m3fn cache; None is 1.
    implementation: a key of IMPLEMENTATIONS, or None for the first of PREFERENCE that takes the case on the default backend.
    interpret: run a Pallas kernel as plain JAX, on any platform.
    """
    cache_dtype = k_pages_PKSH.dtype
    if (q_norm_H is None) != (k_norm_H is None):
        raise ValueError("only one of q_norm_H and k_norm_H is given; give both or neither")
    if value_type(cache_dtype) != jnp.float8_e4m3fn and not (k_scale is None and v_scale is None):
        raise ValueError(f"k_scale and v_scale are for a cache of float8_e4m3fn, this one is {cache_dtype}; leave them out")
    case: dict[str, Any] = {"dtype": qkv_TKGH.dtype, "cache_dtype": cache_dtype, "cache_size": k_pages_PKSH.size}
    case["head_dim"] = qkv_TKGH.shape[-1]
    if implementation is None:
        implementation = choose(platform=jax.default_backend(), **case)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"no implementation {implementation!r} of rope_and_write; there are {', '.join(IMPLEMENTATIONS)}")
    module = importlib.import_module(IMPLEMENTATIONS[implementation])
    # An explicit choice is not held to the platform: a program may be compiled here for a GPU elsewhere.
    if not module.supports(platform="gpu", interpret=interpret, **case):
        raise ValueError(
            f"implementation {implementation!r} of rope_and_write does not take heads of width {case['head_dim']} in "
            f"{qkv_TKGH.dtype} with a cache of {k_pages_PKSH.size} values of {cache_dtype}; use 'xla'"
        )
    return module.rope_and_write(
        qkv_TKGH,
        cos_TH,
        sin_TH,
        k_pages_PKSH,
        v_pages_PKSH,
        slot_T,
        q_norm_H=q_norm_H,
        k_norm_H=k_norm_H,
        eps=eps,
        norm_offset=norm_offset,
        k_scale=k_scale,
        v_scale=v_scale,
        interpret=interpret,
    )


def candidates(
    *, platform: str, dtype: DTypeLike, cache_dtype: DTypeLike, cache_size: int, head_dim: int, interpret: bool = False
) -> tuple[str, ...]:
    """The names of PREFERENCE that take a case, the fastest first; "xla" takes every case. cache_size: values of a pool."""
    case: dict[str, Any] = {"dtype": dtype, "cache_dtype": cache_dtype, "cache_size": cache_size, "head_dim": head_dim}
    modules = {name: importlib.import_module(IMPLEMENTATIONS[name]) for name in PREFERENCE}
    return tuple(name for name in PREFERENCE if modules[name].supports(platform=platform, interpret=interpret, **case))


def choose(*, platform: str, dtype: DTypeLike, cache_dtype: DTypeLike, cache_size: int, head_dim: int) -> str:
    """The name of the fastest implementation for a case: the first of `candidates`."""
    case: dict[str, Any] = {"dtype": dtype, "cache_dtype": cache_dtype, "cache_size": cache_size, "head_dim": head_dim}
    return candidates(platform=platform, **case)[0]
