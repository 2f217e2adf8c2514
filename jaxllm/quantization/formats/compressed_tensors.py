"""Integer weights as compressed-tensors writes them: packed in words of 32 bits, or plain int8.

Source: github.com/vllm-project/compressed-tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from jaxllm.errors import ModelLoadError
from jaxllm.quantization.formats.kv_scales import UNUSED, KVScales, read_cache_scheme
from jaxllm.quantization.formats.packed import PackedFormat, Scheme
from jaxllm.quantization.formats.patterns import matches, read_names
from jaxllm.quantization.numbers import NUMBERS
from jaxllm.weight_format import Expected, Files, Options, WeightFormat

PACKED, INTEGERS = "pack-quantized", ("int-quantized", "naive-quantized")
SCALE_TYPES = {"bfloat16": ("BF16",), "float16": ("F16",), "float32": ("F32", "BF16", "F16")}
"""Types of stored scales, safetensors' names, that are kept exactly in a type."""
_WORD_BITS = 32


@dataclass(frozen=True)
class Group:
    """An element of config_groups: modules, and how their weights are stored."""

    targets: tuple[str, ...]
    """Parts of names of modules, regular expressions that begin with `re:`, and names of classes."""
    scheme: Scheme


@dataclass(frozen=True, kw_only=True)
class CompressedTensors(PackedFormat):
    """Integers of 4 or 8 bits with a scale, and perhaps the code of zero, per group, output channel or tensor."""

    groups: tuple[Group, ...]
    ignored: tuple[str, ...] = ()
    """Modules that are not quantised, in the form of targets."""
    kv_cache: bool = False
    activations: bool = False
    """The checkpoint was made for activations of 8 bits. They stay in the model's type, which is more exact."""

    supported: ClassVar[str] = (
        "int4 and int8 weights of quant_method compressed-tensors (formats pack-quantized, int-quantized and naive-quantized)"
    )
    unused: ClassVar[str] = rf"\.(weight_shape|input_scale|input_zero_point|{UNUSED})$"

    @property
    def kv_scales(self) -> WeightFormat | None:
        return KVScales() if self.kv_cache else None

    @classmethod
    def claims(cls, given: Mapping[str, Any]) -> bool:
        return given.get("quant_method") == "compressed-tensors" and any(
            group.get("weights", {}).get("type") == "int" for group in _groups(given)
        )

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

    def scheme(self, module: str) -> Scheme | None:
        if any(matches(pattern, module) or pattern == _class_of(module) for pattern in self.ignored):
            return None
        named = (group.scheme for group in self.groups if any(matches(target, module) for target in group.targets))
        of_class = (group.scheme for group in self.groups if _class_of(module) in group.targets)
        return next(named, None) or next(of_class, None)

    def told(self, dtype: str) -> str:
        kinds = ", ".join(dict.fromkeys(str(group.scheme) for group in self.groups))
        if not self.computes:
            return f"the checkpoint's weights ({kinds}) become {dtype}"
        activations = (
            f"; it was made for activations of 8 bits, which stay {dtype}: that is more exact" if self.activations else ""
        )
        return f"weights as the checkpoint has them ({kinds}){activations}"

    def stored(self, module: str, num_outputs: int, num_inputs: int) -> dict[str, Expected]:
        scheme, number = self._of_module(module)
        num_groups = num_inputs // (scheme.group or num_inputs)
        scales = SCALE_TYPES[scheme.scale_type]
        if number.code_type == "int8":
            found = {"weight": Expected((num_outputs, num_inputs), ("I8",))}
        else:
            per_word = _WORD_BITS // number.bits
            found = {"weight_packed": Expected((num_outputs, -(-num_inputs // per_word)), ("I32",))}
            if scheme.zeros:
                found["weight_zero_point"] = Expected((-(-num_outputs // per_word), num_groups), ("I32",))
        found["weight_scale"] = Expected((num_outputs, num_groups), scales)
        return {f"{module}.{name}": expected for name, expected in found.items()}

    def part(self, name: str, module: str, num_outputs: int, num_inputs: int, files: Files) -> np.ndarray:
        number = self._of_module(module)[1]
        if name == "scale":
            return files.tensor(f"{module}.weight_scale")
        if name == "zero":
            words = files.tensor(f"{module}.weight_zero_point")
            shifts = np.arange(0, _WORD_BITS, number.bits, dtype=np.int32)[:, None]
            codes = (words[:, None] >> shifts & 2**number.bits - 1).astype(np.uint8)
            return codes.reshape(-1, words.shape[1])[:num_outputs]
        if number.code_type == "int8":
            return files.tensor(f"{module}.weight")
        shape = f"{module}.weight_shape"
        if shape in files.entries and files.tensor(shape).tolist() != [num_outputs, num_inputs]:
            raise ModelLoadError(f"{shape} is {files.tensor(shape).tolist()}, must be {[num_outputs, num_inputs]}")
        # Codes lie in a word from its lowest bits on, so bytes hold them in order.
        return files.tensor(f"{module}.weight_packed").view(np.uint8)[:, : num_inputs // number.per_value]

    def _of_module(self, module: str) -> tuple[Scheme, Any]:
        scheme = self.scheme(module)
        assert scheme is not None
        return scheme, NUMBERS[scheme.number]


def _class_of(module: str) -> str:
    """The class of a module in transformers, as far as its name tells it."""
    return "Embedding" if "embed" in module.rpartition(".")[2] else "Linear"


def _groups(given: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = given.get("config_groups")
    found = list(groups.values()) if isinstance(groups, Mapping) else []
    return [group for group in found if isinstance(group, Mapping) and isinstance(group.get("weights") or {}, Mapping)]


def _read_group(group: Mapping[str, Any], given: Mapping[str, Any], options: Options, faults: list[str]) -> Group:
    weights, form = group["weights"], group.get("format") or given.get("format")
    bits, strategy, size = weights.get("num_bits"), weights.get("strategy"), weights.get("group_size")
    zeros = weights.get("symmetric") is False
    told = f"{bits} bits of type {weights.get('type')}, format {form}"
    if weights.get("type") != "int" or form not in (PACKED, *INTEGERS) or (form in INTEGERS and (zeros or bits != 8)):
        kind = "asymmetric " if zeros else ""
        faults.append(f"the weights are quantised with compressed-tensors ({kind}{told}); {options.supported}")
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
    targets = read_names(group.get("targets"), "targets", faults, "re:")
    return Group(targets, Scheme(number, size if has_groups else None, zeros, scale_type=scale_type))
