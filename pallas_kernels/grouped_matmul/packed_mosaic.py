"""The experts of a mixture with weights in 4 or 8 bits on Hopper GPUs, multiplied as they are stored.

    few tokens    a tile for each chosen expert, with a row for every token (see `triton_choices`)
    others        tiles of rows sorted by expert, which become longer as experts have more rows (see `triton_rows`)

Both products are those of `packed_product`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import _compat
from pallas_kernels.grouped_matmul.activation import ACTIVATIONS
from pallas_kernels.grouped_matmul.packed import PackedExperts, type_of
from pallas_kernels.grouped_matmul.packed_product import ALIGNMENT, Sizes, grouped_product
from pallas_kernels.grouped_matmul.plan import local_experts
from pallas_kernels.grouped_matmul.triton_choices import tile_of_each_expert
from pallas_kernels.grouped_matmul.triton_few import takes_few
from pallas_kernels.grouped_matmul.triton_rows import sort_rows, sum_rows
from pallas_kernels.quantized_matmul import DECODERS

TILE_ROWS = (16, 32, 64, 128)
"""Of sorted rows. Of a tile with more, sums would not fit into registers."""


def supports(
    *, platform: str, dtype: DTypeLike, weight_dtype: DTypeLike | str, width: int, hidden: int, interpret: bool = False
) -> bool:
    """Activations in bfloat16, which all numbers are decoded to."""
    is_packed = str(weight_dtype) in map(type_of, DECODERS)
    return (platform == "gpu" or interpret) and _compat.has_mosaic() and jnp.dtype(dtype) == jnp.bfloat16 and is_packed


def pick_tile_rows(num_pairs: int, num_experts: int) -> int:
    """The shortest tiles that hold twice the pairs that an expert has on average."""
    return next((rows for rows in TILE_ROWS if rows * num_experts >= 2 * num_pairs), TILE_ROWS[-1])


def experts(
    x_TD: jax.Array,
    expert_Tk: jax.Array,
    weight_Tk: jax.Array,
    gate_up_E2FD: PackedExperts,
    down_EDF: PackedExperts,
    *,
    is_real_T: jax.Array | None = None,
    gate_up_bias_E2F: jax.Array | None = None,
    down_bias_ED: jax.Array | None = None,
    activation: str = "silu",
    first_expert: int | jax.Array = 0,
    interpret: Any = False,
    tile_rows: int | None = None,
    sizes: tuple[Sizes, Sizes] | tuple[None, None] = (None, None),
) -> jax.Array:
    """tile_rows: of sorted rows, of few tokens too; None for the usual form. sizes: of both products."""
    num_experts, is_interpreted = len(down_EDF), bool(interpret)
    expert_P = local_experts(expert_Tk, is_real_T, first_expert, num_experts)
    is_few = tile_rows is None and takes_few(*expert_Tk.shape)
    if is_few:
        tile_rows = -(-len(x_TD) // ALIGNMENT) * ALIGNMENT
        rows = tile_of_each_expert(x_TD, expert_P, num_experts, tile_rows, interpret=is_interpreted)
        num_rows = tile_rows * len(rows.expert_N)
    else:
        tile_rows = tile_rows or pick_tile_rows(expert_Tk.size, num_experts)
        rows = sort_rows(x_TD, expert_P, num_experts, tile_rows, ALIGNMENT, interpret=is_interpreted)
        num_rows = len(rows.x_SD)
    options: dict[str, Any] = {"tile_rows": tile_rows, "num_rows": num_rows, "interpret": interpret}
    combine = ACTIVATIONS[activation]
    hidden_SF = grouped_product(
        rows.x_SD, gate_up_E2FD, gate_up_bias_E2F, rows, combine, is_shared=is_few, sizes=sizes[0], **options
    )
    out_SD = grouped_product(hidden_SF, down_EDF, down_bias_ED, rows, lambda sums: sums, sizes=sizes[1], **options)
    return sum_rows(out_SD, rows.row_P, expert_P, weight_Tk, num_experts, interpret=is_interpreted)
