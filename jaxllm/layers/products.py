"""How a layer's matrix products are computed together with the norm before and the residual after them.

The model says what is to be computed; the step says by whom: `Products` is plain JAX, `SkinnyProducts` has kernels for few rows.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from jaxllm.layers.linear import Linear, precision_of
from jaxllm.layers.norm import RMSNorm
from jaxllm.quantization.fp8 import Fp8Weight
from pallas_kernels import skinny_matmul


class Products:
    """Each product for itself; XLA fuses what it can."""

    def norm_linear(self, norm: RMSNorm, linear: Linear, x_TD: Array) -> Array:
        """linear(norm(x))"""
        return linear(norm(x_TD))

    def norm_gate_up(self, norm: RMSNorm, linear: Linear, x_TD: Array) -> Array:
        """silu(gate) * up [T, F], where linear(norm(x)) is [T, 2, F]."""
        gate_up_TCF = linear(norm(x_TD))
        return jax.nn.silu(gate_up_TCF[:, 0]) * gate_up_TCF[:, 1]

    def add_linear(self, residual_TD: Array, linear: Linear, x: Array) -> Array:
        """residual + linear(x)"""
        return residual_TD + linear(x)

    def scores(self, x_TD: Array, weight_VD: Array) -> Array:
        """x @ weight^T -> float32 [T, V]"""
        return jnp.einsum("td,vd->tv", x_TD, weight_VD, precision=precision_of(x_TD.dtype), preferred_element_type=jnp.float32)


@dataclass(frozen=True)
class SkinnyProducts(Products):
    """One kernel for all of it where there are few rows, else plain.

    For one device only: kernels are opaque to the partitioner, and a sharded residual would need the sum over devices first.
    """

    implementation: str
    interpret: bool

    def norm_linear(self, norm: RMSNorm, linear: Linear, x_TD: Array) -> Array:
        weight = self._weight(linear, x_TD)
        if weight is None:
            return super().norm_linear(norm, linear, x_TD)
        y_TF = skinny_matmul.norm_matmul(
            x_TD,
            weight.reshape(weight.shape[0], -1),
            norm_weight_D=norm.weight[...],
            eps=norm.eps,
            bias_F=None if linear.bias is None else linear.bias[...].reshape(-1),
            implementation=self.implementation,
            interpret=self.interpret,
        )
        return y_TF.reshape(x_TD.shape[0], *weight.shape[1:])

    def norm_gate_up(self, norm: RMSNorm, linear: Linear, x_TD: Array) -> Array:
        weight_D2F = self._weight(linear, x_TD)
        if weight_D2F is None:
            return super().norm_gate_up(norm, linear, x_TD)
        return skinny_matmul.norm_gate_up(
            x_TD,
            weight_D2F,
            norm_weight_D=norm.weight[...],
            eps=norm.eps,
            bias_2F=None if linear.bias is None else linear.bias[...],
            implementation=self.implementation,
            interpret=self.interpret,
        )

    def add_linear(self, residual_TD: Array, linear: Linear, x: Array) -> Array:
        x_TF = x.reshape(x.shape[0], -1)
        weight = self._weight(linear, x_TF)
        if weight is None:
            return super().add_linear(residual_TD, linear, x)
        return skinny_matmul.matmul_residual(
            x_TF,
            weight.reshape(-1, weight.shape[-1]),
            residual_TD,
            bias_D=None if linear.bias is None else linear.bias[...],
            implementation=self.implementation,
            interpret=self.interpret,
        )

    def scores(self, x_TD: Array, weight_VD: Array) -> Array:
        if not self._takes(x_TD, weight_VD):
            return super().scores(x_TD, weight_VD)
        return skinny_matmul.norm_logits(x_TD, weight_VD, implementation=self.implementation, interpret=self.interpret)

    def _weight(self, linear: Linear, x: Array) -> Array | None:
        """The weight, if the kernels multiply it by x. Fp8 weights they do not: those products round x to fp8 too."""
        if isinstance(linear.weight, Fp8Weight):
            return None
        weight = linear.weight[...]
        return weight if self._takes(x, weight) else None

    def _takes(self, x: Array, weight: Array) -> bool:
        return skinny_matmul.supports(
            self.implementation,
            dtype=x.dtype,
            weight_dtype=weight.dtype,
            num_rows=x.shape[0],
            interpret=self.interpret,
        )


PLAIN = Products()
