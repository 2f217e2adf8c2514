"""Norm, rope and cache write in one: queries near the exact ones, the caches near too and else untouched."""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.checking.case import Case
from pallas_kernels.checking.compiling import UNTUNED
from pallas_kernels.checking.host import Normals, same_bits
from pallas_kernels.rope_cache_write import rope_and_write, xla

TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
"""Bound of the largest difference, relative to the largest value: one rounding may fall the other way."""
_FP8_HALF_STEP = 1.05 / 16
"""Error of a stored fp8 value, relative: what rounding alone does, and a twentieth more."""
_FP8_MAX, _FP8_SMALLEST_NORMAL = 448.0, 2.0**-6
_SCALES = (0.5, 0.01)
"""Scales of keys and values: the second sends some beyond the largest fp8 number."""
_LARGE_PAIRS = 4096
"""Tokens times KV heads above which the kernel takes other tiles."""


@dataclass(frozen=True)
class Shapes:
    """A model's heads on one device."""

    dtype: str
    cache_dtype: str
    num_kv_heads: int
    num_groups: int
    head_dim: int
    page_size: int
    eps: float = 1e-6
    has_norms: bool = False
    norm_offset: float = 0.0
    has_scales: bool = False


def cases(shapes: Shapes, implementation: str, *, interpret: bool) -> list[Case]:
    """A few tokens, and more than the kernel's small tiles are for; odd numbers, some tokens dropped, every free slot NaN."""
    many = _LARGE_PAIRS // shapes.num_kv_heads + 13
    options: dict[str, Any] = {"implementation": implementation, "interpret": interpret, "eps": shapes.eps}
    return [
        Case(
            f"{num_tokens} tokens",
            functools.partial(_host_arrays, shapes, num_tokens),
            {implementation: functools.partial(run, has_norms=shapes.has_norms, norm_offset=shapes.norm_offset, **options)},
            functools.partial(_host_error, shapes),
            TOLERANCE[shapes.dtype],
        )
        for num_tokens in (13, many)
    ]


def run(carry: Any, cos: Any, sin: Any, slot: Any, *rest: Any, has_norms: bool, **options: Any) -> Any:
    """The op on (qkv, both caches); `rest` are the norms' weights, then the scales, as far as there are any."""
    qkv, k_pages, v_pages = carry
    norms, scales = (rest[:2], rest[2:]) if has_norms else ((), rest)
    named = dict(zip(("q_norm_H", "k_norm_H"), norms, strict=True)) if norms else {}
    named |= dict(zip(("k_scale", "v_scale"), scales, strict=True)) if scales else {}
    return rope_and_write(qkv, cos, sin, k_pages, v_pages, slot, **named, **options)


def worst_error(carry: Any, constants: Any, got: Any, *, eps: float = 1e-6) -> float:
    """Against plain JAX in float32; infinite if another slot was written. Constants: cosine, sine, slots, norms or None."""
    is_free_PS = _is_free(np.asarray(constants[2]), carry[1].shape)
    return float(_worst(carry, constants, got, is_free_PS, eps))


@functools.partial(jax.jit, compiler_options=UNTUNED)
def _worst(carry: Any, constants: Any, got: Any, is_free_PS: Any, eps: Any) -> jax.Array:
    qkv, *caches = carry
    cos, sin, slot, q_norm, k_norm = constants
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), (qkv, cos, sin, *caches))
    options: dict[str, Any] = {"q_norm_H": q_norm, "k_norm_H": k_norm, "k_scale": None, "v_scale": None, "eps": eps}
    qkv, cos, sin, k_pages, v_pages = exact
    expected = xla.rope_and_write(qkv, cos, sin, k_pages, v_pages, slot, **options)
    kept = is_free_PS[:, None, :, None]
    changed = jnp.stack([jnp.any((new != old) & kept) for old, new in zip(caches, got[1:], strict=True)]).any()
    pairs = zip(got, expected, strict=True)
    worst = jnp.stack([jnp.abs(a.astype(jnp.float32) - b).max() / jnp.abs(b).max() for a, b in pairs]).max()
    return jnp.where(changed, jnp.inf, worst)


def _host_arrays(shapes: Shapes, num_tokens: int) -> tuple[Any, tuple[Any, ...]]:
    normals, rng = Normals(), np.random.default_rng(1)
    K, G, H, S = shapes.num_kv_heads, shapes.num_groups, shapes.head_dim, shapes.page_size
    num_pages = num_tokens // S + 3
    slot_T = rng.permutation(num_pages * S)[:num_tokens].astype(np.int32)
    slot_T[3::7] = -1
    cache = np.full((num_pages, K, S, H), np.nan, jnp.dtype(shapes.cache_dtype))
    angle = rng.uniform(0, 2 * math.pi, (num_tokens, H // 2)).astype(np.float32)
    dtype = jnp.dtype(shapes.dtype)
    norms = [(1 - shapes.norm_offset + 0.1 * normals(H)).astype(dtype) for _ in range(2 * shapes.has_norms)]
    scales = [np.float32(scale) for scale in _SCALES if shapes.has_scales]
    qkv = (normals(num_tokens, K, G + 2, H) * 2).astype(dtype)
    return (qkv, cache, cache.copy()), (np.cos(angle), np.sin(angle), slot_T, *norms, *scales)


def _host_error(shapes: Shapes, carry: Any, constants: Any, got: Any) -> float:
    """Error: of a cache in fp8, what is more than the rounding to fp8; of one narrower than the heads, in its own tolerance."""
    cos, sin, slot_T, *rest = constants
    norms, scales = (rest[:2], rest[2:]) if shapes.has_norms else ((), rest)
    qkv = carry[0].astype(np.float64)
    q, k, v = qkv[:, :, :-2], qkv[:, :, -2:-1], qkv[:, :, -1]
    if norms:
        offset = shapes.norm_offset
        q, k = (_norm(x, weight.astype(np.float64) + offset, shapes.eps) for x, weight in zip((q, k), norms, strict=True))
    q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)[:, :, 0]
    got_q, *caches = (np.asarray(array) for array in got)
    worst = _relative_to_largest(got_q, q)
    is_free_PS = _is_free(slot_T, caches[0].shape)
    is_kept_T = slot_T >= 0
    page_T, offset_T = np.divmod(slot_T[is_kept_T], shapes.page_size)
    for before, after, x, scale in zip(carry[1:], caches, (k, v), scales or (1.0, 1.0), strict=True):
        if not same_bits(before.swapaxes(1, 2)[is_free_PS], after.swapaxes(1, 2)[is_free_PS]):
            return math.inf
        written = after[page_T, :, offset_T].astype(np.float64)
        if after.dtype.itemsize > 1:
            allowed = max(TOLERANCE[shapes.dtype], TOLERANCE[shapes.cache_dtype])
            worst = _worse(worst, _relative_to_largest(written, x[is_kept_T]) * TOLERANCE[shapes.dtype] / allowed)
        else:
            expected = np.clip(x[is_kept_T] / float(scale), -_FP8_MAX, _FP8_MAX)
            rounding = _FP8_HALF_STEP * np.maximum(np.abs(expected), _FP8_SMALLEST_NORMAL)
            off = np.maximum(np.abs(written - expected) - rounding, 0.0)
            worst = _worse(worst, float(off.max() / np.abs(expected).max()))
    return worst


def _norm(x: np.ndarray, weight_H: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + eps) * weight_H


def _rotate(x_TKGH: np.ndarray, cos_TH: np.ndarray, sin_TH: np.ndarray) -> np.ndarray:
    cos, sin = cos_TH[:, None, None], sin_TH[:, None, None]
    first, second = np.split(x_TKGH, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _is_free(slot_T: np.ndarray, cache_shape: tuple[int, ...]) -> np.ndarray:
    """[P, S]: which slots no token is written to."""
    is_free = np.ones(cache_shape[0] * cache_shape[2], bool)
    is_free[slot_T[slot_T >= 0]] = False
    return is_free.reshape(cache_shape[0], cache_shape[2])


def _relative_to_largest(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a.astype(np.float64) - b).max() / np.abs(b).max())


def _worse(a: float, b: float) -> float:
    """The larger; NaN if either is."""
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)
