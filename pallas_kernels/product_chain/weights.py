"""The weights of the dense layers between two attentions."""

from dataclasses import dataclass
from functools import partial

import jax


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["out_AD", "mlp_norm_D", "gate_up_DCF", "down_FD", "next_norm_D", "qkv_DQ"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Weights:
    """More dimension letters than those of the package: A values of all query heads, C gate and up, Q of queries, keys and values."""

    gate_up_DCF: jax.Array
    """[D, 2, F]"""
    down_FD: jax.Array
    out_AD: jax.Array | None = None
    """The projection of attention's result; None: the chain begins at the MLP."""
    mlp_norm_D: jax.Array | None = None
    """With out_AD."""
    qkv_DQ: jax.Array | None = None
    """The projections of the next layer; None: the chain ends with the MLP."""
    next_norm_D: jax.Array | None = None
    """With qkv_DQ."""
