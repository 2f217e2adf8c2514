"""Weights of 4 and 8 bits as ModelOpt exports them: NVFP4, MXFP8, and layers that differ, among them fp8.

Checkpoints of nothing but fp8 are read by `fp8.Fp8` and `fp8_blocks.Fp8Blocks`.
Source: github.com/NVIDIA/Model-Optimizer, modelopt/torch/export.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np

from jaxllm.layers.source import Tensor
from jaxllm.quantization.formats.kv_scales import UNUSED, KVScales
from jaxllm.quantization.formats.modelopt_config import (
    ALL_FP8,
    BLOCK,
    FP8,
    FP8_BLOCK,
    FP8_CHANNEL,
    MIXED,
    algorithm_of,
    is_modelopt,
    read_description,
)
from jaxllm.quantization.formats.packed import PackedFormat, float_factor, float_scale, module_of
from jaxllm.quantization.formats.patterns import matches_any
from jaxllm.quantization.numbers import NVFP4, Scheme
from jaxllm.weight_format import Expected, Files, Options, ParamSpec, WeightFormat, WeightSpec

SCHEMES = {
    "NVFP4": NVFP4,
    "W4A16_NVFP4": NVFP4,
    "MXFP8": Scheme("e4m3", 32, scale_type="uint8"),
    FP8: Scheme("e4m3"),
    FP8_CHANNEL: Scheme("e4m3"),
    FP8_BLOCK: Scheme("e4m3", BLOCK[1]),
}
"""By algorithm."""
_GROUPS = {name: None if name in ALL_FP8 else scheme.group for name, scheme in SCHEMES.items()}


@dataclass(frozen=True, kw_only=True)
class ModelOpt(PackedFormat):
    """Floats of 4 or 8 bits with a scale per group, and for NVFP4 a factor of the whole tensor (`weight_scale_2`)."""

    algorithm: str | None = None
    """That of modules that `layers` do not name; None: they are plain."""
    layers: tuple[tuple[str, str], ...] = ()
    """Algorithms of modules, or of all below them."""
    ignored: tuple[str, ...] = ()
    """Modules that are not quantised: parts of dotted names, or regular expressions that begin with `re:`."""
    cache: str | None = None
    """The type of the KV cache that the checkpoint asks for."""

    methods: ClassVar[tuple[str, ...]] = ("modelopt",)
    supported: ClassVar[str] = (
        f"weights of quant_method modelopt (quant_algo {', '.join(SCHEMES)}, with the alias FP8_BLOCK_SCALES, and {MIXED} of these)"
    )
    unused: ClassVar[str] = rf"\.(input_scale|{UNUSED})$"

    @property
    def kv_scales(self) -> WeightFormat | None:
        return KVScales() if self.cache == "FP8" else None

    @classmethod
    def claims(cls, given: Mapping[str, Any]) -> bool:
        return is_modelopt(given) and algorithm_of(given) not in ALL_FP8

    @classmethod
    def read(cls, given: Mapping[str, Any], options: Options, faults: list[str]) -> Self | None:
        if not given:
            return None
        found = read_description(given, _GROUPS, faults)
        has_weights = found.algorithm is not None or bool(found.layers)
        return cls(
            computes=has_weights and not options.dequantize and options.quantization is None,
            algorithm=found.algorithm,
            layers=found.layers,
            ignored=found.ignored,
            cache=found.cache,
        )

    @functools.cached_property
    def _by_module(self) -> dict[str, str]:
        return dict(self.layers)

    @functools.cached_property
    def _found(self) -> dict[str, str | None]:
        return {}

    def algorithm_for(self, module: str) -> str | None:
        if module not in self._found:
            self._found[module] = None if matches_any(self.ignored, module) else self._of_layers(module)
        return self._found[module]

    def _of_layers(self, module: str) -> str | None:
        while module and self.layers:
            if module in self._by_module:
                return self._by_module[module]
            module = module.rpartition(".")[0]
        return self.algorithm

    def scheme(self, module: str) -> Scheme | None:
        return SCHEMES.get(self.algorithm_for(module) or "")

    def of(self, weight: WeightSpec) -> Self:
        """With what is said of this weight's modules alone, so that equal layers have equal formats."""
        modules = set(map(module_of, weight.plain.source.tensors))
        named = {module: self.algorithm_for(module) for module in sorted(modules)}
        algorithms = set(named.values())
        layers = () if len(algorithms) == 1 else tuple((name, found) for name, found in named.items() if found is not None)
        return replace(super().of(weight), algorithm=None if layers else algorithms.pop(), layers=layers, ignored=())

    def told(self, dtype: str) -> str:
        told = [f"the checkpoint's KV cache ({self.cache}) stays {dtype}"] if self.cache not in (None, "FP8") else []
        names = dict.fromkeys(name for _, name in self.layers) if self.layers else filter(None, [self.algorithm])
        if algorithms := ", ".join(names):
            kept = f"weights as the checkpoint has them ({algorithms}); activations stay {dtype}, which is more exact"
            told.insert(0, kept if self.computes else f"the checkpoint's weights ({algorithms}) become {dtype}")
        return "; ".join(told)

    def stored(self, module: str, num_outputs: int, num_inputs: int) -> dict[str, Expected]:
        algorithm = self.algorithm_for(module)
        shape, eight = (num_outputs, num_inputs), ("F8_E4M3",)
        if algorithm == "MXFP8":
            found = {"weight": Expected(shape, eight), "weight_scale": Expected((num_outputs, num_inputs // 32), ("U8",))}
        elif algorithm in ALL_FP8:
            blocks = math.ceil(num_outputs / BLOCK[0]), math.ceil(num_inputs / BLOCK[1])
            of_blocks = () if blocks == (1, 1) else (blocks[0], 1, blocks[1], 1)
            scale: tuple[int, ...] = {FP8: (), FP8_CHANNEL: (num_outputs,), FP8_BLOCK: of_blocks}[algorithm]
            found = {"weight": Expected(shape, eight), "weight_scale": Expected(scale)}
        else:
            found = {
                "weight": Expected((num_outputs, num_inputs // 2), ("U8",)),
                "weight_scale": Expected((num_outputs, num_inputs // 16), eight),
                "weight_scale_2": Expected((), ("F32",)),
            }
        return {f"{module}.{name}": expected for name, expected in found.items()}

    def expected(self, parts: Mapping[str, ParamSpec], files: Files) -> dict[str, Expected]:
        return _as_written(super().expected(parts, files), files)

    def beside(self, tensor: Tensor, files: Files) -> dict[str, Expected]:
        return _as_written(super().beside(tensor, files), files)

    def part(self, name: str, module: str, num_outputs: int, num_inputs: int, files: Files) -> np.ndarray:
        if name == "codes":
            return files.tensor(f"{module}.weight")
        if name == "factor":
            return np.broadcast_to(float_factor(files, f"{module}.weight_scale_2"), num_outputs)
        scale = float_scale(files, f"{module}.weight_scale")
        algorithm = self.algorithm_for(module)
        if algorithm not in ALL_FP8:
            return scale.reshape(num_outputs, -1)
        if algorithm == FP8_BLOCK:
            blocks = scale.reshape(math.ceil(num_outputs / BLOCK[0]), -1)
            return blocks.astype(np.float32)[np.arange(num_outputs) // BLOCK[0]]
        return np.broadcast_to(scale.astype(np.float32).reshape(-1, 1), (num_outputs, 1))


def _as_written(found: Mapping[str, Expected], files: Files) -> dict[str, Expected]:
    """With the shapes of scales that the checkpoint has, where they differ in dimensions of one alone, as writers' versions do."""

    def expected(name: str, wanted: Expected) -> Expected:
        written = files.entries[name].shape if name in files.entries else ()
        is_same = [size for size in written if size != 1] == [size for size in wanted.shape if size != 1]
        return wanted._replace(shape=written) if is_same and not name.endswith(".weight") else wanted

    return {name: expected(name, wanted) for name, wanted in found.items()}
