"""Matrix products of few rows, as in a decode step, with what stands before and after them: one signature, several implementations.

    norm_matmul       norm(x) @ W + bias                              -> [T, F] of x's type
    norm_gate_up      silu(gate) * up, (gate, up) = norm(x) @ W       -> [T, F] of x's type
    matmul_residual   residual + x @ W + bias                         -> [T, D] of the residual's type
    norm_logits       norm(x) @ W^T, W's rows being the vocabulary    -> [T, V] float32

norm(x) is x / rms(x) * norm_weight over the last dimension, eps added to the mean square; x itself where norm_weight_D is None.
A weight has x's type, or is float8_e4m3fn with a float32 scale per output column: W is then weight * weight_scale.
Sums are float32, and so is all that follows until the result is rounded once; float32 operands are multiplied in full precision.
"""

import importlib
from types import ModuleType

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

IMPLEMENTATIONS = {
    "reference": "pallas_kernels.skinny_matmul.reference",
    "triton": "pallas_kernels.skinny_matmul.triton",
}
"""Each module has the four functions and supports(platform, dtype, num_rows, interpret)."""


def norm_matmul(
    x_TD: jax.Array,
    weight_DF: jax.Array,
    *,
    norm_weight_D: jax.Array | None = None,
    eps: float = 0.0,
    bias_F: jax.Array | None = None,
    weight_scale_F: jax.Array | None = None,
    implementation: str = "reference",
    interpret: bool = False,
) -> jax.Array:
    """norm(x) @ W + bias -> [T, F]. interpret: run a Pallas kernel as plain JAX, on any platform."""
    return _resolve(implementation, x_TD, weight_DF, weight_scale_F, interpret).norm_matmul(
        x_TD,
        weight_DF,
        norm_weight_D=norm_weight_D,
        eps=eps,
        bias_F=bias_F,
        weight_scale_F=weight_scale_F,
        interpret=interpret,
    )


def norm_gate_up(
    x_TD: jax.Array,
    weight_D2F: jax.Array,
    *,
    norm_weight_D: jax.Array | None = None,
    eps: float = 0.0,
    bias_2F: jax.Array | None = None,
    weight_scale_2F: jax.Array | None = None,
    implementation: str = "reference",
    interpret: bool = False,
) -> jax.Array:
    """silu(gate) * up of norm(x), where gate is column 0 of W's second dimension and up column 1 -> [T, F]."""
    return _resolve(implementation, x_TD, weight_D2F, weight_scale_2F, interpret).norm_gate_up(
        x_TD,
        weight_D2F,
        norm_weight_D=norm_weight_D,
        eps=eps,
        bias_2F=bias_2F,
        weight_scale_2F=weight_scale_2F,
        interpret=interpret,
    )


def matmul_residual(
    x_TF: jax.Array,
    weight_FD: jax.Array,
    residual_TD: jax.Array,
    *,
    bias_D: jax.Array | None = None,
    weight_scale_D: jax.Array | None = None,
    implementation: str = "reference",
    interpret: bool = False,
) -> jax.Array:
    """residual + x @ W + bias -> [T, D]."""
    return _resolve(implementation, x_TF, weight_FD, weight_scale_D, interpret).matmul_residual(
        x_TF, weight_FD, residual_TD, bias_D=bias_D, weight_scale_D=weight_scale_D, interpret=interpret
    )


def norm_logits(
    x_TD: jax.Array,
    weight_VD: jax.Array,
    *,
    norm_weight_D: jax.Array | None = None,
    eps: float = 0.0,
    weight_scale_V: jax.Array | None = None,
    implementation: str = "reference",
    interpret: bool = False,
) -> jax.Array:
    """norm(x) @ W^T -> float32 [T, V]."""
    return _resolve(implementation, x_TD, weight_VD, weight_scale_V, interpret).norm_logits(
        x_TD, weight_VD, norm_weight_D=norm_weight_D, eps=eps, weight_scale_V=weight_scale_V, interpret=interpret
    )


def supports(implementation: str, *, dtype: DTypeLike, weight_dtype: DTypeLike, num_rows: int, interpret: bool = False) -> bool:
    """Whether an implementation takes a case, on the platform it is made for."""
    is_known_weight = jnp.dtype(weight_dtype) in (jnp.dtype(dtype), jnp.dtype(jnp.float8_e4m3fn))
    module = importlib.import_module(IMPLEMENTATIONS[implementation])
    return is_known_weight and module.supports(platform="gpu", dtype=dtype, num_rows=num_rows, interpret=interpret)


def _resolve(implementation: str, x: jax.Array, weight: jax.Array, scale: jax.Array | None, interpret: bool) -> ModuleType:
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"no skinny matmul {implementation!r}; there are {', '.join(IMPLEMENTATIONS)}")
    if (weight.dtype == jnp.float8_e4m3fn) != (scale is not None):
        raise ValueError(f"a weight of {weight.dtype} {'needs' if scale is None else 'takes no'} weight_scale")
    # An explicit choice is not held to the platform: a program may be compiled here for a GPU elsewhere.
    if not supports(implementation, dtype=x.dtype, weight_dtype=weight.dtype, num_rows=x.shape[0], interpret=interpret):
        raise ValueError(
            f"skinny matmul {implementation!r} does not take {x.shape[0]} rows of {x.dtype} with a weight of {weight.dtype}; "
            "use 'reference'"
        )
    return importlib.import_module(IMPLEMENTATIONS[implementation])
