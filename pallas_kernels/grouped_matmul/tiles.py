"""What the experts' Triton kernels share: tiles of gathered rows times an expert's weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels._compat import dot_f32, load

SMALL_SMEM_BYTES = 96 << 10


@dataclass(frozen=True)
class Tiles:
    """A program computes block_n columns of block_m pairs, block_k terms at a time."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 4


def fitted(tiles: Tiles, num_matrices: int, itemsize: int) -> Tiles:
    """With as many stages, two at least, as the shared memory holds. num_matrices: those that a program reads columns of."""
    if _has_large_shared_memory():
        return tiles
    stage_bytes = itemsize * tiles.block_k * (tiles.block_m + num_matrices * tiles.block_n)
    return replace(tiles, num_stages=max(2, min(tiles.num_stages, SMALL_SMEM_BYTES // stage_bytes)))


def _has_large_shared_memory() -> bool:
    """Whether a block can have more than 99 KiB: on the data centers' GPUs, and where programs are compiled for one elsewhere."""
    device = jax.local_devices()[0]
    return device.platform != "gpu" or str(getattr(device, "compute_capability", "9.0")) in ("8.0", "9.0", "10.0", "10.3")


@dataclass(frozen=True)
class Kind:
    """A kind of weights, and how tiles of rows are multiplied with it."""

    prefix: str
    """Of kernels' names."""
    arrays: Callable[[Any], list[jax.Array]]
    """Of a weight [..., N, K], all but the last two dimensions the same."""
    products: Callable[..., list[jax.Array]]
    """`products` below, or what takes its place."""


At = Callable[[jax.Array], tuple[jax.Array, Sequence[tuple[Any, ...]], Callable[[jax.Array], jax.Array]]]
"""What a step multiplies: which block_k terms, the matrices by their leading indices, and a function that loads x [M, K] of terms;
0 for rows that there are not and for terms past the last."""


def products(
    tiles: Tiles,
    steps: tuple[Any, Any],
    at: At,
    weight_refs: Sequence[Any],
    num_matrices: int,
    num_terms: int,
    first_column: jax.Array,
    num_columns: int,
) -> list[jax.Array]:
    """float32 [M, N] for each of the matrices: sums over the steps [begin, end) of x @ weight[matrix, first_column + N].T."""
    (weight_ref,) = weight_refs
    column_N = first_column + jnp.arange(tiles.block_n)
    in_columns_N = column_N < num_columns

    def step(i: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
        place, matrices, load_x = at(i)
        term_K = place * tiles.block_k + jnp.arange(tiles.block_k)
        x_MK = load_x(term_K)
        mask_NK = in_columns_N[:, None] & (term_K < num_terms)[None, :]
        weights = [load(weight_ref.at[(*m, column_N[:, None], term_K[None, :])], mask=mask_NK, other=0.0) for m in matrices]
        return [sum_MN + dot_f32(x_MK, weight_NK.T) for sum_MN, weight_NK in zip(sums, weights, strict=True)]

    return lax.fori_loop(*steps, step, [jnp.zeros((tiles.block_m, tiles.block_n), jnp.float32)] * num_matrices)


PLAIN = Kind("experts", lambda weight: [weight], products)


def products_of_rows(
    kind: Kind,
    tiles: Tiles,
    x_ref: Any,
    row_M: jax.Array,
    is_row_M: jax.Array,
    weight_refs: Sequence[Any],
    matrices: Sequence[tuple[Any, ...]],
    first_column: jax.Array,
    num_columns: int,
) -> list[jax.Array]:
    """float32 [M, N]: x[row] @ weight[matrix, first_column + N].T for each of the matrices, given by their leading indices."""
    num_terms = x_ref.shape[1]

    def load_x(term_K: jax.Array) -> jax.Array:
        mask_MK = is_row_M[:, None] & (term_K < num_terms)[None, :]
        return load(x_ref.at[row_M[:, None], term_K[None, :]], mask=mask_MK, other=0.0)

    steps = 0, pl.cdiv(num_terms, tiles.block_k)
    return kind.products(
        tiles, steps, lambda i: (i, matrices, load_x), weight_refs, len(matrices), num_terms, first_column, num_columns
    )
