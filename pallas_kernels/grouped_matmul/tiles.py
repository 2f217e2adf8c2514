"""What the experts' Triton kernels share: tiles of gathered rows times an expert's weights."""

from collections.abc import Sequence
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


def products(
    tiles: Tiles,
    x_ref: Any,
    row_M: jax.Array,
    is_row_M: jax.Array,
    weight_ref: Any,
    matrices: Sequence[tuple[Any, ...]],
    column_N: jax.Array,
    in_columns_N: jax.Array,
) -> list[jax.Array]:
    """float32 [M, N]: x[row] @ weight[matrix, column].T for each of the matrices, given by their leading indices."""
    num_terms = x_ref.shape[1]

    def step(i: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
        term_K = i * tiles.block_k + jnp.arange(tiles.block_k)
        in_terms_1K = (term_K < num_terms)[None, :]
        x_MK = load(x_ref.at[row_M[:, None], term_K[None, :]], mask=is_row_M[:, None] & in_terms_1K, other=0.0)
        mask_NK = in_columns_N[:, None] & in_terms_1K
        weights = [load(weight_ref.at[(*m, column_N[:, None], term_K[None, :])], mask=mask_NK, other=0.0) for m in matrices]
        return [sum_MN + dot_f32(x_MK, weight_NK.T) for sum_MN, weight_NK in zip(sums, weights, strict=True)]

    zeros = jnp.zeros((tiles.block_m, tiles.block_n), jnp.float32)
    return lax.fori_loop(0, pl.cdiv(num_terms, tiles.block_k), step, [zeros for _ in matrices])
