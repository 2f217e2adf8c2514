"""Weights of GGUF files, whose types are per tensor."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from jaxllm.gguf_files.blocks import BLOCKS, SUFFIX, Blocks
from jaxllm.layers.source import Tensor
from jaxllm.quantization.formats.packed import PackedFormat
from jaxllm.quantization.numbers import NUMBERS, Scheme, plain_codes
from jaxllm.weight_format import Expected, Files, Options

if TYPE_CHECKING:
    from jaxllm.model_config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Gguf(PackedFormat):
    """Types of BLOCKS stay in 4 or 8 bits; all others are widened by the reader of the files, as are tables of tokens: on a CPU all but
    what logits are computed with.

    Modules of one product may have different types: they get numbers of 8 bits in the smallest of their groups.
    """

    types: tuple[tuple[str, str], ...]
    """Modules of layers with the types of their weights, those that are no linear layers included."""
    table_types: tuple[tuple[str, str], ...] = ()
    """Types of the embedding and of the head."""
    has_head: bool = False
    """Whether what logits are computed with stays in 4 or 8 bits too."""

    methods: ClassVar[tuple[str, ...]] = ("gguf",)

    @classmethod
    def read(cls, given: Mapping[str, Any], options: Options, faults: list[str]) -> Self | None:
        if not given:
            return None
        found = []
        for name, types in (("types", given.get("types")), ("table_types", given.get("table_types", {}))):
            if not isinstance(types, Mapping):
                faults.append(f"{name} of the GGUF weights are {types!r:.100}, must be an object of types by module")
                return None
            found.append(tuple((module, type) for module, type in types.items() if type in BLOCKS))
        of_layers, of_tables = found
        # Products with plain weights are faster for several rows at a time.
        widens = options.dequantize is not False or options.quantization is not None
        return None if widens or not of_layers else cls(types=of_layers, table_types=of_tables)

    @functools.cached_property
    def _types(self) -> Mapping[str, str]:
        return dict((*self.types, *self.table_types) if self.has_head else self.types)

    def _blocks(self, module: str) -> Blocks | None:
        return BLOCKS.get(self._types.get(module, ""))

    def scheme(self, module: str) -> Scheme | None:
        return None if (blocks := self._blocks(module)) is None else scheme_of_blocks(blocks)

    def joint_scheme(self, modules: Sequence[str], num_inputs: int) -> Scheme | None:
        schemes = {self.scheme(module) for module in modules}
        if len(schemes) == 1:
            return schemes.pop()
        if None in schemes or any(scheme.scale_type == "uint8" for scheme in schemes if scheme is not None):
            return None
        known = [scheme for scheme in schemes if scheme is not None]
        groups = [scheme.group for scheme in known if scheme.group is not None]
        has_minimums = any(scheme.minimums for scheme in known)
        return Scheme("int8", math.gcd(*groups), minimums=has_minimums, scale_type="float32")

    def faults(self, config: "ModelConfig") -> list[str]:
        return []

    def in_lanes(self) -> Self:
        return replace(super().in_lanes(), has_head=self.computes)

    @property
    def of_head(self) -> bool:
        return self.has_head

    def told(self, dtype: str) -> str:
        kinds = ", ".join(sorted(set(self._types.values())))
        return f"weights as the GGUF file has them ({kinds}); --dequantize makes them {dtype}"

    def stored(self, module: str, num_outputs: int, num_inputs: int) -> dict[str, Expected]:
        return {f"{module}.weight": Expected((num_outputs, num_inputs))}

    def part(self, name: str, module: str, num_outputs: int, num_inputs: int, files: Files) -> np.ndarray:
        blocks, wanted = self._blocks(module), self.weight_scheme
        assert blocks is not None and wanted is not None
        data = files.tensor(f"{module}.weight{SUFFIX}")
        if name == "minimum" and blocks.minimum is None:
            return np.zeros((num_outputs, num_inputs // blocks.group), wanted.minimum_type)
        part = blocks.part(name, data)
        if wanted == scheme_of_blocks(blocks):
            return part
        if name != "codes":
            return part.astype(wanted.scale_type if name == "scale" else wanted.minimum_type)
        return plain_codes(part, NUMBERS[blocks.number])

    def beside(self, tensor: Tensor, files: Files) -> dict[str, Expected]:
        """None: the reader of the files widens all that is read as plain numbers."""
        return {}


def scheme_of_blocks(blocks: Blocks) -> Scheme:
    return Scheme(
        blocks.number,
        blocks.group,
        minimums=blocks.minimum is not None,
        scale_type=blocks.scale_type,
        minimum_type=blocks.minimum_type,
    )
