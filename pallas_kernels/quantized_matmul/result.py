"""From sums in registers to the result in memory, of either kernel: factors, sums of parts, and the transposition of blocks.

A consumer has float32 sums [64 outputs, M rows] in the registers of wgmma. Where the inputs are divided, the CTAs of a cluster have one
part each: all put their sums into their own shared memory; each then reads some chunks of 8 rows of all, and adds them in the order of
the parts, so that the same bits come out whatever CTA was first.

Where more CTAs are needed than such clusters keep busy, parts are added outside of the kernel; so they are in the interpreter, which
cannot read another CTA's memory. They are written by rows, so that XLA adds them with what takes the product: a norm, mostly.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels import _compat, row_copies
from pallas_kernels.quantized_matmul.fragments import (
    CHUNK,
    FOUR,
    THREADS,
    add_parts,
    by_rows,
    keep_sums,
    synchronize_cluster,
    turn_sums,
)
from pallas_kernels.quantized_matmul.packed import TILE
from pallas_kernels.row_copies import Rows

PARTS = (1, 2, 4)
MAX_PAIRED = 2
"""CTAs of a cluster with which all cores can be busy. On an H100, clusters of four leave some idle: 128 CTAs took two turns, 96 one."""


def type_of(num_rows: int, num_outputs: int, num_parts: int, dtype: DTypeLike, outside: bool) -> jax.ShapeDtypeStruct:
    """Shape and type of the kernel's result: [M, N] of 16 bits, float32 [N, M], or float32 [parts, M, N] that are added outside."""
    if outside and num_parts > 1:
        return jax.ShapeDtypeStruct((num_parts, num_rows, num_outputs), jnp.float32)
    is_turned = jnp.dtype(dtype).itemsize == 2
    return jax.ShapeDtypeStruct((num_rows, num_outputs) if is_turned else (num_outputs, num_rows), dtype)


def axes(size: int, name: str, num_parts: int, outside: bool) -> dict[str, Any]:
    """The arguments of `plgpu.kernel` for a grid of parts, which are a cluster unless they are added outside."""
    if outside or num_parts == 1:
        return {"grid": (size, num_parts), "grid_names": (name, "part")}
    return {"grid": (size,), "grid_names": (name,), "cluster": (num_parts,), "cluster_names": ("part",)}


def finished(returned: jax.Array, factor: jax.Array | None, dtype: DTypeLike) -> jax.Array:
    """[M, N] of what the kernel returned."""
    if returned.ndim == 2:
        return returned if returned.dtype.itemsize == 2 else returned.T
    sums = jnp.sum(returned, axis=0)
    return (sums if factor is None else sums * factor).astype(dtype)


def smem_bytes(num_consumers: int, num_rows: int, num_parts: int, itemsize: int) -> int:
    """Shared memory of `scratch`."""
    if num_parts == 1:
        return itemsize * num_consumers * num_rows * TILE
    own_rows = CHUNK * pl.cdiv(num_rows // CHUNK, num_parts)
    return num_consumers * TILE * (4 * num_rows + itemsize * own_rows)


def scratch(num_consumers: int, num_rows: int, num_parts: int, dtype: DTypeLike, outside: bool) -> dict[str, Any]:
    """Shared memory of a CTA, by the name of its `Result` field."""
    plgpu = _compat.mosaic()
    dtype = jnp.dtype(jnp.float32 if outside and num_parts > 1 else dtype)
    are_added = num_parts > 1 and not outside
    num_chunks = num_rows // CHUNK
    own, size = ((pl.cdiv(num_chunks, num_parts),), CHUNK) if are_added else ((), num_rows)
    if dtype.itemsize == 2:
        swizzled = plgpu.TilingTransform((CHUNK, TILE)), plgpu.SwizzleTransform(128)
        found = {"out_smem": plgpu.SMEM((num_consumers, *own, size, TILE), dtype, transforms=swizzled)}
    else:
        shape = (size, TILE) if outside and num_parts > 1 else (TILE, size)
        found = {"out_smem": plgpu.SMEM((num_consumers, *own, *shape), dtype)}
    if are_added:
        found["sums_smem"] = plgpu.SMEM((num_consumers, num_chunks, THREADS, FOUR), jnp.float32)
    return found


@dataclass(frozen=True)
class Result:
    """The result's references. The grid's axis "part" counts the CTAs of a cluster."""

    out_ref: Any  # as `type_of` says
    factor_ref: Any  # [N] or None
    num_blocks: int
    num_parts: int
    out_smem: Any
    sums_smem: Any = None
    interpret: bool = False

    def write(self, wg: Any, block: Any, rows: Rows, sums: jax.Array) -> None:
        """Of consumer wg, its sums of a block of outputs; a block past the last is left out. Waits for what it wrote before."""
        _compat.mosaic().wait_smem_to_gmem(0, wait_read_only=True)
        if self.sums_smem is not None:
            self._write_parts(wg, block, rows, sums)
            return
        parts = (lax.axis_index("part"),) if self.out_ref.ndim == 3 else ()
        self._store(self.out_smem.at[wg], block, rows, sums if parts else self._with_factor(block, sums), parts)

    def leave(self) -> None:
        """Before the CTA ends, by all of its warpgroups that wrote."""
        _compat.mosaic().wait_smem_to_gmem(0)
        if self.sums_smem is not None:
            synchronize_cluster()

    def pass_by(self) -> None:
        """In place of `write` and `leave`, by a warpgroup that has no sums; once."""
        if self.sums_smem is not None:
            synchronize_cluster()
            synchronize_cluster()

    def _write_parts(self, wg: Any, block: Any, rows: Rows, sums: jax.Array) -> None:
        keep_sums(sums, self.sums_smem.at[wg])
        synchronize_cluster()
        num_chunks = self.sums_smem.shape[1]
        first = lax.rem(lax.axis_index("part") + wg, self.num_parts)  # consumers begin with chunks of other CTAs

        @pl.loop(0, pl.cdiv(num_chunks, self.num_parts))
        def _(turn):
            chunk = turn * self.num_parts + first

            @pl.when(chunk < num_chunks)
            def _():
                whole = self._with_factor(block, add_parts(self.sums_smem.at[wg, chunk], self.num_parts))
                of_chunk = Rows(rows.index * (rows.unit // CHUNK) + chunk, CHUNK, CHUNK)
                self._store(self.out_smem.at[wg, turn], block, of_chunk, whole, ())

    def _with_factor(self, block: Any, sums: jax.Array) -> jax.Array:
        if self.factor_ref is None:
            return sums
        plgpu = _compat.mosaic()
        # A consumer without a block reads the factors of the last.
        own = pl.ds(jnp.minimum(block, self.num_blocks - 1) * TILE, TILE)
        factor = plgpu.load(self.factor_ref.at[own], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
        return sums * by_rows(factor, sums.shape[1])

    def _store(self, out_smem: Any, block: Any, rows: Rows, sums: jax.Array, parts: tuple) -> None:
        plgpu = _compat.mosaic()
        is_turned = out_smem.dtype.itemsize == 2 or bool(parts)
        found = plgpu.layout_cast(sums.astype(out_smem.dtype), plgpu.Layout.WGMMA)
        if parts and not self.interpret:
            turn_sums(found, out_smem)  # Mosaic's own stores turn 16 bits alone
        else:
            (out_smem.transpose((1, 0)) if is_turned else out_smem)[...] = found
        plgpu.commit_smem()

        @pl.when(block < self.num_blocks)
        def _():
            outputs = Rows(block, TILE, TILE)
            first, second = (rows, outputs) if is_turned else (outputs, rows)
            row_copies.store(out_smem, self.out_ref, first, before=parts, after=(second.slice(),))
