"""Both products as Pallas-Triton kernels that read each needed expert's weights once; the plan is part of the kernels for few pairs.

    gate and up   program (part of F, item):  x[token of each pair, D] @ gate_up[expert, :, part, D].T, activation  -> h[pair, part]
    down          program (part of D, item):  h[pair, F]               @ down[expert, part, F].T                    -> out[pair, part]
    weighted sum over the choices of a token, in XLA

An item is all pairs of one expert, in turns of block_m pairs (few pairs: the program finds them itself), or a tile of the plan
(many pairs: see `plan`). Rows of x, h and out are gathered and scattered by pair, so nothing is sorted but indices.

Few tokens: see `triton_few`.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels._compat import load, store, triton_call
from pallas_kernels.grouped_matmul.activation import ACTIVATIONS
from pallas_kernels.grouped_matmul.plan import Plan, local_experts, make_plan, max_tiles, weighted_sum
from pallas_kernels.grouped_matmul.tiles import PLAIN, Kind, Tiles, fitted, products_of_rows
from pallas_kernels.grouped_matmul.triton_few import FewTiling, experts_of_few, pick_few_tiling, takes_few
from pallas_kernels.sizes import next_power_of_two

MAX_FEW_PAIRS = 1024
"""The most pairs of which a program finds its own: of more, the time that a plan in XLA takes matters less."""
_COMPARED = 8192
"""Pairs times rows that a program compares at a time, in registers."""


@dataclass(frozen=True)
class Tiling:
    """Tiles of both kernels, whose block_m is the same."""

    gate_up: Tiles
    """Computes block_n hidden values: as many columns of gate, and of up."""
    down: Tiles


def supports(
    *, platform: str, dtype: DTypeLike, weight_dtype: DTypeLike, width: int, hidden: int, interpret: bool = False
) -> bool:
    # Rows are read in runs of 16 bytes, which begin at multiples of 16 bytes.
    aligned = width * jnp.dtype(dtype).itemsize % 16 == 0 and hidden * jnp.dtype(dtype).itemsize % 16 == 0
    return (
        (platform == "gpu" or interpret)
        and (aligned or interpret)
        and jnp.dtype(dtype) in (jnp.float32, jnp.bfloat16, jnp.float16)
        and jnp.dtype(dtype) == jnp.dtype(weight_dtype)
    )


def pick_tiling(num_pairs: int, num_experts: int, hidden: int, itemsize: int) -> Tiling:
    """Few pairs: small tiles, so that all cores have weights to read. Many: those that use the tensor cores best."""
    if itemsize == 4:  # multiplied in full precision without tensor cores
        tiles = Tiles(16 if num_pairs <= 16 * num_experts else 64, 32, 32, num_stages=2)
        return Tiling(tiles, tiles)
    if num_pairs <= 8 * num_experts:
        tiling = Tiling(Tiles(16, 64, 64, num_stages=5), Tiles(16, 128, 64, num_stages=4))
    elif num_pairs <= 24 * num_experts:
        tiling = Tiling(Tiles(32, 32, 128, num_stages=4), Tiles(32, 64, 128, num_stages=4))
    elif num_pairs <= 96 * num_experts:
        tiling = Tiling(Tiles(64, 64, 64, num_stages=4), Tiles(64, 128, 64, num_stages=4))
    else:
        block_n = 128 if -(-hidden // 128) * 128 <= 1.1 * -(-hidden // 64) * 64 else 64
        tiling = Tiling(Tiles(128, block_n, 64, num_warps=block_n // 16, num_stages=3), Tiles(128, 256, 64, 8, 3))
    return Tiling(fitted(tiling.gate_up, 2, itemsize), fitted(tiling.down, 1, itemsize))


def experts(
    x_TD: jax.Array,
    expert_Tk: jax.Array,
    weight_Tk: jax.Array,
    gate_up_E2FD: Any,
    down_EDF: Any,
    *,
    is_real_T: jax.Array | None = None,
    gate_up_bias_E2F: jax.Array | None = None,
    down_bias_ED: jax.Array | None = None,
    activation: str = "silu",
    first_expert: int | jax.Array = 0,
    interpret: bool = False,
    tiling: Tiling | FewTiling | None = None,
    max_few_pairs: int = MAX_FEW_PAIRS,
    kind: Kind = PLAIN,
) -> jax.Array:
    """tiling: None for the usual one of arrays. max_few_pairs: 0 for a plan in any case. kind: that of the weights."""
    num_experts, width, hidden = down_EDF.shape
    num_tokens, num_choices = expert_Tk.shape
    num_pairs = num_tokens * num_choices
    expert_P = local_experts(expert_Tk, is_real_T, first_expert, num_experts)
    if tiling is None and num_pairs <= max_few_pairs and takes_few(num_tokens, num_choices):
        tiling = pick_few_tiling(x_TD.dtype.itemsize)
    if isinstance(tiling, FewTiling):
        return experts_of_few(
            x_TD,
            expert_P,
            weight_Tk,
            gate_up_E2FD,
            down_EDF,
            gate_up_bias_E2F,
            down_bias_ED,
            activation=activation,
            kind=kind,
            tiling=tiling,
            interpret=interpret,
        )
    tiling = tiling or pick_tiling(num_pairs, num_experts, hidden, x_TD.dtype.itemsize)
    block_m = tiling.gate_up.block_m
    assert block_m == tiling.down.block_m, f"{tiling} has two sizes of tiles of pairs"
    find: Callable[..., None]
    if num_pairs <= max_few_pairs:
        find = functools.partial(_for_pairs_of_expert, num_experts=num_experts)
        tables, num_items = [expert_P], min(num_pairs, num_experts)
    else:
        plan = make_plan(expert_P, num_experts, block_m)
        find, tables, num_items = _for_tile, _tables(plan), max_tiles(num_pairs, num_experts, block_m)
    options: dict[str, Any] = {"find": find, "num_tables": len(tables), "kind": kind}

    def call(kernel: Callable[..., None], name: str, tiles: Tiles, columns: int, out: tuple[int, int], *args: Any) -> Any:
        return triton_call(
            functools.partial(kernel, tiles=tiles, **options),
            name=f"{kind.prefix}_{name}",
            grid=(pl.cdiv(columns, tiles.block_n), num_items),
            out_shape=jax.ShapeDtypeStruct(out, x_TD.dtype),
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
            interpret=interpret,
        )(*tables, *args)

    weights, biases = kind.arrays(gate_up_E2FD), [] if gate_up_bias_E2F is None else [gate_up_bias_E2F]
    options["num_arrays"] = len(weights)
    gate_up = functools.partial(_gate_up_kernel, activation=activation, num_choices=num_choices)
    hidden_PF = call(gate_up, "gate_up", tiling.gate_up, hidden, (num_pairs, hidden), x_TD, *weights, *biases)
    weights, biases = kind.arrays(down_EDF), [] if down_bias_ED is None else [down_bias_ED]
    out_PD = call(_down_kernel, "down", tiling.down, width, (num_pairs, width), hidden_PF, *weights, *biases)
    return weighted_sum(out_PD, expert_P, weight_Tk, num_experts)


def _tables(plan: Plan) -> list[jax.Array]:
    return [plan.pair_P, plan.expert_N, plan.start_N, plan.count_N]


def _for_pairs_of_expert(
    expert_ref: Any, item: jax.Array, block_m: int, do_tile: Callable[..., None], *, num_experts: int
) -> None:
    """Tiles of all pairs of one expert: the one whose number is the item, or, if there are fewer pairs, that of the item's pair."""
    (num_pairs,) = expert_ref.shape
    index_P = jnp.arange(next_power_of_two(num_pairs))
    expert = expert_ref[item] if num_pairs < num_experts else item  # of a pair, perhaps none here
    is_mine_P = load(expert_ref.at[index_P], mask=index_P < num_pairs, other=-1) == expert
    count = jnp.sum(is_mine_P.astype(jnp.int32))
    if num_pairs < num_experts:
        is_first = jnp.sum((is_mine_P & (index_P < item)).astype(jnp.int32)) == 0
        count = jnp.where(is_first & (expert >= 0) & (expert < num_experts), count, 0)
    chunk = min(_COMPARED // block_m, next_power_of_two(num_pairs))

    @pl.loop(0, lax.div(count + (block_m - 1), block_m))
    def _(turn):
        place_M = turn * block_m + jnp.arange(block_m)

        def add_pairs(i: jax.Array, found: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            """Of a chunk: how many are this expert's, and the pairs whose places among these the rows have."""
            num_before, pair_M = found
            index_C = i * chunk + jnp.arange(chunk)
            is_mine_C = load(expert_ref.at[index_C], mask=index_C < num_pairs, other=-1) == expert
            place_C = jnp.where(is_mine_C, num_before + jnp.cumsum(is_mine_C.astype(jnp.int32)) - 1, -1)
            is_pair_MC = place_C[None, :] == place_M[:, None]
            pair_M += jnp.sum(jnp.where(is_pair_MC, index_C[None, :], 0), axis=1)
            return num_before + jnp.sum(is_mine_C.astype(jnp.int32)), pair_M

        none = jnp.int32(0), jnp.zeros(block_m, jnp.int32)
        _, pair_M = (
            add_pairs(jnp.int32(0), none)
            if chunk >= num_pairs
            else lax.fori_loop(0, pl.cdiv(num_pairs, chunk), add_pairs, none)
        )
        # Rows without a pair are not written; the interpreter writes them back, so they must not have the place of another.
        do_tile(expert, jnp.where(place_M < count, pair_M, num_pairs), place_M < count)


def _for_tile(
    pair_ref: Any, expert_ref: Any, start_ref: Any, count_ref: Any, item: jax.Array, block_m: int, do_tile: Callable[..., None]
) -> None:
    """The item's tile of a plan."""
    count = count_ref[item]

    @pl.when(count > 0)
    def _():
        row_M = jnp.arange(block_m)
        pair_M = load(pair_ref.at[start_ref[item] + row_M], mask=row_M < count, other=pair_ref.shape[0])
        do_tile(expert_ref[item], pair_M, row_M < count)


def _gate_up_kernel(
    *refs: Any, find: Any, num_tables: int, kind: Kind, num_arrays: int, tiles: Tiles, activation: str, num_choices: int
) -> None:
    # x [T, D], gate_up [E, 2, F, D], bias [E, 2, F] if there is one, out [P, F]
    tables, (x_ref, *weight_refs), (*bias_ref, out_ref) = _groups(refs, num_tables, 1 + num_arrays)
    first_column, num_columns = pl.program_id(0) * tiles.block_n, out_ref.shape[1]
    column_N = first_column + jnp.arange(tiles.block_n)
    in_columns_N = column_N < num_columns

    def do_tile(expert: jax.Array, pair_M: jax.Array, is_pair_M: jax.Array) -> None:
        token_M, matrices = lax.div(pair_M, num_choices), [(expert, 0), (expert, 1)]
        sums = products_of_rows(kind, tiles, x_ref, token_M, is_pair_M, weight_refs, matrices, first_column, num_columns)
        if bias_ref:
            sums = [
                sum_MN + load(bias_ref[0].at[expert, i, column_N], mask=in_columns_N, other=0.0).astype(jnp.float32)[None, :]
                for i, sum_MN in enumerate(sums)
            ]
        mask_MN = is_pair_M[:, None] & in_columns_N[None, :]
        store(
            out_ref.at[pair_M[:, None], column_N[None, :]], ACTIVATIONS[activation](*sums).astype(out_ref.dtype), mask=mask_MN
        )

    find(*tables, pl.program_id(1), tiles.block_m, do_tile)


def _down_kernel(*refs: Any, find: Any, num_tables: int, kind: Kind, num_arrays: int, tiles: Tiles) -> None:
    # h [P, F], down [E, D, F], bias [E, D] if there is one, out [P, D]
    tables, (x_ref, *weight_refs), (*bias_ref, out_ref) = _groups(refs, num_tables, 1 + num_arrays)
    first_column, num_columns = pl.program_id(0) * tiles.block_n, out_ref.shape[1]
    column_N = first_column + jnp.arange(tiles.block_n)
    in_columns_N = column_N < num_columns

    def do_tile(expert: jax.Array, pair_M: jax.Array, is_pair_M: jax.Array) -> None:
        (sum_MN,) = products_of_rows(kind, tiles, x_ref, pair_M, is_pair_M, weight_refs, [(expert,)], first_column, num_columns)
        if bias_ref:
            sum_MN += load(bias_ref[0].at[expert, column_N], mask=in_columns_N, other=0.0).astype(jnp.float32)[None, :]
        mask_MN = is_pair_M[:, None] & in_columns_N[None, :]
        store(out_ref.at[pair_M[:, None], column_N[None, :]], sum_MN.astype(out_ref.dtype), mask=mask_MN)

    find(*tables, pl.program_id(1), tiles.block_m, do_tile)


def _groups(refs: Sequence[Any], *sizes: int) -> list[Sequence[Any]]:
    """The references in groups of these sizes, and what is left."""
    found = []
    for size in sizes:
        found.append(refs[:size])
        refs = refs[size:]
    return [*found, refs]
