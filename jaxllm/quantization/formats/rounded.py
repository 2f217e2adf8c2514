"""Plain weights rounded to integers of 4 or 8 bits while they are loaded, in the form of compressed-tensors."""

import functools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np

from jaxllm.layers.source import Tensor
from jaxllm.quantization.formats.compressed_tensors import CompressedTensors, Group
from jaxllm.quantization.formats.packed import ReadPart, module_of
from jaxllm.quantization.numbers import Scheme
from jaxllm.weight_format import Expected, Files, Options, ParamSpec, Reader

LARGEST_GROUP = 128
NUMBERS_BY_OPTION = {"int8": "uint8b128", "int4": "int4"}
LINEAR = "Linear"


@dataclass(frozen=True, kw_only=True)
class Rounded(CompressedTensors):
    """Weights of linear layers and experts, symmetric: int8 with a scale per output channel, or int4 with one per group, of 128 inputs
    or of the largest power of two that divides them."""

    may_widen: ClassVar[bool] = False
    methods: ClassVar[tuple[str, ...]] = ()
    supported: ClassVar[str] = ""

    @classmethod
    def read(cls, given: Mapping[str, Any], options: Options, faults: list[str]) -> Self | None:
        if options.quantization not in NUMBERS_BY_OPTION:
            return None
        number, has_groups = NUMBERS_BY_OPTION[options.quantization], options.quantization == "int4"
        scale_type = options.stored_dtype if has_groups else "float32"
        scheme = Scheme(number, LARGEST_GROUP if has_groups else None, scale_type=scale_type)
        return cls(groups=(Group((LINEAR,), scheme),), ignored=options.unquantized)

    def scheme_of(self, module: str, num_inputs: int) -> Scheme | None:
        scheme = self.scheme(module)
        if scheme is None or scheme.group is None:
            return scheme
        return replace(scheme, group=math.gcd(scheme.group, num_inputs))

    def told(self, dtype: str) -> str:
        scheme = self.groups[0].scheme
        return (
            ""
            if scheme.group is None
            else "weights are rounded to 4 bits, which costs accuracy: a calibrated checkpoint is better"
        )

    def beside(self, tensor: Tensor, files: Files) -> dict[str, Expected]:
        return {}

    def expected(self, parts: Mapping[str, ParamSpec], files: Files) -> dict[str, Expected]:
        found: dict[str, Expected] = {}
        for tensor in parts["codes"].source.tensors:
            plain = self._plain(tensor, self._num_inputs(parts))
            found |= files.beside(plain) or {plain.name: Expected(plain.shape)}
        return found

    def reading(self, num_inputs: int, reader: Reader) -> ReadPart:
        from jaxllm.quantization.packed import rounded_arrays

        @functools.lru_cache(maxsize=4)
        def rounded(tensor: Tensor) -> dict[str, np.ndarray]:
            weight = reader.plain(tensor, (slice(None), slice(None)))
            return dict(zip(("codes", "scale"), rounded_arrays(weight, self._scheme), strict=True))

        return lambda part, tensor: rounded(self._plain(tensor, num_inputs))[part]

    def _plain(self, tensor: Tensor, num_inputs: int) -> Tensor:
        """All of the plain weight [N, inputs] that a tensor of a part is made of."""
        shape = (tensor.shape[0], num_inputs)
        return Tensor(
            f"{module_of(tensor)}.weight", shape[::-1] if self.transposed else shape, shape, transposed=self.transposed
        )

    def unrestorable(self, names: Collection[str]) -> str:
        return (
            "holds an orbax checkpoint, whose weights stay as they are; leave --quantization out, or convert the original again with "
            "scripts/convert_checkpoint.py --quantization"
        )
