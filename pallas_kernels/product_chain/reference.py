"""The plain truth: everything in float32, nothing rounded before the results."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.product_chain import xla
from pallas_kernels.product_chain.weights import Weights


def supports(**_: object) -> bool:
    return True


def chain(
    x_TA: jax.Array,
    residual_TD: jax.Array,
    weights: Weights,
    *,
    eps: float,
    upcoming: Sequence[jax.Array] = (),
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    given = x_TA, residual_TD, weights
    x, residual, wide = jax.tree.map(lambda array: array.astype(jnp.float32), given)
    return jax.tree.map(lambda array: array.astype(x_TA.dtype), xla.chain(x, residual, wide, eps=eps))  # type: ignore[no-any-return]
