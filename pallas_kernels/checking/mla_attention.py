"""Latent attention: near what NumPy computes, in the batches of paged attention, of which it is a kind with one KV head.

Two ways to the same, as there: on the device in plain JAX, for large batches, and on the host, for those checked at an engine's start.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.checking import attention, attention_at_start
from pallas_kernels.checking.attention import TOLERANCE, Batch, places
from pallas_kernels.checking.case import Case
from pallas_kernels.checking.compiling import UNTUNED
from pallas_kernels.checking.host import Normals
from pallas_kernels.mla_attention import Tokens, latent_attention, latent_decode, rope_and_write

WRITE_EXACT = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.2e-2}
"""How far a value may be off that was normed and rotated, beside the largest: two roundings."""
ROUNDED_KEYS = 2.0
"""How much further off prompts may be than paged attention: their keys are made of latents and rounded, which turns up where a
softmax has two high scores (in NumPy 1.1e-2 for bfloat16, and with nothing else rounded)."""


@dataclass(frozen=True)
class Sizes:
    """Widths of latent attention: of the latent, of the rotated part, and of what a head makes of latents."""

    latent_dim: int
    rotated_dim: int
    plain_dim: int
    value_dim: int

    @property
    def width(self) -> int:
        """Width of a token's vector."""
        return self.latent_dim + self.rotated_dim


@dataclass(frozen=True)
class Shapes:
    """A model's latent attention on one device."""

    dtype: str
    cache_dtype: str
    num_heads: int
    latent_dim: int
    rotated_dim: int
    plain_dim: int
    value_dim: int
    page_size: int
    table_width: int
    """Pages in a row of the table."""
    scale: float
    num_queries: int = 1
    """Queries of each row in decodes of several; 1: there are none."""

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.latent_dim, self.rotated_dim, self.plain_dim, self.value_dim)


def cases(shapes: Shapes, implementation: str, *, interpret: bool) -> list[Case]:
    """A ragged batch, a small one, and decodes of few and of many rows; and tokens on their way into the cache."""
    sizes = shapes.sizes
    as_paged = attention_at_start.Shapes(
        dtype=shapes.dtype,
        cache_dtype=shapes.cache_dtype,
        num_kv_heads=1,
        num_groups=shapes.num_heads,
        head_dim=sizes.width,
        page_size=shapes.page_size,
        table_width=shapes.table_width,
        layers=(),
        num_queries=shapes.num_queries,
    )
    batches = attention_at_start.batches(as_paged, attention_at_start.Layer(shapes.scale))
    attending = [
        Case(
            batch.name,
            functools.partial(host_arrays, batch, sizes),
            {implementation: call(batch, implementation=implementation, interpret=interpret)},
            functools.partial(host_error, batch, sizes),
            max(TOLERANCE[batch.dtype], TOLERANCE.get(batch.cache_dtype, 0.0)) * (ROUNDED_KEYS if batch.prompts else 1),
        )
        for batch in batches
    ]
    return [*attending, write_case(shapes, 24, implementation, interpret=interpret)]


# Attention


def call(batch: Batch, **options: Any) -> Callable[..., jax.Array]:
    """The op as a function of a batch's arrays."""
    options = {"scale": batch.options["scale"], **options}

    def decode(queries: Any, pages: Any, table: Any, _: Any, kv_length: Any) -> jax.Array:
        q, q_rotated = queries
        return latent_decode(q, q_rotated, pages, table, kv_length, num_queries=batch.num_queries, **options)

    def ragged(queries: Any, pages: Any, table: Any, query_start: Any, kv_length: Any, *others: Any) -> jax.Array:
        *new, key, value = others
        return latent_attention(Tokens(*queries, *new), pages, table, query_start, kv_length, key, value, **options)

    return ragged if batch.prompts else decode


def host_arrays(batch: Batch, sizes: Sizes) -> tuple[tuple[np.ndarray, ...], tuple[Any, ...]]:
    """(both parts of the queries, (pages, table, query starts, lengths)), on the host.

    With prompts also the tokens' own latents and rotated parts, as they are in the pages, and the weights of keys and values,
    which make keys as large as those of paged attention's cases: the scores of larger ones show how keys are rounded, not errors.
    """
    q, (pages, _, *rows) = attention_at_start.host_arrays(batch)
    normals = Normals()
    dtype, num_heads = q.dtype, q.shape[2]

    def weight(width: int) -> np.ndarray:
        return (normals(num_heads, width, sizes.latent_dim) * sizes.latent_dim**-0.5).astype(dtype)

    weights = weight(sizes.plain_dim), weight(sizes.value_dim)
    q_TNP = normals.of(dtype, batch.num_tokens, num_heads, sizes.plain_dim)
    return _operands(np, batch, sizes, q[:, 0], (pages, *rows), q_TNP, weights)


@functools.partial(jax.jit, static_argnums=(0, 1))
def make_arrays(batch: Batch, sizes: Sizes) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """The same on the device."""
    q, (pages, _, *rows) = attention.make_arrays(batch)
    keys, num_heads = jax.random.split(jax.random.key(1), 3), q.shape[2]

    def weight(key: jax.Array, width: int) -> jax.Array:
        return (jax.random.normal(key, (num_heads, width, sizes.latent_dim)) * sizes.latent_dim**-0.5).astype(q.dtype)

    weights = weight(keys[0], sizes.plain_dim), weight(keys[1], sizes.value_dim)
    q_TNP = jax.random.normal(keys[2], (batch.num_tokens, num_heads, sizes.plain_dim), q.dtype)
    return _operands(jnp, batch, sizes, q[:, 0], (pages, *rows), q_TNP, weights)


def _operands(
    xp: Any, batch: Batch, sizes: Sizes, q_TNC: Any, cache: tuple[Any, ...], q_TNP: Any, weights: tuple[Any, Any]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    q_TNE = q_TNC[..., sizes.latent_dim :]
    if not batch.prompts:
        return (q_TNC[..., : sizes.latent_dim], q_TNE), cache
    slots_T = np.zeros(batch.num_tokens, np.int32)
    table_RB = places(batch, np.random.default_rng(0)).table_RB
    token = 0
    for row, (new, length) in enumerate(zip(batch.query_lengths, batch.kv_lengths, strict=True)):
        position_n = np.arange(length - new, length)
        slots_T[token : token + new] = (
            table_RB[row, position_n // batch.page_size] * batch.page_size + position_n % batch.page_size
        )
        token += new
    vector_TC = cache[0].reshape(-1, sizes.width)[slots_T].astype(q_TNC.dtype)
    # What padding computes is finite as it is: slot 0 is nobody's and may be NaN.
    vector_TC = xp.where((np.arange(len(slots_T)) < token)[:, None], vector_TC, xp.ones_like(vector_TC))
    return (q_TNP, q_TNE), (*cache, vector_TC[:, : sizes.latent_dim], vector_TC[:, sizes.latent_dim :], *weights)


def host_error(batch: Batch, sizes: Sizes, queries: tuple[Any, ...], constants: tuple[Any, ...], got: Any) -> float:
    """As that of paged attention, of queries of latents and sums of latents, both multiplied with the weights if there are prompts."""
    wide = np.float64 if batch.dtype == "float32" else np.float32
    q, cache, finish = _as_paged(np, sizes, queries, constants, wide)
    return attention_at_start.host_error(batch, q, cache, np.asarray(got)[:, None], finish)


def worst_error(batch: Batch, sizes: Sizes, queries: tuple[Any, ...], constants: tuple[Any, ...], got: jax.Array) -> float:
    """The same on the device."""
    return float(_worst(batch, sizes, queries, constants, got, attention.compared(batch)))


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=UNTUNED)
def _worst(batch: Batch, sizes: Sizes, queries: Any, constants: Any, got: jax.Array, places_C3X: np.ndarray) -> jax.Array:
    q, cache, finish = _as_paged(jnp, sizes, queries, constants, jnp.float32)
    return attention.worst_of(batch, q, cache, got[:, None], places_C3X, finish)


def _as_paged(
    xp: Any, sizes: Sizes, queries: Any, constants: Any, wide: Any
) -> tuple[Any, tuple[Any, ...], Callable[[Any], Any]]:
    """Queries [T, 1, N, C], the cache as keys and values, and what turns sums of vectors into results."""
    pages, *rows = constants[:4]
    q, q_rotated = (x.astype(wide) for x in queries)
    weights = [x.astype(wide) for x in constants[6:]]
    highest = {} if xp is np else {"precision": jax.lax.Precision.HIGHEST}
    if weights:
        q = xp.einsum("tnp,npl->tnl", q, weights[0], **highest)

    def finish(sum_T1NC: Any) -> Any:
        sum_T1NL = sum_T1NC[..., : sizes.latent_dim]
        return xp.einsum("tknl,nvl->tknv", sum_T1NL, weights[1], **highest) if weights else sum_T1NL

    return xp.concatenate([q, q_rotated], axis=-1)[:, None], (pages, pages, *rows), finish


# Between projection and attention


def write_case(shapes: Shapes, num_tokens: int, implementation: str, *, interpret: bool) -> Case:
    """Tokens into every slot of some pages but the last, two of them padding, against the same in NumPy."""
    options: dict[str, Any] = {"eps": 1e-6, "implementation": implementation, "interpret": interpret}

    def run(projected: Any, *constants: Any) -> Any:
        return rope_and_write(*projected, *constants, **options)

    return Case(
        f"write of {num_tokens} tokens",
        functools.partial(_write_arrays, shapes, num_tokens),
        {implementation: run},
        functools.partial(_write_error, shapes),
        max(WRITE_EXACT[shapes.dtype], TOLERANCE.get(shapes.cache_dtype or shapes.dtype, 0.07)),
    )


def _write_arrays(shapes: Shapes, num_tokens: int) -> tuple[Any, tuple[Any, ...]]:
    normals, sizes, dtype = Normals(), shapes.sizes, jnp.dtype(shapes.dtype)
    half, page_size = sizes.rotated_dim // 2, shapes.page_size
    num_pages = -(-num_tokens // page_size) + 1
    slot_T = np.random.default_rng(0).permutation((num_pages - 1) * page_size)[:num_tokens].astype(np.int32)
    slot_T[[3, -1]] = -1
    angles = normals(num_tokens, half) * 3
    queries = normals.of(dtype, num_tokens, shapes.num_heads, sizes.plain_dim + sizes.rotated_dim)
    return (queries, normals.of(dtype, num_tokens, sizes.width)), (
        np.cos(angles),
        np.sin(angles),
        normals.of(dtype, sizes.latent_dim),
        normals(num_pages, 1, page_size, sizes.width).astype(jnp.dtype(shapes.cache_dtype or shapes.dtype)),
        slot_T,
    )


def _write_error(shapes: Shapes, projected: tuple[Any, ...], constants: tuple[Any, ...], got: Any) -> float:
    sizes = shapes.sizes
    (q, vector), (cos, sin, norm, pages, slot_T) = (
        tuple(np.asarray(x).astype(np.float32) for x in xs) for xs in (projected, constants)
    )

    def rotated(x: np.ndarray) -> np.ndarray:
        first, second = np.split(x, 2, axis=-1)
        c, s = (a.reshape(len(a), *(1,) * (x.ndim - 2), -1) for a in (cos, sin))
        return np.concatenate([first * c - second * s, second * c + first * s], axis=-1)

    latent = vector[:, : sizes.latent_dim]
    latent = latent / np.sqrt(np.mean(latent**2, axis=-1, keepdims=True) + 1e-6) * norm
    key = rotated(vector[:, sizes.latent_dim :])
    expected_pages = pages.reshape(-1, sizes.width).copy()
    is_written = slot_T >= 0
    expected_pages[slot_T[is_written].astype(int)] = np.concatenate([latent, key], axis=-1)[is_written]
    plain, turned = q[..., : sizes.plain_dim], rotated(q[..., sizes.plain_dim :])
    tokens, got_pages = got
    found = [np.asarray(x).astype(np.float32) for x in (*tokens, got_pages)]
    expected = [plain, turned, latent, key, expected_pages.reshape(found[-1].shape)]
    return float(np.max([np.abs(a - b).max() / np.abs(b).max() for a, b in zip(found, expected, strict=True)]))
