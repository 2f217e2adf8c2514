"""Copies of rows between global and shared memory for Mosaic kernels, refused where the hardware would lose rows.

A copy through a tiled reference (`TilingTransform((8, ...))`) sees its rows as [rows / 8, 8] and moves boxes that are 8 rows
long. If it starts r rows past a multiple of 8, the rows i with i % 8 >= 8 - r lie outside of the boxes: a load leaves zeros in
their place, a store leaves them unwritten. Neither JAX nor its interpreter checks this (docs/PREFILL_FAULT.md), so kernels
copy through this module alone: a start is given as a multiple of a unit, and the unit decides whether it can be aligned.
"""

from dataclasses import dataclass
from typing import Any

from jax.experimental import pallas as pl

from pallas_kernels import _compat


@dataclass(frozen=True)
class Rows:
    """`size` rows from row `index * unit` on."""

    index: Any
    """An integer, traced or not."""
    unit: int
    size: int
    used: int | None = None
    """Of a load: the rows that the kernel reads, from the first on; None: all."""

    def slice(self) -> Any:
        return pl.ds(self.index * self.unit, self.size)


def load(
    source: Any,
    rows: Rows,
    target: Any,
    barrier: Any,
    *,
    before: tuple = (),
    after: tuple = (),
    shared_by: str | None = None,
) -> None:
    """Copy source[*before, rows, *after] from global to shared memory; `barrier` completes. Raises ValueError if rows would be lost.

    shared_by: an axis of a cluster, all CTAs of which copy the same to the same place: each reads a part and sends it to all.
    """
    tile = _compat.tile_rows(target)
    fits_in_tile = tile % rows.unit == 0 and rows.used is not None and rows.used <= rows.unit
    if rows.unit % tile and not fits_in_tile:
        raise ValueError(
            f"a load of {rows.size} rows that starts at multiples of {rows.unit} goes through tiles of {tile} rows and would lose "
            f"rows; start at multiples of {tile}, or read no more than the first rows of a unit that divides {tile}"
        )
    _compat.mosaic().copy_gmem_to_smem(source.at[(*before, rows.slice(), *after)], target, barrier, collective_axes=shared_by)


def store(source: Any, target: Any, rows: Rows, *, before: tuple = (), after: tuple = ()) -> None:
    """Copy shared memory to target[*before, rows, *after] in global memory. Raises ValueError if rows would be lost."""
    tile = _compat.tile_rows(source)
    if rows.unit % tile:
        raise ValueError(
            f"a store of {rows.size} rows that starts at multiples of {rows.unit} goes through tiles of {tile} rows and would lose "
            f"rows; start at multiples of {tile}, or store from shared memory without tiles"
        )
    _compat.mosaic().copy_smem_to_gmem(source, target.at[(*before, rows.slice(), *after)])
