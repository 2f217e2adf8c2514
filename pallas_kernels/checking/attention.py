"""Batches of paged attention: their arrays, how an implementation is called on them, and how far its result is off.

Two ways to the same: on the device in plain JAX, for large batches, and on the host in NumPy, for those checked at an engine's start.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.checking.compiling import UNTUNED
from pallas_kernels.paged_attention import reference
from pallas_kernels.paged_attention.parts import Part, combine

TOLERANCE = {"float32": 2e-5, "float16": 3e-3, "bfloat16": 1.5e-2}
"""Bound of the worst query head's relative error: a few roundings of the result, its weights rounded to the type."""
REFERENCE_BYTES = 1 << 29
MAX_TOKENS = 600
"""Tokens of a batch that are compared with the reference on the device."""
SCALES = (0.75, 1.5)
"""Scales of keys and of values of a batch that has them."""


@dataclass(frozen=True)
class Batch:
    """Rows of one query by the number of their keys, and prompts as (new tokens, keys before them). Without prompts it is a decode.

    A decode row of 0 keys is padding, as a prompt of (0, 0) is; `padding` counts tokens after the last prompt. Rows of a decode may
    have a few queries each.
    """

    name: str
    decodes: tuple[int, ...] = ()
    prompts: tuple[tuple[int, int], ...] = ()
    num_kv_heads: int = 8
    num_groups: int = 4
    head_dim: int = 128
    page_size: int = 16
    dtype: str = "bfloat16"
    cache_dtype: str = ""
    """Empty: that of the queries."""
    scale: float | None = None
    """Factor of the scores; None: 1 / sqrt(head_dim)."""
    window: int | None = None
    soft_cap: float | None = None
    padding: int = 0
    poison: bool = False
    """Every slot that no row reads is NaN; in a table, page 0 stands for the pages before a row's window."""
    has_scales: bool = False
    """Keys and values are multiplied by SCALES."""
    has_sinks: bool = False
    num_queries: int = 1
    """Queries of each row of a decode."""
    table_width: int = 0
    """Pages in a row of the table, if more than the longest row needs."""
    num_parts: int = 1
    """Caches that the keys are split over, each with `page_size / num_parts` slots of each page here: all are run, and combined."""

    @property
    def query_lengths(self) -> list[int]:
        if not self.prompts:
            return [self.num_queries] * len(self.decodes)
        singles = [1 if length else 0 for length in self.decodes]
        return singles + [new for new, _ in self.prompts]

    @property
    def kv_lengths(self) -> list[int]:
        return list(self.decodes) + [new + before for new, before in self.prompts]

    @property
    def num_tokens(self) -> int:
        """Padding counted."""
        return sum(self.query_lengths) + self.padding

    @property
    def width(self) -> int:
        """Pages in a row of the table."""
        return max(1, self.table_width, *(-(-n // self.page_size) for n in self.kv_lengths))

    @property
    def options(self) -> dict[str, Any]:
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        return {"scale": scale, "window": self.window, "soft_cap": self.soft_cap}

    @property
    def sinks_KG(self) -> np.ndarray:
        """Float32, around the largest scores, so that they count."""
        sinks = np.linspace(-1, 4, self.num_kv_heads * self.num_groups, dtype=np.float32)
        return sinks.reshape(self.num_kv_heads, self.num_groups)

    def named(self, others: Sequence[Any]) -> dict[str, Any]:
        """The optional operands by name: of a batch's arrays, those behind the lengths."""
        names = ("k_scale", "v_scale") * self.has_scales + ("sinks_KG",) * self.has_sinks
        return dict(zip(names, others, strict=True))

    @property
    def q_shape(self) -> tuple[int, int, int, int]:
        return (self.num_tokens, self.num_kv_heads, self.num_groups, self.head_dim)

    def flops(self) -> float:
        pairs = 0
        for new, length in zip(self.query_lengths, self.kv_lengths, strict=True):
            seen = np.maximum(np.arange(length - new, length) + 1, 0)
            pairs += int(np.minimum(seen, self.window or length).sum())
        return 4.0 * pairs * self.head_dim * self.num_kv_heads * self.num_groups

    def bytes(self) -> float:
        keys = sum(min(n, (self.window or n) + self.num_queries - 1) for n in self.kv_lengths)
        return 2.0 * keys * self.num_kv_heads * self.head_dim * jnp.dtype(self.cache_dtype or self.dtype).itemsize


class Places(NamedTuple):
    """Where the rows of a batch lie: in permuted pages, of which page 0 belongs to no row."""

    table_RB: np.ndarray
    query_start_R1: np.ndarray
    kv_length_R: np.ndarray
    is_free_PS: np.ndarray
    """Slots that no row owns. Pages before the window of all of a row's queries are not its own any more."""


def places(batch: Batch, rng: np.random.Generator) -> Places:
    num_rows = len(batch.kv_lengths)
    used = [-(-n // batch.page_size) for n in batch.kv_lengths]
    num_pages = sum(used) + 2
    pages = iter(rng.permutation(num_pages - 1) + 1)
    table_RB = np.zeros((num_rows, batch.width), np.int32)
    is_free_PS = np.ones((num_pages, batch.page_size), bool)
    for row, length in enumerate(batch.kv_lengths):
        table_RB[row, : used[row]] = [next(pages) for _ in range(used[row])]
        new = batch.query_lengths[row]
        first_page = 0 if batch.window is None else max(0, length - new - batch.window + 1) // batch.page_size
        table_RB[row, :first_page] = 0
        slots = np.arange(first_page * batch.page_size, length)
        is_free_PS[table_RB[row, slots // batch.page_size], slots % batch.page_size] = False
    query_start_R1 = np.concatenate([[0], np.cumsum(batch.query_lengths)]).astype(np.int32)
    return Places(table_RB, query_start_R1, np.array(batch.kv_lengths, np.int32), is_free_PS)


def call(module: Any, batch: Batch, **options: Any) -> Callable[..., jax.Array]:
    """An implementation (`paged_attention` and `paged_decode`) as a function of the batch's arrays."""

    if batch.num_parts > 1:
        return _in_parts(module, batch, options)

    def run(q, k, v, table, query_start, kv_length, *others):
        named = {**batch.options, **batch.named(others), **options}
        if batch.prompts:
            return module.paged_attention(q, k, v, table, query_start, kv_length, **named)
        several = {"num_queries": batch.num_queries} if batch.num_queries > 1 else {}
        return module.paged_decode(q, k, v, table, kv_length, **several, **named)

    return run


def _in_parts(module: Any, batch: Batch, options: dict[str, Any]) -> Callable[..., jax.Array]:
    """Attention over each part of the keys, combined."""

    def run(q, k, v, *others):
        def of_part(own: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            rank, *pages = own
            return attend_part(module, batch, rank, q, *pages, *others, **options)

        # A loop: as on a device, the rank is known when the program runs.
        ranks = jnp.arange(batch.num_parts, dtype=jnp.int32)
        pages = (jnp.stack(split_pages(batch, x)) for x in (k, v))
        out_C, lse_C = jax.lax.map(of_part, (ranks, *pages))
        return combine(out_C, lse_C, batch.named(others[3:]).get("sinks_KG"))

    return run


def split_pages(batch: Batch, pages_PKSH: jax.Array) -> list[jax.Array]:
    """The slots of keys or values that each part has, [P, K, S / parts, H]."""
    return jnp.split(pages_PKSH, batch.num_parts, axis=2)


def attend_part(
    module: Any, batch: Batch, rank: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, *others: jax.Array, **options: Any
) -> tuple[jax.Array, jax.Array]:
    """The share of the device of this rank in a batch in parts, with its own keys and values."""
    slots = batch.page_size // batch.num_parts
    each = replace(batch, num_parts=1, page_size=slots, has_sinks=False)
    scales = others[3 : len(others) - batch.has_sinks]
    return call(module, each, **options, part=Part(rank, batch.num_parts))(q, k, v, *others[:3], *scales)  # type: ignore[return-value]


# On the device


def make_arrays(batch: Batch, seed: int = 0) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """(queries, (keys, values, table, query starts, lengths)): random."""
    found = places(batch, np.random.default_rng(seed))
    num_pages = len(found.is_free_PS)
    shape = (num_pages, batch.num_kv_heads, batch.page_size, batch.head_dim)
    nowhere = np.zeros((1, 1, 1, 1), bool)
    hole = found.is_free_PS[:, None, :, None] if batch.poison else nowhere
    cache_dtype = batch.cache_dtype or batch.dtype
    drawn = ((shape, cache_dtype, hole), (shape, cache_dtype, hole), (batch.q_shape, batch.dtype, nowhere))
    k, v, q = _random(seed, tuple(each[:2] for each in drawn), [each[2] for each in drawn])
    return q, (
        k,
        v,
        *jax.device_put((found.table_RB, found.query_start_R1, found.kv_length_R)),
        *jax.device_put([np.float32(scale) for scale in SCALES if batch.has_scales]),
        *jax.device_put([batch.sinks_KG] * batch.has_sinks),
    )


@functools.partial(jax.jit, static_argnums=1)
def _random(seed: int, wanted: tuple[tuple[tuple[int, ...], str], ...], holes: list[np.ndarray]) -> list[jax.Array]:
    """Arrays of the wanted shapes and types, NaN in their holes."""

    def draw(key: jax.Array, shape: tuple[int, ...], dtype: str, hole: Any) -> jax.Array:
        drawn = dtype if jnp.dtype(dtype).itemsize > 1 else "float32"
        return jnp.where(hole, jnp.nan, jax.random.normal(key, shape, jnp.dtype(drawn))).astype(dtype)

    keys = jax.random.split(jax.random.key(seed), len(wanted))
    return [draw(key, *each, hole) for key, each, hole in zip(keys, wanted, holes, strict=True)]


def worst_error(batch: Batch, q: jax.Array, constants: tuple[jax.Array, ...], got: jax.Array) -> float:
    """The worst relative error of a token's query head against the reference in float32; NaN if anything, padding too, is not finite.

    At most MAX_TOKENS tokens, spread evenly, are compared: one of a prompt is a decode at its position.
    """
    return float(_worst(batch, q, constants, got, compared(batch)))


def compared(batch: Batch) -> np.ndarray:
    """The compared tokens, their rows and numbers of keys, in chunks: [chunks, 3, tokens of a chunk]."""
    rows = np.repeat(np.arange(len(batch.kv_lengths)), batch.query_lengths)
    start = np.concatenate([[0], np.cumsum(batch.query_lengths)])
    tokens = np.arange(len(rows))
    lengths = np.maximum(np.array(batch.kv_lengths)[rows] - start[rows + 1] + tokens + 1, 0)
    token_bytes = 8 * batch.width * batch.page_size * batch.num_kv_heads * batch.head_dim
    chunk = max(1, min(len(tokens), REFERENCE_BYTES // token_bytes))
    tokens = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), MAX_TOKENS, 32 * chunk)).astype(int))
    # The last chunk begins earlier, so that all have one shape.
    chunks = [tokens[max(0, min(first, len(tokens) - chunk)) :][:chunk] for first in range(0, len(tokens), chunk)]
    return np.stack([[some, rows[some], lengths[some]] for some in chunks]).astype(np.int32)


def worst_of(
    batch: Batch,
    q: jax.Array,
    constants: tuple[jax.Array, ...],
    got: jax.Array,
    places_C3X: Any,
    finish: Callable[[jax.Array], jax.Array] = lambda out_TKGH: out_TKGH,
) -> jax.Array:
    """What `worst_error` says of the compared tokens, as a scalar on the device. finish: what the results went through."""
    k, v, table, _, _, *others = constants

    def of_chunk(places_3X: jax.Array) -> jax.Array:
        token_X, row_X, length_X = places_3X
        options = {**batch.options, **batch.named(others)}
        expected = finish(reference.paged_decode(q[token_X].astype(jnp.float32), k, v, table[row_X], length_X, **options))
        off = jnp.linalg.norm(got[token_X].astype(jnp.float32) - expected, axis=-1)
        size = jnp.linalg.norm(expected, axis=-1)
        return jnp.where(off == 0, 0.0, off / jnp.maximum(size, 1e-6)).max()

    return jnp.where(jnp.isfinite(got).all(), jax.lax.map(of_chunk, places_C3X).max(), jnp.nan)


_worst = jax.jit(worst_of, static_argnums=0, compiler_options=UNTUNED)
