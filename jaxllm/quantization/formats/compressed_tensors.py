"""Weights as compressed-tensors writes them: integers packed in words of 32 bits, plain int8, and floats of 4 and 8 bits.

Those that are all computed in fp8 are read by `fp8.Fp8` and `fp8_blocks.Fp8Blocks`. Source: github.com/vllm-project/compressed-tensors.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from jaxllm.errors import ModelLoadError
from jaxllm.quantization.formats.fp8_checkpoint import read_block
from jaxllm.quantization.formats.kv_scales import UNUSED, KVScales, read_cache_scheme
from jaxllm.quantization.formats.packed import PackedFormat, float_factor, float_scale
from jaxllm.quantization.formats.patterns import matches_any, read_names
from jaxllm.quantization.numbers import NUMBERS, NVFP4, Number, Scheme
from jaxllm.weight_format import Expected, Files, Options, WeightFormat

PACKED, INTEGERS = "pack-quantized", ("int-quantized", "naive-quantized")
FLOATS = {"nvfp4-pack-quantized": NVFP4, "mxfp4-pack-quantized": Scheme("e2m1", 32, scale_type="uint8")}
FLOATS["mxfp8-quantized"] = Scheme("e4m3", 32, scale_type="uint8")
"""Schemes of floats, by format."""
FP8 = ("float-quantized", "naive-quantized")
SCALE_TYPES = {"bfloat16": ("BF16",), "float16": ("F16",), "float32": ("F32", "BF16", "F16")}
SCALE_TYPES |= {"float8_e4m3fn": ("F8_E4M3",), "uint8": ("U8",)}
"""Types of stored scales, safetensors' names, that are kept exactly in a type."""
_WORD_BITS = 32


@dataclass(frozen=True)
class Group:
    """An element of config_groups: modules, and how their weights are stored."""

    targets: tuple[str, ...]
    """Parts of names of modules, regular expressions that begin with `re:`, and names of classes."""
    scheme: Scheme
    rows: int | None = 1
    """Outputs that share scales; None: the whole weight has one."""


@dataclass(frozen=True, kw_only=True)
class CompressedTensors(PackedFormat):
    """Integers or floats of 4 or 8 bits with a scale, and perhaps the code of zero, per group, block, output channel or tensor."""

    groups: tuple[Group, ...]
    ignored: tuple[str, ...] = ()
    """Modules that are not quantised, in the form of targets."""
    kv_cache: bool = False
    activations: bool = False
    """The checkpoint was made for quantised activations. They stay in the model's type, which is more exact."""

    methods: ClassVar[tuple[str, ...]] = ("compressed-tensors",)
    supported: ClassVar[str] = "int4, int8, fp8, nvfp4, mxfp4 and mxfp8 weights of quant_method compressed-tensors"
    unused: ClassVar[str] = rf"\.(weight_shape|input_scale|input_zero_point|input_global_scale|{UNUSED})$"

    @property
    def kv_scales(self) -> WeightFormat | None:
        return KVScales() if self.kv_cache else None

    @classmethod
    def claims(cls, given: Mapping[str, Any]) -> bool:
        groups = [group for group in _groups(given) if group.get("weights")]
        return super().claims(given) and (len(groups) > 1 or not all(map(is_fp8, groups)))

    @classmethod
    def read(cls, given: Mapping[str, Any], options: Options, faults: list[str]) -> Self | None:
        if not given:
            return None
        groups = [group for group in _groups(given) if group.get("weights")]
        return cls(
            computes=not options.dequantize and options.quantization is None,
            groups=tuple(_read_group(group, given, options, faults) for group in groups),
            ignored=read_names(given.get("ignore"), "ignore", faults, "re:"),
            kv_cache=read_cache_scheme(given, faults),
            activations=any(group.get("input_activations") for group in groups),
        )

    def _group(self, module: str) -> Group | None:
        """The first group with a target that names a module, else the first with its class; None: it is not quantised."""
        known = _known(self.groups, self.ignored)
        if module not in known:
            known[module] = self._find_group(module)
        return known[module]

    def _find_group(self, module: str) -> Group | None:
        if matches_any(self.ignored, module) or _class_of(module) in self.ignored:
            return None
        named = (group for group in self.groups if matches_any(group.targets, module))
        of_class = (group for group in self.groups if _class_of(module) in group.targets)
        return next(named, None) or next(of_class, None)

    def scheme(self, module: str) -> Scheme | None:
        group = self._group(module)
        return None if group is None else group.scheme

    def told(self, dtype: str) -> str:
        told = self.told_of(", ".join(dict.fromkeys(str(group.scheme) for group in self.groups)), dtype)
        if self.computes and self.activations:
            return f"{told}; it was made for quantised activations, which stay {dtype}: that is more exact"
        return told

    def stored(self, module: str, num_outputs: int, num_inputs: int) -> dict[str, Expected]:
        group, scheme, number = self.of_module(module)
        num_groups = math.ceil(num_inputs / (scheme.group or num_inputs))
        packed = num_inputs // number.per_value
        if number.code_type != "uint8":
            codes = {"int8": ("I8",), "float8_e4m3fn": ("F8_E4M3",)}
            found = {"weight": Expected((num_outputs, packed), codes[number.code_type])}
        elif scheme.number == "e2m1":
            found = {"weight_packed": Expected((num_outputs, packed), ("U8",))}
        else:
            per_word = _WORD_BITS // number.bits
            found = {"weight_packed": Expected((num_outputs, -(-num_inputs // per_word)), ("I32",))}
            if scheme.zeros:
                found["weight_zero_point"] = Expected((-(-num_outputs // per_word), num_groups), ("I32",))
        shape = (1,) if group.rows is None else (math.ceil(num_outputs / group.rows), num_groups)
        types, other = SCALE_TYPES[scheme.scale_type], ""
        if scheme.group is not None and scheme.number not in ("e2m1", "e4m3"):
            other = f'config.json says {scheme.scale_type}: set --dtype, and --hf-overrides \'{{"dtype": "float32"}}\''
        found["weight_scale"] = Expected(shape, types, other)
        if scheme.factor:
            found["weight_global_scale"] = Expected((1,), ("F32",))
        return {f"{module}.{name}": expected for name, expected in found.items()}

    def part(self, name: str, module: str, num_outputs: int, num_inputs: int, files: Files) -> np.ndarray:
        group, scheme, number = self.of_module(module)
        if name == "scale":
            scale = float_scale(files, f"{module}.weight_scale")
            if group.rows is None:
                return np.broadcast_to(scale, (num_outputs, 1))
            return scale if group.rows == 1 else scale[np.arange(num_outputs) // group.rows]
        if name == "factor":
            return np.broadcast_to(np.float32(1) / float_factor(files, f"{module}.weight_global_scale"), num_outputs)
        if name == "zero":
            words = files.tensor(f"{module}.weight_zero_point")
            shifts = np.arange(0, _WORD_BITS, number.bits, dtype=np.int32)[:, None]
            codes = (words[:, None] >> shifts & 2**number.bits - 1).astype(np.uint8)
            return codes.reshape(-1, words.shape[1])[:num_outputs]
        if number.code_type != "uint8":
            return files.tensor(f"{module}.weight")
        shape = f"{module}.weight_shape"
        if shape in files.entries and files.tensor(shape).tolist() != [num_outputs, num_inputs]:
            raise ModelLoadError(f"{shape} is {files.tensor(shape).tolist()}, must be {[num_outputs, num_inputs]}")
        # Codes lie in a word from its lowest bits on, so bytes hold them in order.
        return files.tensor(f"{module}.weight_packed").view(np.uint8)[:, : num_inputs // number.per_value]

    def of_module(self, module: str) -> tuple[Group, Scheme, Number]:
        group = self._group(module)
        assert group is not None
        return group, group.scheme, NUMBERS[group.scheme.number]


@functools.lru_cache(maxsize=4)
def _known(groups: tuple[Group, ...], ignored: tuple[str, ...]) -> dict[str, Group | None]:
    """The groups of modules that were asked for. All copies of a format (`split`, `of`) have them, because hundreds of names for tens of
    thousands of experts take seconds."""
    return {}


def _class_of(module: str) -> str:
    """The class of a module in transformers, as far as its name tells it."""
    return "Embedding" if "embed" in module.rpartition(".")[2] else "Linear"


def _groups(given: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = given.get("config_groups")
    found = list(groups.values()) if isinstance(groups, Mapping) else []
    return [group for group in found if isinstance(group, Mapping) and isinstance(group.get("weights") or {}, Mapping)]


def is_fp8(group: Mapping[str, Any]) -> bool:
    """Whether products of an element of config_groups are computed in fp8, or its weights have a scale per block."""
    weights = group.get("weights") or {}
    of_block = weights.get("strategy") == "block"
    return (weights.get("type"), weights.get("num_bits")) == ("float", 8) and (
        of_block or (weights.get("strategy") in ("tensor", "channel") and bool(group.get("input_activations")))
    )


def _read_group(group: Mapping[str, Any], given: Mapping[str, Any], options: Options, faults: list[str]) -> Group:
    targets = read_names(group.get("targets"), "targets", faults, "re:")
    weights, form = group["weights"], str(group.get("format") or given.get("format"))
    zeros = weights.get("symmetric") is False
    told = f"{'asymmetric ' * zeros}{weights.get('num_bits')} bits of type {weights.get('type')}, format {form}"
    read = _read_integers if weights.get("type") == "int" else _read_floats
    scheme, rows = read(weights, form, told, options, faults)
    return Group(targets, scheme, rows)


def _read_integers(
    weights: Mapping[str, Any], form: str, told: str, options: Options, faults: list[str]
) -> tuple[Scheme, int | None]:
    bits, size = weights.get("num_bits"), weights.get("group_size")
    strategy = weights.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
    zeros = weights.get("symmetric") is False
    if form not in (PACKED, *INTEGERS) or (form in INTEGERS and (zeros or bits != 8)):
        faults.append(f"the weights are quantised with compressed-tensors ({told}); {options.supported}")
    elif bits not in (4, 8):
        faults.append(f"the weights have {told}, of which codes cross words; supported: 4 and 8 bits")
    if strategy not in ("group", "channel", "tensor"):
        faults.append(f"the weights have scales per {strategy}, supported: group, channel and tensor")
    has_groups = strategy == "group" and size != -1
    if has_groups and (not isinstance(size, int) or size < 2 or size % 2):
        faults.append(f"group_size of the quantised weights is {size!r}, must be an even number")
    if weights.get("actorder") in ("group", "dynamic", True):
        faults.append(
            f"actorder of the quantised weights is {weights['actorder']!r}: inputs of a group are not neighbours; supported: "
            "'static' or 'weight', which leaves nothing to do"
        )
    number = ("int4" if bits == 4 else "uint8b128") if form == PACKED else "int8"
    scale_type = options.stored_dtype if has_groups else "float32"
    return Scheme(number, size if has_groups else None, zeros, scale_type=scale_type), None if strategy == "tensor" else 1


def _read_floats(
    weights: Mapping[str, Any], form: str, told: str, options: Options, faults: list[str]
) -> tuple[Scheme, int | None]:
    bits, strategy, size = weights.get("num_bits"), weights.get("strategy"), weights.get("group_size")
    scheme = FLOATS.get(form, Scheme("e4m3"))
    is_known = form in FLOATS or (form in FP8 and strategy in ("tensor", "channel", "block", "group"))
    if not is_known or bits != NUMBERS[scheme.number].bits or weights.get("symmetric") is False:
        faults.append(f"the weights are quantised with compressed-tensors ({told}, scales per {strategy}); {options.supported}")
        return scheme, 1
    if form in FLOATS and size != scheme.group:
        faults.append(f"group_size of the quantised weights is {size!r}, must be {scheme.group} in {form}")
    if form in FLOATS or strategy in ("tensor", "channel"):
        return scheme, None if strategy == "tensor" else 1
    rows, columns = read_block(weights.get("block_structure") or [], faults) or (1, 1) if strategy == "block" else (1, size)
    if not isinstance(columns, int) or columns < 1:
        faults.append(f"group_size of the quantised weights is {columns!r}, must be a positive number")
        columns = 1
    return Scheme("e4m3", columns), rows
