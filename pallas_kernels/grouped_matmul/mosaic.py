"""The experts of a mixture on Hopper GPUs: many tokens by Mosaic kernels over sorted rows, few by those of Triton."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import _compat
from pallas_kernels.grouped_matmul import triton
from pallas_kernels.grouped_matmul.activation import ACTIVATIONS
from pallas_kernels.grouped_matmul.mosaic_many import ALIGNMENT, BLOCK_K, TILE_ROWS, Sizes, grouped_product, pick_sizes
from pallas_kernels.grouped_matmul.plan import local_experts
from pallas_kernels.grouped_matmul.triton_rows import sort_rows, sum_rows

MIN_PAIRS_OF_EXPERT = 32
"""On average: below, tiles of 128 rows would be mostly empty."""


def supports(
    *, platform: str, dtype: DTypeLike, weight_dtype: DTypeLike, width: int, hidden: int, interpret: bool = False
) -> bool:
    """What both kernels take: widths that tiles divide, in 16-bit floats."""
    return (
        (platform == "gpu" or interpret)
        and _compat.has_mosaic()
        and jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)
        and jnp.dtype(dtype) == jnp.dtype(weight_dtype)
        and width % BLOCK_K == 0
        and hidden % BLOCK_K == 0
    )


def experts(
    x_TD: jax.Array,
    expert_Tk: jax.Array,
    weight_Tk: jax.Array,
    gate_up_E2FD: jax.Array,
    down_EDF: jax.Array,
    *,
    is_real_T: jax.Array | None = None,
    gate_up_bias_E2F: jax.Array | None = None,
    down_bias_ED: jax.Array | None = None,
    activation: str = "silu",
    first_expert: int | jax.Array = 0,
    interpret: Any = False,
    min_pairs_of_expert: int = MIN_PAIRS_OF_EXPERT,
    sizes: tuple[Sizes, Sizes] | None = None,
) -> jax.Array:
    """`sizes` of both products, `min_pairs_of_expert` from which on they are Mosaic's."""
    num_experts, width, hidden = down_EDF.shape
    num_tokens, num_choices = expert_Tk.shape
    if num_tokens * num_choices < min_pairs_of_expert * num_experts:
        options: dict[str, Any] = {"is_real_T": is_real_T, "gate_up_bias_E2F": gate_up_bias_E2F, "down_bias_ED": down_bias_ED}
        options |= {"activation": activation, "first_expert": first_expert, "interpret": interpret}
        return triton.experts(x_TD, expert_Tk, weight_Tk, gate_up_E2FD, down_EDF, **options)
    expert_P = local_experts(expert_Tk, is_real_T, first_expert, num_experts)
    rows = sort_rows(x_TD, expert_P, num_experts, TILE_ROWS, ALIGNMENT, interpret=bool(interpret))
    gate_up_sizes, down_sizes = sizes or (pick_sizes(hidden, 2), pick_sizes(width, 1))
    combine = ACTIVATIONS[activation]
    hidden_SF = grouped_product(
        rows.x_SD, gate_up_E2FD, gate_up_bias_E2F, rows, combine, sizes=gate_up_sizes, interpret=interpret
    )
    bias_E1D = None if down_bias_ED is None else down_bias_ED[:, None]
    out_SD = grouped_product(
        hidden_SF, down_EDF[:, None], bias_E1D, rows, lambda sums: sums, sizes=down_sizes, interpret=interpret
    )
    return sum_rows(out_SD, rows.row_P, expert_P, weight_Tk, num_experts, interpret=bool(interpret))
