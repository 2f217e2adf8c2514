"""Weights as 8-bit floats with scales: as a checkpoint holds them, or quantised while loading."""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from jaxllm.layers.source import Index, Source, Tensor, output_major
from jaxllm.quantization.formats.kv_scales import UNUSED, KVScales, read_cache_scheme
from jaxllm.quantization.formats.modelopt_config import ALL_FP8, BLOCK, FP8_BLOCK, algorithm_of, is_modelopt, read_description
from jaxllm.quantization.formats.modelopt_config import FP8 as PER_TENSOR
from jaxllm.quantization.formats.patterns import matches_any, partly_covered, read_names
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

TYPE, STORED_TYPE = "float8_e4m3fn", "F8_E4M3"
_SCALE_NAMES = ("weight_scale_inv", "weight_scale")
_DUMMY_DEVIATION = 100.0
_NUMBER = {"num_bits": 8, "type": "float", "symmetric": True}


@dataclass(frozen=True)
class Fp8(WeightFormat):
    """Values (e4m3) and a scale per output channel, tensor or block, a weight being their product.

    In a linear layer stand values [*outputs, *contracted] and a float32 scale [*outputs]: output-major, as checkpoints hold weights,
    because the fp8 GEMM of a GPU contracts the innermost dimension of both operands; XLA would transpose any other weight in every
    step. All other weights that a checkpoint holds so are widened while they are read, and those of scales per block.
    """

    computes: bool
    """Whether products of linear layers are computed in fp8."""
    scale_name: str | None = None
    """The last part of the name of a scale in the checkpoint; None: it holds no fp8 weights."""
    block_shape: tuple[int, int] | None = None
    """(outputs, inputs) that share a scale; None: the scales are per output channel or per tensor."""
    targets: tuple[str, ...] = ()
    """Modules that are quantised, in the form of `ignored`; empty: all linear layers."""
    ignored: tuple[str, ...] = ()
    """Modules that are not quantised: parts of dotted names, or regular expressions that begin with `re:`."""
    kv_cache: bool = False
    static_activations: bool = False
    """Scales of activations are stored. They are not used: a scale per token is computed, which is at least as precise."""

    methods: ClassVar[tuple[str, ...]] = ("fp8", "compressed-tensors")
    supported: ClassVar[str] = (
        "fp8 (e4m3) weights with a scale per output channel, tensor or block, of quant_method compressed-tensors, modelopt or fp8"
    )
    unused: ClassVar[str] = rf"\.(input_scale|activation_scale|{UNUSED})$"

    @property
    def kv_scales(self) -> WeightFormat | None:
        return KVScales() if self.kv_cache else None

    @classmethod
    def claims(cls, given: Mapping[str, Any]) -> bool:
        if is_modelopt(given):
            return algorithm_of(given) in ALL_FP8
        return super().claims(given)

    @classmethod
    def read(cls, given: Mapping[str, Any], options: Options, faults: list[str]) -> Self | None:
        computes = options.quantization == "fp8"
        if not given:
            return cls(computes, ignored=options.unquantized) if computes else None
        read = {"fp8": _read_fp8, "compressed-tensors": _read_compressed_tensors}.get(given["quant_method"], _read_modelopt)
        if (fields := read(given, options.supported, faults)) is None:
            return None
        return cls(computes or (options.quantization is None and fields["block_shape"] is None), **fields)

    def covers(self, module: str) -> bool:
        is_target = not self.targets or matches_any(self.targets, module)
        return is_target and not matches_any(self.ignored, module)

    def faults(self, config: "ModelConfig") -> list[str]:
        return [] if self.scale_name is None else partly_covered(self.covers, config.linears())

    def told(self, dtype: str) -> str:
        if self.scale_name is None:
            return ""
        if self.block_shape is not None:
            size = "x".join(map(str, self.block_shape))
            becomes = "get one per output channel, rounded once more"
            if not self.computes:
                becomes = f"become {dtype} (for 8 bits a weight, with a scale per output channel instead: --quantization fp8)"
            return f"the checkpoint's fp8 weights have a scale per {size} block: they {becomes}"
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
        return self.scale_name is not None and self.block_shape is None

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

    def beside(self, tensor: Tensor, files: Files) -> dict[str, Expected]:
        module = tensor.name.removesuffix(".weight")
        if self.scale_name is None or module == tensor.name or len(tensor.shape) != 2 or tensor.transposed:
            return {}
        entry = files.entries.get(tensor.name)
        if module in files.linears and self.block_shape is not None:
            if not self.covers(module):
                return {}
        elif entry is None or entry.dtype != STORED_TYPE or not any(f"{module}.{n}" in files.entries for n in _SCALE_NAMES):
            return {}
        # A head may have another kind of scales than the layers.
        names = [f"{module}.{name}" for name in (self.scale_name, *_SCALE_NAMES)]
        name = next((name for name in names if name in files.entries), names[0])
        shape = files.entries[name].shape if name in files.entries else ()
        if name not in files.entries or self._block_of(tensor, shape) is None:
            rows, columns = self.block_shape or (1, tensor.shape[1])
            shape = (math.ceil(tensor.shape[0] / rows), math.ceil(tensor.shape[1] / columns))
        return {tensor.name: Expected(tensor.shape), name: Expected(shape)}

    def _block_of(self, tensor: Tensor, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """(outputs, inputs) that share a scale, where scales of a weight have this shape; None: they cannot have it."""
        (outputs, inputs), (rows, columns) = tensor.shape, self.block_shape or BLOCK
        blocks = math.ceil(outputs / rows), math.ceil(inputs / columns)
        if math.prod(shape) == 1:
            return outputs, inputs
        if shape in (blocks, (blocks[0], 1, blocks[1], 1)):
            return rows, columns
        return (1, inputs) if shape in ((outputs,), (outputs, 1)) else None

    def widened(self, tensor: Tensor, index: Index, files: Files) -> np.ndarray:
        """Float32."""
        _, name = self.beside(tensor, files)
        scale, (outputs, inputs) = files.tensor(name), tensor.shape
        block = self._block_of(tensor, scale.shape)
        assert block is not None, "checked before"
        rows, columns = block
        scale = scale.reshape(math.ceil(outputs / rows), math.ceil(inputs / columns))
        # The view's last dimensions are the inputs.
        split = next(i for i in range(len(tensor.view)) if math.prod(tensor.view[i:]) == inputs)
        by_output = replace(tensor, view=tensor.view[:split])
        row = by_output.read(np.arange(outputs) // rows, index[:split]).ravel()
        column = (np.arange(inputs) // columns).reshape(tensor.view[split:])[index[split:]].ravel()
        part = files.stored(tensor, index)
        wide = part.astype(np.float32).reshape(len(row), len(column))
        starts = [0, *(np.flatnonzero(np.diff(row)) + 1), len(row)]
        for start, stop in itertools.pairwise(starts):
            # A row of blocks at a time: a scale for every value would take as much memory as the weights.
            wide[start:stop] *= scale[row[start]].astype(np.float32)[column]
        return wide.reshape(part.shape)

    def dummy(self, part: str, draw: Draw, deviation: Any) -> Array:
        """A scale for all outputs, and values with a deviation of 100."""
        from jaxllm.quantization.fp8 import narrow

        return (
            draw.full(deviation / _DUMMY_DEVIATION, "float32") if part == "scale" else narrow(_DUMMY_DEVIATION * draw.normal())
        )

    def saved_config(self, given: Any, config: "ModelConfig", formats: Mapping[str, WeightFormat]) -> Mapping[str, Any] | None:
        """Compressed-tensors with a scale per output channel."""
        if not self.computes:
            return None
        linear = {
            "targets": ["Linear"],
            "weights": {**_NUMBER, "strategy": "channel", "dynamic": False},
            "input_activations": {**_NUMBER, "strategy": "token", "dynamic": True},
        }
        plain = [name for modules in config.linears() if not all(map(self.covers, modules)) for name in modules]
        return {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": linear},
            "ignore": [config.names.head, *plain],
        }

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


def _read_fp8(given: Mapping[str, Any], supported: str, faults: list[str]) -> dict[str, Any] | None:
    scheme, number_format = given.get("activation_scheme", "dynamic"), given.get("fmt", "e4m3")
    if scheme not in ("dynamic", "static"):
        faults.append(f"activation_scheme of the fp8 weights is {scheme!r}, must be dynamic or static")
    if number_format not in ("e4m3", "e4m3fn", TYPE):
        faults.append(f"the weights are quantised to {number_format!r}; {supported}")
    block = read_block(given.get("weight_block_size"), faults)
    key = "ignored_layers" if given.get("ignored_layers") else "modules_to_not_convert"
    return {
        "scale_name": "weight_scale_inv" if block else "weight_scale",
        "block_shape": block,
        "kv_cache": given.get("kv_cache_scheme") is not None,
        "ignored": read_names(given.get(key), key, faults, "re:"),
        "static_activations": scheme == "static",
    }


def _read_compressed_tensors(given: Mapping[str, Any], supported: str, faults: list[str]) -> dict[str, Any] | None:
    groups = given.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        count = len(groups) if isinstance(groups, Mapping) else 0
        faults.append(f"the quantised weights have {count} config_groups, supported: one for all linear layers; {supported}")
        return None
    (group,) = groups.values()
    parts = {name: group.get(name) or {} for name in ("weights", "input_activations")} if isinstance(group, Mapping) else {}
    if not parts or not all(isinstance(part, Mapping) for part in parts.values()):
        faults.append("config_groups of the quantised weights must be objects of objects")
        return None
    weights, inputs = parts["weights"], parts["input_activations"]
    form = group.get("format") or given.get("format")
    told = f"format {form}, {weights.get('num_bits')} bits of type {weights.get('type')}"
    numbers = [(part.get("num_bits"), part.get("type")) for part in (weights, inputs) if part or part is weights]
    if form not in ("float-quantized", "naive-quantized") or any(number != (8, "float") for number in numbers):
        faults.append(f"the weights are quantised with compressed-tensors ({told}); {supported}")
    if not (targets := read_names(group.get("targets"), "targets", faults, "re:")):
        faults.append("the quantised weights have no targets, must have ['Linear'] or names of modules")
    if weights.get("strategy") not in ("channel", "tensor", "block") or weights.get("symmetric") is False:
        symmetry = "asymmetric " if weights.get("symmetric") is False else ""
        faults.append(f"the weights have {symmetry}scales per {weights.get('strategy')}; {supported}")
    block = read_block(weights.get("block_structure") or [], faults) if weights.get("strategy") == "block" else None
    return {
        "scale_name": "weight_scale",
        "block_shape": block,
        "kv_cache": read_cache_scheme(given, faults),
        "targets": () if "Linear" in targets else targets,
        "ignored": read_names(given.get("ignore"), "ignore", faults, "re:"),
        "static_activations": bool(inputs) and not inputs.get("dynamic"),
    }


def _read_modelopt(given: Mapping[str, Any], supported: str, faults: list[str]) -> dict[str, Any] | None:
    found = read_description(given, dict.fromkeys(ALL_FP8), faults)
    return {
        "scale_name": "weight_scale",
        "block_shape": BLOCK if found.algorithm == FP8_BLOCK else None,
        "kv_cache": found.cache == "FP8",
        "ignored": found.ignored,
        "static_activations": found.algorithm == PER_TENSOR,
    }


def read_block(given: Any, faults: list[str]) -> tuple[int, int] | None:
    """The (outputs, inputs) that share a scale."""
    if given is None:
        return None
    if isinstance(given, list) and len(given) == 2 and all(isinstance(n, int) and n > 0 for n in given):
        return given[0], given[1]
    faults.append(f"the block of the quantised weights is {given!r}, must be two sizes such as [128, 128]")
    return None
