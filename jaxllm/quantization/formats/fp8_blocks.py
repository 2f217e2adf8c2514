"""Weights in fp8 with a scale per block of 128 x 128, as DeepSeek-V3 and Qwen3 have them, computed as stored."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np

from jaxllm.errors import ModelLoadError
from jaxllm.layers.source import Tensor
from jaxllm.quantization.formats.fp8_checkpoint import SCALE_TYPES, STORED_TYPE, Fp8Checkpoint, has_blocks, read_checkpoint
from jaxllm.quantization.formats.packed import PackedFormat, module_of, parts_by_module
from jaxllm.quantization.numbers import Scheme
from jaxllm.weight_format import Expected, Files, Options, ParamSpec


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
        return _scheme(self._block[1]) if self.covers(module) else None

    def scheme_of(self, module: str, num_inputs: int) -> Scheme | None:
        """In groups that divide the inputs: a block that the end cuts is several."""
        return _scheme(math.gcd(self._block[1], num_inputs)) if self.covers(module) else None

    @property
    def _block(self) -> tuple[int, int]:
        assert self.block_shape is not None
        return self.block_shape

    def told(self, dtype: str) -> str:
        told = self.told_of(f"fp8 with a scale per {'x'.join(map(str, self._block))} block", dtype)
        return f"{told}; activations stay {dtype}, which is more exact" if self.computes else told

    def stored(self, module: str, num_outputs: int, num_inputs: int) -> dict[str, Expected]:
        shape = num_outputs, num_inputs
        blocks = tuple(math.ceil(size / of_block) for size, of_block in zip(shape, self._block, strict=True))
        otherwise = "config.json says that it is fp8; add the module to those that are not quantised, by --hf-overrides"
        return {
            f"{module}.weight": Expected(shape, (STORED_TYPE,), otherwise),
            f"{module}.{self.scale_name}": Expected(blocks, SCALE_TYPES),
        }

    def expected(self, parts: Mapping[str, ParamSpec], files: Files) -> dict[str, Expected]:
        """As `stored`, but scales have the names and shapes that the checkpoint has, where they fit."""
        found: dict[str, Expected] = {}
        for tensor in parts["codes"].source.tensors:
            weight = _weight(module_of(tensor), tensor.shape[0], self._num_inputs(parts))
            found |= self.tensors(weight, files)
            found[weight.name] = self.stored(module_of(tensor), *weight.shape)[weight.name]
        return found

    def part(self, name: str, module: str, num_outputs: int, num_inputs: int, files: Files) -> np.ndarray:
        weight = _weight(module, num_outputs, num_inputs)
        if name == "codes":
            return files.tensor(weight.name)
        scale, (rows, columns) = self.scales(weight, files)
        if not np.isfinite(scale).all():
            raise ModelLoadError(
                f"{np.sum(~np.isfinite(scale))} scales of {weight.name} are no numbers; the file is damaged, or of another format"
            )
        group = math.gcd(self._block[1], num_inputs)
        return scale[np.arange(num_outputs)[:, None] // rows, np.arange(0, num_inputs, group) // columns]

    def saved(self, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        written, parts = parts_by_module(tensors)
        for module, arrays in parts.items():
            codes, scale = arrays["codes"], arrays["scale"]
            rows, columns = self._block
            written[f"{module}.weight"] = codes
            written[f"{module}.{self.scale_name}"] = scale[::rows, :: columns * scale.shape[1] // codes.shape[1]]
        return written


@functools.cache
def _scheme(group: int) -> Scheme:
    return Scheme("e4m3", group)


def _weight(module: str, num_outputs: int, num_inputs: int) -> Tensor:
    shape = (num_outputs, num_inputs)
    return Tensor(f"{module}.weight", shape, shape)
