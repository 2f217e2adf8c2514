"""Weights as 8-bit floats with a scale per output channel: as a checkpoint holds them, or quantised while loading."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from jaxllm.layers.source import Index, Source, Tensor, output_major
from jaxllm.quantization.formats.fp8_checkpoint import TYPE, Fp8Checkpoint, read_checkpoint
from jaxllm.quantization.formats.fp8_experts import Fp8Experts
from jaxllm.quantization.formats.patterns import partly_covered
from jaxllm.weight_format import (
    Array,
    Arrays,
    Draw,
    Expected,
    Files,
    Multiply,
    Options,
    ParamSpec,
    Reader,
    WeightFormat,
    WeightSpec,
)

if TYPE_CHECKING:
    from jaxllm.model_config import ModelConfig

_DUMMY_DEVIATION = 100.0


@dataclass(frozen=True, kw_only=True)
class Fp8(Fp8Checkpoint):
    """Values (e4m3) and a scale per output channel, also of a checkpoint's scales per tensor.

    In a linear layer stand values [*outputs, *contracted] and a float32 scale [*outputs]: output-major, as checkpoints hold weights,
    because the fp8 GEMM of a GPU contracts the innermost dimension of both operands; XLA would transpose any other weight in every
    step. All other weights that a checkpoint holds so are widened while they are read.
    """

    computes: bool
    """Whether products of linear layers are computed in fp8."""

    supported: ClassVar[str] = (
        "fp8 (e4m3) weights with a scale per output channel or tensor, of quant_method compressed-tensors, modelopt or fp8"
    )

    @classmethod
    def read(cls, given: Mapping[str, Any], options: Options, faults: list[str]) -> Self | None:
        computes = options.quantization == "fp8"
        if not given:
            return cls(computes=computes, ignored=options.unquantized) if computes else None
        fields = read_checkpoint(given, options, faults)
        return None if fields is None else cls(computes=computes or options.quantization is None, **fields)

    def others(self, options: Options) -> tuple[WeightFormat, ...]:
        if self.scale_name is None or not any(map(Fp8Experts.has, options.mixtures)):
            return ()
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(Fp8Checkpoint)}
        return (Fp8Experts(computes=self.computes and not options.dequantize, **fields),)

    def faults(self, config: "ModelConfig") -> list[str]:
        return [] if self.scale_name is None else partly_covered(self.covers, config.linears())

    def told(self, dtype: str) -> str:
        if self.scale_name is None:
            return ""
        if not self.computes:
            return f"the checkpoint's fp8 weights become {dtype}"
        if self.static_activations:
            return "fp8 weights; the checkpoint's scales of activations are not used: each token gets its own in every step"
        return "fp8 weights as the checkpoint has them"

    def declare(self, weight: WeightSpec) -> dict[str, ParamSpec] | None:
        if not self.computes or not weight.modules or not all(self.covers(module.name) for module in weight.modules):
            return None
        assert isinstance(weight.plain.source, Source)
        n, shape, axes = weight.num_contracted, weight.plain.shape, weight.plain.axes
        scales = output_major(weight.modules, "weight_scale", weight.joined, trailing=(1,))
        source = weight.plain.source.output_major()
        return {
            "values": ParamSpec(shape[n:] + shape[:n], axes[n:] + axes[:n], TYPE, source),
            "scale": ParamSpec(shape[n:], axes[n:], "float32", scales),
        }

    @property
    def quantizes_inputs(self) -> bool:
        return self.computes

    def product(self, arrays: Arrays, x: Array, shards: Any, multiply: Multiply, *, weight_only: bool = False) -> Array:
        from jaxllm.quantization.fp8 import product, weight_only_product

        if weight_only:
            return weight_only_product(arrays["values"], arrays["scale"], x)
        return product(arrays["values"], arrays["scale"], x, shards)

    def sums(self, arrays: Arrays, x: Array) -> Any:
        from jaxllm.quantization.fp8 import sums

        return sums(arrays["values"], arrays["scale"], x)

    @property
    def _is_stored(self) -> bool:
        """Whether a linear layer's values and scales are used as the checkpoint has them."""
        return self.scale_name is not None

    def expected(self, parts: Mapping[str, ParamSpec], files: Files) -> dict[str, Expected]:
        values = super().expected({"values": parts["values"]}, files)
        for tensor in parts["scale"].source.tensors if self._is_stored else ():
            name = _name_of_scale(tensor.name, files)
            found = files.entries[name].shape if name in files.entries else ()
            # Of each output, or of the whole tensor.
            fits = math.prod(found) in (1, math.prod(tensor.shape)) and name in files.entries
            values[name] = Expected(found if fits else tensor.shape)
        return values

    def load(self, reader: Reader, parts: Mapping[str, ParamSpec]) -> Iterator[tuple[str, Array]]:
        if self._is_stored:
            yield "values", reader.array(parts["values"], reader.stored)

            def read_scale(tensor: Tensor, index: Index) -> np.ndarray:
                stored = reader.tensor(_name_of_scale(tensor.name, reader))
                return tensor.read(_of_outputs(stored, tensor.shape), index)

            yield "scale", reader.array(parts["scale"], read_scale)
        else:
            from jaxllm.quantization.fp8 import quantize_tensors

            values, scale = parts["values"], parts["scale"]
            assert isinstance(values.source, Source)
            static = {"axis": values.source.axis, "num_contracted": len(values.axes) - len(scale.axes)}
            made = reader.convert(quantize_tensors, (values, scale), reader.tensors(values), **static)
            yield from zip(("values", "scale"), made, strict=True)

    def dummy(self, part: str, draw: Draw, deviation: Any) -> Array:
        """A scale for all outputs, and values with a deviation of 100."""
        from jaxllm.quantization.fp8 import narrow

        return (
            draw.full(deviation / _DUMMY_DEVIATION, "float32") if part == "scale" else narrow(_DUMMY_DEVIATION * draw.normal())
        )

    def unrestorable(self, names: Any) -> str:
        if not self.computes or any(name.endswith(".values") for name in names):
            return ""
        return (
            "holds an orbax checkpoint without fp8 weights; leave --quantization out, or convert the original again with "
            "scripts/convert_checkpoint.py --quantization fp8"
        )


def _name_of_scale(name: str, files: Files) -> str:
    """The name in the checkpoint of a scale `weight_scale`: transformers calls that of a whole tensor `weight_scale_inv` too."""
    other = f"{name}_inv"
    return other if name not in files.entries and other in files.entries else name


def _of_outputs(scale: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The float32 scale per output channel that a checkpoint holds, or the one of the whole tensor for each of them."""
    wide = scale.astype(np.float32)
    return np.broadcast_to(wide.reshape(()), shape) if wide.size == 1 else wide.reshape(shape)
