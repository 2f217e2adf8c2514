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
from pallas_kernels.checking.attention import TOLERANCE, Batch
from pallas_kernels.checking.case import Case
from pallas_kernels.mla_attention import latent_attention, latent_decode


@dataclass(frozen=True)
class Shapes:
    """A model's latent attention on one device."""

    dtype: str
    cache_dtype: str
    num_heads: int
    width: int
    """Values of a token's vector, and below those of its part that is the value."""
    value_dim: int
    page_size: int
    table_width: int
    """Pages in a row of the table."""
    scale: float


def cases(shapes: Shapes, implementation: str, *, interpret: bool) -> list[Case]:
    """A ragged batch, a small one, and decodes of few and of many rows."""
    as_paged = attention_at_start.Shapes(
        dtype=shapes.dtype,
        cache_dtype=shapes.cache_dtype,
        num_kv_heads=1,
        num_groups=shapes.num_heads,
        head_dim=shapes.width,
        page_size=shapes.page_size,
        table_width=shapes.table_width,
        layers=(),
    )
    batches = attention_at_start.batches(as_paged, attention_at_start.Layer(shapes.scale))
    return [
        Case(
            batch.name,
            functools.partial(host_arrays, batch),
            {implementation: call(batch, shapes.value_dim, implementation=implementation, interpret=interpret)},
            functools.partial(host_error, batch),
            max(TOLERANCE[batch.dtype], TOLERANCE.get(batch.cache_dtype, 0.0)),
        )
        for batch in batches
    ]


def call(batch: Batch, value_dim: int, **options: Any) -> Callable[..., jax.Array]:
    """The op as a function of a batch's arrays."""

    def run(q: Any, pages: Any, table: Any, query_start: Any, kv_length: Any) -> jax.Array:
        common = {"value_dim": value_dim, "scale": batch.options["scale"], **options}
        if batch.prompts:
            return latent_attention(q, pages, table, query_start, kv_length, **common)
        return latent_decode(q, pages, table, kv_length, **common)

    return run


def host_arrays(batch: Batch) -> tuple[np.ndarray, tuple[Any, ...]]:
    """(queries, (pages, table, query starts, lengths)), on the host."""
    q, (pages, _, *places) = attention_at_start.host_arrays(batch)
    return q[:, 0], (pages, *places)


def host_error(batch: Batch, q: np.ndarray, constants: tuple[Any, ...], got: Any) -> float:
    """As that of paged attention: the part of the keys that is not the value stands for zeros."""
    pages, *places = constants
    got, values = _beside_zeros(np, pages, np.asarray(got))
    return attention_at_start.host_error(batch, q[:, None], (pages, values, *places), got)


def make_arrays(batch: Batch) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """The same on the device."""
    q, (pages, _, *places) = attention.make_arrays(batch)
    return q[:, 0], (pages, *places)


def worst_error(batch: Batch, q: jax.Array, constants: tuple[jax.Array, ...], got: jax.Array) -> float:
    """The same on the device."""
    pages, *places = constants
    got, values = _beside_zeros(jnp, pages, got)
    return attention.worst_error(batch, q[:, None], (pages, values, *places), got)


def _beside_zeros(xp: Any, pages: Any, got: Any) -> tuple[Any, Any]:
    """The result [T, 1, N, C] and the values [P, 1, S, C], both with zeros where keys have more than values."""
    value_dim, width = got.shape[-1], pages.shape[-1]
    padding = ((0, 0), (0, 0), (0, width - value_dim))
    return xp.pad(got, padding)[:, None], xp.where(xp.arange(width) < value_dim, pages, xp.zeros((), pages.dtype))
