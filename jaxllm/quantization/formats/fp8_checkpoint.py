"""Reads the description of a checkpoint with fp8 weights, and its tensors as plain numbers."""

import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from jaxllm.layers.source import Index, Tensor
from jaxllm.quantization.formats.kv_scales import UNUSED, KVScales, read_cache_scheme
from jaxllm.quantization.formats.modelopt_config import ALL_FP8, BLOCK, FP8_BLOCK, algorithm_of, is_modelopt, read_description
from jaxllm.quantization.formats.modelopt_config import FP8 as PER_TENSOR
from jaxllm.quantization.formats.patterns import matches_any, read_names
from jaxllm.weight_format import Expected, Files, Options, WeightFormat

TYPE, STORED_TYPE = "float8_e4m3fn", "F8_E4M3"
_SCALE_ENDINGS = ("_scale_inv", "_scale")
SCALE_TYPES = ("F32", "BF16", "F16", "F8_E8M0")


@dataclass(frozen=True, kw_only=True)
class Fp8Checkpoint(WeightFormat):
    """The base of formats of weights that a checkpoint holds as values (e4m3) and a scale per output channel, tensor or block, a weight
    being their product."""

    scale_name: str | None = None
    """The last part of the name of a scale in the checkpoint; None: it holds no fp8 weights."""
    block_shape: tuple[int, int] | None = None
    """(outputs, inputs) that share a scale; None: the scales of linear layers are per output channel or per tensor."""
    targets: tuple[str, ...] = ()
    """Modules that are quantised, in the form of `ignored`; empty: all linear layers."""
    ignored: tuple[str, ...] = ()
    """Modules that are not quantised: parts of dotted names, or regular expressions that begin with `re:`."""
    kv_cache: bool = False
    static_activations: bool = False
    """Scales of activations are stored. They are not used: activations stay as they are, or each token gets a scale in every step."""

    methods: ClassVar[tuple[str, ...]] = ("fp8", "compressed-tensors")
    unused: ClassVar[str] = rf"(\.(input_scale|activation_scale|{UNUSED})|_proj_activation_scale)$"

    @property
    def kv_scales(self) -> WeightFormat | None:
        return KVScales() if self.kv_cache else None

    @classmethod
    def claims(cls, given: Mapping[str, Any]) -> bool:
        if is_modelopt(given):
            return algorithm_of(given) in ALL_FP8
        return super().claims(given)

    @functools.cached_property
    def _covered(self) -> dict[str, bool]:
        """Modules that were asked for: there are tens of thousands of experts, each asked for several times."""
        return {}

    def covers(self, module: str) -> bool:
        if module not in self._covered:
            is_target = not self.targets or matches_any(self.targets, module)
            self._covered[module] = is_target and not matches_any(self.ignored, module)
        return self._covered[module]

    def beside(self, tensor: Tensor, files: Files) -> dict[str, Expected]:
        module, entry = tensor.name.removesuffix(".weight"), files.entries.get(tensor.name)
        of_all_experts = module == tensor.name and len(tensor.shape) == 3 and _is_output_major(tensor)
        if (
            self.scale_name is None
            or tensor.transposed
            or not (of_all_experts or module != tensor.name and len(tensor.shape) == 2)
        ):
            return {}
        if module in files.linears and self.block_shape is not None:
            return self.tensors(tensor, files) if self.covers(module) else {}
        has_scale = of_all_experts or any(f"{tensor.name}{ending}" in files.entries for ending in _SCALE_ENDINGS)
        is_fp8 = entry is not None and entry.dtype == STORED_TYPE and has_scale
        return self.tensors(tensor, files) if is_fp8 else {}

    def tensors(self, tensor: Tensor, files: Files) -> dict[str, Expected]:
        """The values of a weight, or of those of all experts [E, N, K], and its scale: with the name and shape that the checkpoint has, if
        they fit."""
        *lead, outputs, inputs = tensor.shape
        # A head may have another kind of scales than the layers.
        names = [f"{tensor.name}{ending}" for ending in (self.scale_ending(tensor.shape), *_SCALE_ENDINGS)]
        name = next((name for name in names if name in files.entries), names[0])
        shape = files.entries[name].shape if name in files.entries else ()
        if name not in files.entries or self._block_of(tensor.shape, shape, tensor.runs) is None:
            rows, columns = self.block_shape or (1, inputs)
            shape = (*lead, tensor.runs * math.ceil(outputs / tensor.runs / rows), math.ceil(inputs / columns))
        return {tensor.name: Expected(tensor.shape), name: Expected(shape, SCALE_TYPES)}

    def scale_ending(self, shape: tuple[int, ...]) -> str:
        """The ending of the name of a scale, behind that of a weight of this shape: of all experts, as transformers writes it."""
        return _SCALE_ENDINGS[0] if len(shape) == 3 else str(self.scale_name).removeprefix("weight")

    def _block_of(self, weight: tuple[int, ...], shape: tuple[int, ...], runs: int = 1) -> tuple[int, int] | None:
        """(outputs, inputs) that share a scale, where a weight and its scales have these shapes; None: they cannot have them. Blocks begin
        anew in each of the runs of outputs."""
        *lead, outputs, inputs = weight
        if lead:
            has_halves = shape == (*lead, 2, 1) and outputs % 2 == 0  # a scale of the gate and one of up
            found = self._block_of(weight[1:], shape[1:]) if shape[:1] == weight[:1] else None
            return found or ((outputs // 2, inputs) if has_halves else None)
        rows, columns = self.block_shape or BLOCK
        blocks = runs * math.ceil(outputs / runs / rows), math.ceil(inputs / columns)
        if math.prod(shape) == 1:
            return outputs, inputs
        if shape in (blocks, (blocks[0], 1, blocks[1], 1)):
            return rows, columns
        return (1, inputs) if shape in ((outputs,), (outputs, 1)) else None

    def scales(self, tensor: Tensor, files: Files) -> tuple[np.ndarray, np.ndarray, int]:
        """The scales of a weight, float32 [blocks of outputs, blocks of inputs], the block of each output, and the inputs of a block."""
        *lead, outputs, inputs = tensor.shape
        _, name = self.tensors(tensor, files)
        scale = files.tensor(name)
        block = self._block_of(tensor.shape, scale.shape, tensor.runs)
        assert block is not None, "checked before"
        rows, columns = block
        wide = scale.astype(np.float32).reshape(-1, math.ceil(inputs / columns))
        of_run = outputs if rows == outputs else outputs // tensor.runs
        first = np.arange(math.prod(lead) * outputs // of_run)[:, None] * math.ceil(of_run / rows)
        return wide, (first + np.arange(of_run) // rows).ravel(), columns

    def widened(self, tensor: Tensor, index: Index, files: Files) -> np.ndarray:
        """Float32."""
        (scale, row_of_output, columns), inputs = self.scales(tensor, files), tensor.shape[-1]
        # The view's last dimensions are the inputs.
        split = next(i for i in range(len(tensor.view)) if math.prod(tensor.view[i:]) == inputs)
        by_output = replace(tensor, view=tensor.view[:split])
        row = by_output.read(row_of_output, index[:split]).ravel()
        column = (np.arange(inputs) // columns).reshape(tensor.view[split:])[index[split:]].ravel()
        part = files.stored(tensor, index)
        wide = part.astype(np.float32).reshape(len(row), len(column))
        starts = [0, *(np.flatnonzero(np.diff(row)) + 1), len(row)]
        for start, stop in itertools.pairwise(starts):
            # A row of blocks at a time: a scale for every value would take as much memory as the weights.
            wide[start:stop] *= scale[row[start]][column]
        return wide.reshape(part.shape)


def _is_output_major(tensor: Tensor) -> bool:
    """Whether a tensor of all experts has the inputs last, as its view has."""
    return tensor.view[-1] == tensor.shape[-1]


def read_checkpoint(given: Mapping[str, Any], options: Options, faults: list[str]) -> dict[str, Any] | None:
    """The fields of a `Fp8Checkpoint`; None: they cannot be read."""
    read = {"fp8": _read_fp8, "compressed-tensors": _read_compressed_tensors}.get(given["quant_method"], _read_modelopt)
    return read(given, options.supported, faults)


def has_blocks(given: Mapping[str, Any]) -> bool:
    """Whether a quantization_config of fp8 weights has scales per block."""
    if is_modelopt(given):
        return algorithm_of(given) == FP8_BLOCK
    if given["quant_method"] == "fp8":
        return bool(given.get("weight_block_size"))
    groups = given.get("config_groups")
    weights = (
        [group.get("weights") for group in groups.values() if isinstance(group, Mapping)] if isinstance(groups, Mapping) else []
    )
    return any(isinstance(each, Mapping) and each.get("strategy") == "block" for each in weights)


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
