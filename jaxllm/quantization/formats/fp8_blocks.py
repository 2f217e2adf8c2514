"""Weights in fp8 with a scale per block of 128 x 128, as DeepSeek-V3 and Qwen3 have them, computed as stored."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np

from jaxllm.errors import ModelLoadError
from jaxllm.layers.source import AnySource, Source, Tensor
from jaxllm.quantization.formats.fp8_checkpoint import SCALE_TYPES, STORED_TYPE, Fp8Checkpoint, has_blocks, read_checkpoint
from jaxllm.quantization.formats.packed import PART, PackedFormat, ReadPart
from jaxllm.quantization.numbers import Scheme
from jaxllm.weight_format import Expected, Files, Options, ParamSpec, Reader


@dataclass(frozen=True, kw_only=True)
class Fp8Blocks(Fp8Checkpoint, PackedFormat):
    """Linear layers and experts in parts of e4m3 values with a float32 scale per group of an output's inputs: those of a block, the
    last of which may be cut. Activations stay in the model's type."""

    supported: ClassVar[str] = (
        "fp8 (e4m3) weights with a scale per block of quant_method fp8 (weight_block_size), compressed-tensors or modelopt"
    )

    @classmethod
    def claims(cls, given: Mapping[str, Any]) -> bool:
        return super().claims(given) and has_blocks(given)

    @classmethod
    def read(cls, given: Mapping[str, Any], options: Options, faults: list[str]) -> Self | None:
        fields = read_checkpoint(given, options, faults) if given else None
        if fields is None or fields["block_shape"] is None:
            return None
        return cls(computes=not options.dequantize and options.quantization is None, **fields)

    @property
    def excluded(self) -> tuple[str, ...]:
        return self.ignored

    def without_kernels(self) -> Self:
        """Widened while it is loaded: plain JAX would widen the weights of all experts in each step."""
        return replace(self, computes=False)

    def scheme(self, module: str) -> Scheme | None:
        return _scheme(None if self.block_shape is None else self.block_shape[1]) if self.covers(module) else None

    def scheme_of(self, module: str, num_inputs: int) -> Scheme | None:
        """In groups that divide the inputs: a block that the end cuts is several."""
        return _scheme(self._group(num_inputs)) if self.covers(module) else None

    def _group(self, num_inputs: int) -> int | None:
        """Inputs of a group; None: all of an output."""
        return None if self.block_shape is None else math.gcd(self.block_shape[1], num_inputs)

    def told(self, dtype: str) -> str:
        told = self.told_of(self._kind, dtype)
        return f"{told}; activations stay {dtype}, which is more exact" if self.computes else told

    @property
    def _kind(self) -> str:
        assert self.block_shape is not None
        return f"fp8 with a scale per {'x'.join(map(str, self.block_shape))} block"

    def stored(self, module: str, num_outputs: int, num_inputs: int) -> dict[str, Expected]:
        weight, block = _weight_of(module, num_outputs, num_inputs), self.block_shape or (1, num_inputs)
        blocks = tuple(math.ceil(size / of_block) for size, of_block in zip(weight.shape, block, strict=True))
        scale = f"{weight.name}{self.scale_ending(weight.shape)}"
        return {weight.name: _values(weight), scale: Expected(blocks, SCALE_TYPES)}

    def expected(self, parts: Mapping[str, ParamSpec], files: Files) -> dict[str, Expected]:
        """Scales with the names and shapes that the checkpoint has, where they fit."""
        found: dict[str, Expected] = {}
        for tensor in parts["codes"].source.tensors:
            weight = _weight(tensor, self._num_inputs(parts))
            found |= self.tensors(weight, files)
            found[weight.name] = _values(weight)
        return found

    def takes_experts(self, source: AnySource) -> bool:
        """Also those of one tensor with all experts, whose inputs are last."""
        return super().takes_experts(source) or (isinstance(source, Source) and source == source.output_major())

    def reading(self, num_inputs: int, reader: Reader) -> ReadPart:
        return lambda part, tensor: self._part(part, _weight(tensor, num_inputs), reader)

    def part(self, name: str, module: str, num_outputs: int, num_inputs: int, files: Files) -> np.ndarray:
        return self._part(name, _weight_of(module, num_outputs, num_inputs), files)

    def _part(self, name: str, weight: Tensor, files: Files) -> np.ndarray:
        *_, num_inputs = weight.shape
        if name == "codes":
            return files.tensor(weight.name)
        scale, row_of_output, columns = self.scales(weight, files)
        if not np.isfinite(scale).all():
            raise ModelLoadError(
                f"{np.sum(~np.isfinite(scale))} scales of {weight.name} are no numbers; the file is damaged, or of another format"
            )
        group = self._group(num_inputs) or num_inputs
        return scale[row_of_output[:, None], np.arange(0, num_inputs, group) // columns]


@functools.cache
def _scheme(group: int | None) -> Scheme:
    return Scheme("e4m3", group)


def _values(weight: Tensor) -> Expected:
    otherwise = "config.json says that it is fp8; add the module to those that are not quantised, by --hf-overrides"
    return Expected(weight.shape, (STORED_TYPE,), otherwise)


def _weight_of(module: str, num_outputs: int, num_inputs: int) -> Tensor:
    shape = (num_outputs, num_inputs)
    return Tensor(f"{module}.weight", shape, shape)


def _weight(part: Tensor, num_inputs: int) -> Tensor:
    """The weight [N, inputs], or those of all experts [E, N, inputs], that a tensor of a part is of."""
    shape = (*part.shape[:-1], num_inputs)
    return Tensor(part.name.partition(PART)[0], shape, shape, runs=part.runs)
