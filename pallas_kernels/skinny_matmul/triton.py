"""Products of few rows with a weight that is read once, by Pallas-Triton, with the operations around them in the same kernel.

    weight [D, N]       N ->  tile 0   tile 1   ...            x [T, D] stays in L2, all its rows are one tile of M >= 16
                 D  split 0 [-------][-------]   program (0, 0), (1, 0), ...      walks D downward in steps of block_k
                 |  split 1 [-------][-------]   program (0, 1), (1, 1), ...
                                |
       one split: epilogue in the program;  more: float32 partial sums -> one small kernel that adds them and does the epilogue

The walk is a pipeline of asynchronous copies, num_stages deep, and bandwidth is all that counts: so the tiles are chosen to have
all programs resident at once (no waves) with enough bytes in flight. The norm costs no kernel: a program sees all of its rows'
x on its way, sums the squares, and scales the products in the end, (x * norm_weight) @ W / rms(x). With splits the sums of squares
are partial too. The result depends on the tile sizes alone, never on timing.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels._compat import arrive, dot_f32, load, num_cores, store, triton_call

MAX_ROWS = 64
"""The kernels take 128 as well; from 65 on the product is left to XLA until it is measured to be slower."""
STEP_BYTES = 16 << 10
"""Of a weight that a program takes in per step."""
PIPELINE_BYTES = 192 << 10
"""Shared memory of a core, of its 227 KB, for copies in flight; of two programs where there are more programs than cores."""
COMBINE_ROWS, COMBINE_COLUMNS = 8, 128


@dataclass(frozen=True)
class Tiles:
    """Sizes of one product: block_n weight columns (of each of gate and up) times block_k contracted values per step."""

    block_n: int
    block_k: int
    num_splits: int = 1
    num_warps: int = 4
    num_stages: int = 4


def supports(*, platform: str, dtype: DTypeLike, num_rows: int, interpret: bool = False) -> bool:
    """Whether the kernels take rows of this type, on this platform."""
    if platform != "gpu" and not interpret:
        return False
    return jnp.dtype(dtype) in (jnp.float32, jnp.bfloat16) and 1 <= num_rows <= MAX_ROWS


def pick_tiles(
    num_rows: int, d: int, n: int, *, itemsize: int = 2, num_parts: int = 1, weight_dtype: DTypeLike = jnp.bfloat16
) -> Tiles:
    """Sizes for [num_rows, d] times a weight of d by n; with two parts, by n columns each; itemsize is that of x.

    Columns: as wide as leaves most of the chip a program. Not so narrow that x, which every program reads, is more than half of
    the weight's tile; what is then missing in programs, splits make up for. Depth: as many copies in flight as fit a core, up to five.
    """
    block_m = _padded_rows(num_rows, weight_dtype)
    enough = num_cores() * 7 // 10
    # Columns of all parts; float32 goes without tensor cores, and registers run out sooner.
    widest = 256 if itemsize == 2 else min(64, 2048 // block_m)
    narrowest = min(128, widest, 2 * block_m)
    widths = [width for width in (128, 64, 32, 16) if narrowest <= width * num_parts <= widest]
    block_n = next((width for width in widths if pl.cdiv(n, width) >= enough), widths[-1])
    num_splits = 1
    while pl.cdiv(n, block_n) * num_splits < enough and d // (2 * num_splits) >= 256:
        num_splits *= 2
    block_k = max(128 // itemsize, min(256, STEP_BYTES // (block_n * num_parts * itemsize), 8192 // block_m))
    step_bytes = block_k * (block_n * num_parts + block_m) * itemsize
    num_buffers = PIPELINE_BYTES // step_bytes
    if pl.cdiv(n, block_n) * num_splits > num_cores():
        num_buffers //= 2
    # The tensor cores' instruction for 64 rows reads the weight where it lies: as many buffers as stages, else one less.
    num_stages = num_buffers if block_m >= 64 else num_buffers + 1
    return Tiles(
        block_n=block_n,
        block_k=block_k,
        num_splits=num_splits,
        num_warps=8 if block_m * block_n * num_parts > 64 * 256 else 4,
        num_stages=max(2, min(6, num_stages)),
    )


def norm_matmul(
    x_TD: jax.Array,
    weight_DF: jax.Array,
    *,
    norm_weight_D: jax.Array | None = None,
    eps: float = 0.0,
    bias_F: jax.Array | None = None,
    weight_scale_F: jax.Array | None = None,
    interpret: bool = False,
    tiles: Tiles | None = None,
) -> jax.Array:
    operands = _Operands(x=x_TD, weight=weight_DF, norm_weight=norm_weight_D, scale=weight_scale_F, bias=bias_F)
    return _product(operands, num_columns=weight_DF.shape[1], dtype=x_TD.dtype, eps=eps, interpret=interpret, tiles=tiles)


def norm_gate_up(
    x_TD: jax.Array,
    weight_D2F: jax.Array,
    *,
    norm_weight_D: jax.Array | None = None,
    eps: float = 0.0,
    bias_2F: jax.Array | None = None,
    weight_scale_2F: jax.Array | None = None,
    interpret: bool = False,
    tiles: Tiles | None = None,
) -> jax.Array:
    d, _, num_columns = weight_D2F.shape
    operands = _Operands(
        x=x_TD,
        weight=weight_D2F.reshape(d, 2 * num_columns),
        norm_weight=norm_weight_D,
        scale=None if weight_scale_2F is None else weight_scale_2F.reshape(-1),
        bias=None if bias_2F is None else bias_2F.reshape(-1),
    )
    return _product(operands, num_columns=num_columns, dtype=x_TD.dtype, eps=eps, num_parts=2, interpret=interpret, tiles=tiles)


def matmul_residual(
    x_TF: jax.Array,
    weight_FD: jax.Array,
    residual_TD: jax.Array,
    *,
    bias_D: jax.Array | None = None,
    weight_scale_D: jax.Array | None = None,
    interpret: bool = False,
    tiles: Tiles | None = None,
    counters: jax.Array | None = None,
) -> Any:
    """counters: int32 zeros, at least one per tile of columns, given back as zeros beside the result.

    With them the last program of a tile adds the splits, in their order, instead of a second kernel. Donate them, or reuse in order.
    """
    operands = _Operands(x=x_TF, weight=weight_FD, scale=weight_scale_D, bias=bias_D, residual=residual_TD)
    return _product(
        operands, num_columns=weight_FD.shape[1], dtype=residual_TD.dtype, interpret=interpret, tiles=tiles, counters=counters
    )


def norm_logits(
    x_TD: jax.Array,
    weight_VD: jax.Array,
    *,
    norm_weight_D: jax.Array | None = None,
    eps: float = 0.0,
    weight_scale_V: jax.Array | None = None,
    interpret: bool = False,
    tiles: Tiles | None = None,
) -> jax.Array:
    operands = _Operands(x=x_TD, weight=weight_VD, norm_weight=norm_weight_D, scale=weight_scale_V)
    return _product(
        operands,
        num_columns=weight_VD.shape[0],
        dtype=jnp.dtype(jnp.float32),
        eps=eps,
        is_transposed=True,
        interpret=interpret,
        tiles=tiles,
    )


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("x", "weight", "norm_weight", "scale", "bias", "residual"),
    meta_fields=(),
)
@dataclass(frozen=True)
class _Operands:
    """What a product reads, as arrays outside a kernel and as references in it; absent ones are None."""

    x: Any
    """[T, D]"""
    weight: Any = None
    """[D, C * N] or transposed; C = 2 for gate and up."""
    norm_weight: Any = None
    """[D]"""
    scale: Any = None
    """[C * N]"""
    bias: Any = None
    """[C * N]"""
    residual: Any = None
    """[T, N]"""


@dataclass(frozen=True)
class _Plan:
    """All that is static of a product."""

    num_contracted: int
    num_columns: int
    num_parts: int
    """2 for gate and up, which are num_columns each."""
    is_transposed: bool
    is_normed: bool
    eps: float
    tiles: Tiles


@functools.partial(jax.jit, static_argnames=("num_columns", "dtype", "num_parts", "is_transposed", "eps", "interpret", "tiles"))
def _product(
    operands: _Operands,
    *,
    num_columns: int,
    dtype: DTypeLike,
    num_parts: int = 1,
    is_transposed: bool = False,
    eps: float = 0.0,
    interpret: bool,
    tiles: Tiles | None,
    counters: jax.Array | None = None,
) -> Any:
    """A jit of its own, though called inside a step's program: layers that are alike share one trace and one lowering."""
    num_rows, num_contracted = operands.x.shape
    if tiles is None:
        tiles = pick_tiles(
            num_rows,
            num_contracted,
            num_columns,
            itemsize=operands.x.dtype.itemsize,
            num_parts=num_parts,
            weight_dtype=operands.weight.dtype,
        )
    plan = _Plan(num_contracted, num_columns, num_parts, is_transposed, operands.norm_weight is not None, eps, tiles)
    out_shape = jax.ShapeDtypeStruct((num_rows, num_columns), dtype)
    partial_shapes: tuple[jax.ShapeDtypeStruct, ...] = (
        jax.ShapeDtypeStruct((tiles.num_splits, num_rows, num_parts * num_columns), jnp.float32),
        jax.ShapeDtypeStruct((tiles.num_splits, num_rows), jnp.float32),
    )
    partial_shapes = partial_shapes if plan.is_normed else partial_shapes[:1]
    leaves, tree = jax.tree.flatten(operands)
    stream = functools.partial(
        triton_call,
        functools.partial(_stream_kernel, tree=tree, plan=plan, interpret=interpret),
        name="skinny_matmul",
        grid=(pl.cdiv(num_columns, tiles.block_n), tiles.num_splits),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        interpret=interpret,
    )
    if tiles.num_splits == 1:
        result = stream(out_shape=out_shape)(*leaves)
        return result if counters is None else (result, counters)
    if counters is not None:
        num_tiles = pl.cdiv(num_columns, tiles.block_n)
        assert counters.shape[0] >= num_tiles, f"{counters.shape[0]} counters for {num_tiles} tiles"
        out_shapes = (out_shape, jax.ShapeDtypeStruct(counters.shape, counters.dtype), *partial_shapes)
        return stream(out_shape=out_shapes, input_output_aliases={len(leaves): 1})(*leaves, counters)[:2]
    result = stream(out_shape=partial_shapes)(*leaves)
    # x and the weight have done their part.
    leaves, tree = jax.tree.flatten(replace(operands, x=None, weight=None, norm_weight=None))
    return triton_call(
        functools.partial(_combine_kernel, tree=tree, plan=plan),
        name="skinny_matmul_combine",
        grid=(pl.cdiv(num_columns, COMBINE_COLUMNS), pl.cdiv(num_rows, COMBINE_ROWS)),
        out_shape=out_shape,
        num_warps=4,
        num_stages=1,
        interpret=interpret,
    )(*result, *leaves)


def _padded_rows(num_rows: int, weight_dtype: DTypeLike = jnp.bfloat16) -> int:
    """The rows of a tile: a power of two, at least the 16 of a tensor core's smallest instruction.

    The one for 64 rows takes the weight from shared memory as it lies; for the small one single bytes would have to be transposed.
    """
    smallest = 64 if jnp.dtype(weight_dtype).itemsize == 1 else 16
    return max(smallest, 1 << (num_rows - 1).bit_length())


def _stream_kernel(*refs: Any, tree: Any, plan: _Plan, interpret: bool) -> None:
    """One tile of columns over one split of the contracted dimension."""
    operands = tree.unflatten(refs[: tree.num_leaves])
    out_refs = refs[tree.num_leaves :]
    tiles = plan.tiles
    num_rows, d = operands.x.shape
    column_tile, split = pl.program_id(0), pl.program_id(1)
    row_M = jnp.arange(_padded_rows(num_rows, operands.weight.dtype))
    column_n = column_tile * tiles.block_n + jnp.arange(tiles.block_n)
    in_rows_M = None if num_rows == row_M.shape[0] else row_M < num_rows
    in_columns_n = None if plan.num_columns % tiles.block_n == 0 else column_n < plan.num_columns
    num_steps = pl.cdiv(d, tiles.block_k)
    steps_per_split = pl.cdiv(num_steps, tiles.num_splits)

    def step(index, carry):
        sums, squares_M = carry
        k = index * tiles.block_k + jnp.arange(tiles.block_k)
        in_d_k = None if d % tiles.block_k == 0 else k < d
        x_Mk = _load(operands.x.at[row_M[:, None], k[None, :]], _outer(in_rows_M, in_d_k, row_M, k))
        if plan.is_normed:
            wide_Mk = x_Mk.astype(jnp.float32)
            squares_M += jnp.sum(wide_Mk * wide_Mk, axis=1)
            gain_k = _load(operands.norm_weight.at[k], in_d_k)
            x_Mk = (wide_Mk * gain_k.astype(jnp.float32)[None, :]).astype(x_Mk.dtype)
        added = []
        for part, sum_Mn in enumerate(sums):
            column = part * plan.num_columns + column_n
            if plan.is_transposed:
                at = operands.weight.at[column[:, None], k[None, :]]
                w_kn = _load(at, _outer(in_columns_n, in_d_k, column_n, k)).astype(x_Mk.dtype).T
            else:
                at = operands.weight.at[k[:, None], column[None, :]]
                w_kn = _load(at, _outer(in_d_k, in_columns_n, k, column_n)).astype(x_Mk.dtype)
            added.append(sum_Mn + dot_f32(x_Mk, w_kn))
        return tuple(added), squares_M

    zeros_Mn = jnp.zeros((row_M.shape[0], tiles.block_n), jnp.float32)
    begin = split * steps_per_split
    end = jnp.minimum(begin + steps_per_split, num_steps)
    carry = ((zeros_Mn,) * plan.num_parts, jnp.zeros(row_M.shape, jnp.float32) if plan.is_normed else None)
    if tiles.num_splits == 1:
        begin, end = 0, num_steps
    sums, squares_M = lax.fori_loop(begin, end, step, carry)

    mask_Mn = _outer(in_rows_M, in_columns_n, row_M, column_n)
    at_Mn = (row_M[:, None], column_n[None, :])
    if tiles.num_splits == 1:
        out_Mn = _finish(operands, plan, sums, squares_M, row_M, column_n, mask_Mn)
        store(out_refs[0].at[*at_Mn], out_Mn.astype(out_refs[0].dtype), mask=mask_Mn)
        return
    has_counters = len(out_refs) > (2 if plan.is_normed else 1)
    partial_refs = out_refs[3:] if has_counters else out_refs
    for part, sum_Mn in enumerate(sums):
        store(partial_refs[0].at[split, row_M[:, None], part * plan.num_columns + column_n[None, :]], sum_Mn, mask=mask_Mn)
    if plan.is_normed:
        # Every tile of columns has the same sums of squares, and writes them.
        store(partial_refs[1].at[split, row_M], squares_M, mask=in_rows_M)
    if not has_counters:
        return
    _in, out_ref, counters_ref = out_refs[:3]  # the counters, aliased, are there twice
    is_last = arrive(counters_ref, column_tile, interpret=interpret) == tiles.num_splits - 1

    @pl.when(is_last)
    def _():
        sums, squares_M = _add_splits(partial_refs, plan, row_M, column_n, in_rows_M, mask_Mn)
        out_Mn = _finish(operands, plan, sums, squares_M, row_M, column_n, mask_Mn)
        store(out_ref.at[*at_Mn], out_Mn.astype(out_ref.dtype), mask=mask_Mn)
        store(counters_ref.at[column_tile], jnp.int32(0))  # for the next product


def _add_splits(
    partial_refs: tuple[Any, ...],
    plan: _Plan,
    row_m: jax.Array,
    column_n: jax.Array,
    in_rows_m: jax.Array | None,
    mask_mn: jax.Array | None,
) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """Sums of each part, and of squares if there are any, over all splits in order: whoever adds them gets the same."""
    splits = range(plan.tiles.num_splits)

    def total(part: int) -> jax.Array:
        at = (row_m[:, None], part * plan.num_columns + column_n[None, :])
        return functools.reduce(jnp.add, [_load(partial_refs[0].at[split, *at], mask_mn) for split in splits])

    squares_m = None
    if plan.is_normed:
        squares = [_load(partial_refs[1].at[split, row_m], in_rows_m) for split in splits]
        squares_m = functools.reduce(jnp.add, squares)
    return tuple(total(part) for part in range(plan.num_parts)), squares_m


def _combine_kernel(*refs: Any, tree: Any, plan: _Plan) -> None:
    """Adds the splits of a tile and finishes it."""
    num_partials = 2 if plan.is_normed else 1
    partial_refs, operands, out_ref = refs[:num_partials], tree.unflatten(refs[num_partials:-1]), refs[-1]
    num_rows = out_ref.shape[0]
    row_m = pl.program_id(1) * COMBINE_ROWS + jnp.arange(COMBINE_ROWS)
    column_n = pl.program_id(0) * COMBINE_COLUMNS + jnp.arange(COMBINE_COLUMNS)
    in_rows_m = row_m < num_rows
    mask_mn = in_rows_m[:, None] & (column_n < plan.num_columns)[None, :]
    sums, squares_m = _add_splits(partial_refs, plan, row_m, column_n, in_rows_m, mask_mn)
    out_mn = _finish(operands, plan, sums, squares_m, row_m, column_n, mask_mn)
    store(out_ref.at[row_m[:, None], column_n[None, :]], out_mn.astype(out_ref.dtype), mask=mask_mn)


def _finish(
    operands: _Operands,
    plan: _Plan,
    sums: tuple[jax.Array, ...],
    squares_m: jax.Array | None,
    row_m: jax.Array,
    column_n: jax.Array,
    mask_mn: jax.Array | None,
) -> jax.Array:
    """The epilogue, in float32: norm, scale and bias of each part, gate times up, residual."""
    in_columns_n = None if plan.num_columns % column_n.shape[0] == 0 else column_n < plan.num_columns
    parts = []
    for part, y_mn in enumerate(sums):
        column = part * plan.num_columns + column_n
        if squares_m is not None:
            y_mn *= lax.rsqrt(squares_m / plan.num_contracted + plan.eps)[:, None]
        if operands.scale is not None:
            y_mn *= _load(operands.scale.at[column], in_columns_n).astype(jnp.float32)[None, :]
        if operands.bias is not None:
            y_mn += _load(operands.bias.at[column], in_columns_n).astype(jnp.float32)[None, :]
        parts.append(y_mn)
    y_mn = parts[0] if plan.num_parts == 1 else parts[0] / (1 + jnp.exp(-parts[0])) * parts[1]
    if operands.residual is not None:
        y_mn += _load(operands.residual.at[row_m[:, None], column_n[None, :]], mask_mn).astype(jnp.float32)
    return y_mn


def _load(ref: Any, mask: jax.Array | None) -> jax.Array:
    return load(ref) if mask is None else load(ref, mask=mask, other=0.0)


def _outer(mask_a: jax.Array | None, mask_b: jax.Array | None, a: jax.Array, b: jax.Array) -> jax.Array | None:
    """The mask of a tile from those of its rows and columns; None where nothing is masked."""
    if mask_a is None and mask_b is None:
        return None
    shape = (a.shape[0], b.shape[0])
    masks = [mask_a[:, None]] if mask_a is not None else []
    masks += [mask_b[None, :]] if mask_b is not None else []
    return functools.reduce(jnp.logical_and, [jnp.broadcast_to(mask, shape) for mask in masks])
