"""Weights and the matrix products with them."""

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.lax import Precision

from jaxllm.layers.source import AnySource, Module, output_major, plain
from jaxllm.parallel.axes import MESH_AXES
from jaxllm.parallel.shards import ONE_DEVICE, Shards
from jaxllm.quantization.fp8 import DTYPE as FP8
from jaxllm.quantization.fp8 import Fp8Weight

Init = Literal["normal", "zeros", "ones", "values", "scale", "words", "exponents"]
"""How a parameter without a checkpoint begins; values and scale are those of fp8 weights, words and exponents of 4-bit ones."""


def abstract_param(
    shape: Sequence[int], axes: Sequence[str], dtype: str, *, source: AnySource | str, init: Init = "normal"
) -> nnx.Param:
    """A parameter that holds its shape, type, logical axes and source, but no values yet.

    source: the name alone for a tensor of the checkpoint that has the parameter's shape.
    """
    assert len(shape) == len(axes), f"{len(shape)} dimensions, {len(axes)} axis names"
    if isinstance(source, str):
        source = plain(source, shape)
    return nnx.Param(jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype)), axes=tuple(axes), source=source, init=init)


def precision_of(dtype: jnp.dtype) -> Precision | None:
    """Float32 products are computed in float32: the default of a GPU is TF32, with 10 bits of mantissa."""
    return Precision.HIGHEST if dtype == jnp.float32 else None


class Linear(nnx.Module):
    """An einsum with a weight, computed in the type of the input: `Linear("td,df->tf", (D, F), ("embed", "mlp"), "bfloat16", ...)`.

    The contracted letters come last in the input and first in the weight, in the same order. The bias, if any, has the weight's
    dimensions that are in the output.
    """

    def __init__(
        self,
        subscripts: str,
        shape: Sequence[int],
        axes: Sequence[str],
        dtype: str,
        *,
        modules: Sequence[Module],
        inputs: Sequence[int] | None = None,
        joined: int = 0,
        bias: bool = False,
        transposed: bool = False,
    ):
        """modules: the checkpoint's modules, `joined` along a dimension of their outputs.
        inputs: the stored dimensions that are contracted; None: as in `shape`.
        transposed: the checkpoint holds [inputs, outputs]."""
        operand_and_letters, output = subscripts.split("->")
        operand, letters = operand_and_letters.split(",")
        self.num_contracted = n = sum(letter not in output for letter in letters)
        contracted = letters[:n]
        assert operand.endswith(contracted) and not set(contracted) & set(output), (
            f"{subscripts} is not of the form that is taken"
        )
        self.modules, self.joined = tuple(modules), joined
        self.is_split = any(MESH_AXES[axis] for axis in axes[:n])
        """Whether devices split the inputs, so that each computes a part of the sum."""
        self.shape, self.axes = tuple(shape), tuple(axes)
        self.inputs = tuple(shape[:n] if inputs is None else inputs)
        source = output_major(self.modules, "weight", joined, self.inputs, transposed=transposed)
        self.weight: nnx.Param | Fp8Weight = abstract_param(shape, axes, dtype, source=source)
        source = output_major(self.modules, "bias", joined)
        self.bias = abstract_param(shape[n:], axes[n:], dtype, source=source, init="zeros") if bias else None

    @property
    def module_names(self) -> tuple[str, ...]:
        """The checkpoint's modules."""
        return tuple(dict.fromkeys(module.name for module in self.modules))

    def quantize(self) -> None:
        """Make the weight of an abstract model an fp8 one, output-major."""
        assert isinstance(self.weight, nnx.Param), "quantised already"
        n, shape, axes = self.num_contracted, self.weight.shape, self.weight.get_metadata("axes")
        source = self.weight.get_metadata("source").output_major()
        values = abstract_param(shape[n:] + shape[:n], axes[n:] + axes[:n], str(jnp.dtype(FP8)), source=source, init="values")
        source = output_major(self.modules, "weight_scale", self.joined, trailing=(1,))
        self.weight = Fp8Weight(values, abstract_param(shape[n:], axes[n:], "float32", source=source, init="scale"))

    def __call__(self, x: Array, shards: Shards = ONE_DEVICE) -> Array:
        """The product of this device's part of the weight.

        shards: of a product whose contracted dimensions are split, those that it is split over; the result is then a part
        of the sum, with the bias in the part of the first device.
        """
        # One contracted dimension: XLA would transpose a weight in every step to contract several.
        x = x.reshape(*x.shape[: x.ndim - self.num_contracted], -1)
        if isinstance(self.weight, Fp8Weight):
            y = self.weight.product(x, shards)
        else:
            weight = self.weight[...].astype(x.dtype)
            trailing = weight.shape[self.num_contracted :]
            y = jnp.tensordot(x, weight.reshape(-1, *trailing), 1, precision=precision_of(x.dtype))
        if self.bias is None:
            return y
        bias = self.bias[...].astype(x.dtype)
        return y + (bias if shards.size == 1 else jnp.where(shards.index == 0, bias, 0))
