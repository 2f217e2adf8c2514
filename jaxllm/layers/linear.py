"""Weights and the matrix products with them."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.lax import Precision

from jaxllm.layers.source import AnySource, Module, PartlyZero, output_major, plain
from jaxllm.parallel.axes import MESH_AXES
from jaxllm.parallel.shards import ONE_DEVICE, Shards
from jaxllm.weight_format import PLAIN, WHOLE, Init, Multiply, ParamSpec, WeightFormat, WeightSpec
from pallas_kernels import quantized_matmul
from pallas_kernels.quantize import Quantized, Sums

# Traced and lowered once for all layers of a program.
multiply_tiles = jax.jit(quantized_matmul.product, static_argnames=("dtype", "implementation", "interpret"))
PLAINLY: Multiply = partial(multiply_tiles, implementation="xla")


def abstract_param(
    shape: Sequence[int],
    axes: Sequence[str],
    dtype: str,
    *,
    source: AnySource | str,
    init: Init = "normal",
    format: WeightFormat = PLAIN,
    part: str = WHOLE,
) -> nnx.Param:
    """A parameter that holds its shape, type, logical axes and source, but no values yet.

    source: the name alone for a tensor of the checkpoint that has the parameter's shape. format: what loads it, as this part of a
    weight.
    """
    assert len(shape) == len(axes), f"{len(shape)} dimensions, {len(axes)} axis names"
    if isinstance(source, str):
        source = plain(source, shape)
    abstract = jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))
    return nnx.Param(abstract, axes=tuple(axes), source=source, init=init, format=format, part=part)


class PackedWeight(nnx.Module):
    """A weight of several arrays, each an attribute: stands where the array stood."""

    def __init__(self, format: WeightFormat, parts: Mapping[str, nnx.Param]):
        self.format, self.names = format, tuple(parts)
        for name, param in parts.items():
            setattr(self, name, param)

    def _arrays(self) -> dict[str, Array]:
        return {name: getattr(self, name)[...] for name in self.names}

    def product(
        self, x: Array, shards: Shards = ONE_DEVICE, multiply: Multiply = PLAINLY, *, weight_only: bool = False
    ) -> Array:
        """Product of a linear layer, as `WeightFormat.product`."""
        return self.format.product(self._arrays(), x, shards, multiply, weight_only=weight_only)

    @property
    def operands(self) -> tuple[Array, ...]:
        """All arrays, in the order in which the format declares them."""
        return tuple(self._arrays().values())

    def sums(self, x: Quantized) -> Sums:
        """As `WeightFormat.sums`."""
        return self.format.sums(self._arrays(), x)  # type: ignore[no-any-return]

    def logits(self, x: Array, multiply: Multiply) -> Array:
        """As `WeightFormat.logits`."""
        return self.format.logits(self._arrays(), x, multiply)

    def rows(self, index: Array) -> Array:
        """As `WeightFormat.rows`."""
        return self.format.rows(self._arrays(), index)  # type: ignore[no-any-return]

    def __getitem__(self, index: object) -> Any:
        """The weight of experts, indexed as a parameter: `weight[...]`."""
        return self.format.operand(self._arrays())[index]


def declare(formats: Sequence[WeightFormat], weight: WeightSpec) -> nnx.Param | PackedWeight:
    """An abstract weight in the first of the formats that has it, else in PLAIN."""
    for format in formats:
        if (parts := format.declare(weight)) is not None:
            format = format.of(weight)
            params = {part: _param(spec, format, part) for part, spec in parts.items()}
            return params[WHOLE] if WHOLE in params else PackedWeight(format, params)
    return _param(weight.plain)


def _param(spec: ParamSpec, format: WeightFormat = PLAIN, part: str = WHOLE) -> nnx.Param:
    return abstract_param(spec.shape, spec.axes, spec.dtype, source=spec.source, init=spec.init, format=format, part=part)


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
        biased: Sequence[bool] = (),
        transposed: bool = False,
        weight: str = "weight",
    ):
        """modules: the checkpoint's modules, `joined` along a dimension of their outputs.
        biased: which of them have the bias, if not all; that of the others is zero.
        inputs: the stored dimensions that are contracted; None: as in `shape`.
        transposed: the checkpoint holds [inputs, outputs]. weight: what it calls the weight in a module."""
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
        source = output_major(self.modules, weight, joined, self.inputs, transposed=transposed)
        self.weight: nnx.Param | PackedWeight = abstract_param(shape, axes, dtype, source=source)
        of_bias: AnySource = output_major(self.modules, "bias", joined)
        of_bias = of_bias if all(biased) else PartlyZero(of_bias, tuple(biased))  # type: ignore[arg-type]
        self.bias = abstract_param(shape[n:], axes[n:], dtype, source=of_bias, init="zeros") if bias else None

    def take_formats(self, formats: Sequence[WeightFormat]) -> None:
        """Put the weight of an abstract model into the first of the formats that has it."""
        assert isinstance(self.weight, nnx.Param), "in a format already"
        plain = ParamSpec(self.shape, self.axes, str(self.weight.dtype), self.weight.get_metadata("source"))
        n = self.num_contracted
        split_outputs = next((i for i, axis in enumerate(self.axes[n:]) if MESH_AXES[axis]), None)
        self.weight = declare(formats, WeightSpec(plain, self.modules, self.joined, n, self.is_split, split_outputs))

    @property
    def quantizes_inputs(self) -> bool:
        """See `WeightFormat.quantizes_inputs`."""
        return isinstance(self.weight, PackedWeight) and self.weight.format.quantizes_inputs

    def sums(self, x: Quantized, shards: Shards = ONE_DEVICE) -> Array | Sums:
        """The product with quantised vectors, without the scales unless there is a bias; of a weight that quantises inputs. shards: as
        `__call__` takes them; each device has quantised its part of the vectors."""
        assert isinstance(self.weight, PackedWeight)
        y = self.weight.sums(x)
        if self.bias is None:
            return y
        scaled = y.scaled()
        return scaled + self._bias_of(scaled, shards)

    def __call__(
        self, x: Array, shards: Shards = ONE_DEVICE, multiply: Multiply = PLAINLY, *, weight_only: bool = False
    ) -> Array:
        """The product of this device's part of the weight.

        shards: of a product whose contracted dimensions are split, those that it is split over; the result is then a part
        of the sum, with the bias in the part of the first device. multiply: by a weight in tiles. weight_only: see
        `WeightFormat.product`.
        """
        # One contracted dimension: XLA would transpose a weight in every step to contract several.
        x = x.reshape(*x.shape[: x.ndim - self.num_contracted], -1)
        if isinstance(self.weight, PackedWeight):
            y = self.weight.product(x, shards, multiply, weight_only=weight_only)
        else:
            weight = self.weight[...].astype(x.dtype)
            trailing = weight.shape[self.num_contracted :]
            if self.bias is not None:
                # To outputs in one dimension: XLA leaves the bias to the product, and else writes it out for every vector.
                y = jnp.dot(x, weight.reshape(x.shape[-1], -1), precision=precision_of(x.dtype))
                y = y + self._bias_of(y, shards).reshape(-1)
                return y.reshape(*y.shape[:-1], *trailing)
            y = jnp.tensordot(x, weight.reshape(-1, *trailing), 1, precision=precision_of(x.dtype))
        return y if self.bias is None else y + self._bias_of(y, shards)

    def _bias_of(self, y: Array, shards: Shards) -> Array:
        """The bias in the type of the product y, of several devices that add it up only that of the first."""
        assert self.bias is not None
        bias = self.bias[...].astype(y.dtype)
        return bias if shards.size == 1 else jnp.where(shards.index == 0, bias, 0)
