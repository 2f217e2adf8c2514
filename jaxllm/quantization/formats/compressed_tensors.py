"""Integer weights as compressed-tensors writes them: packed in words of 32 bits, or plain int8.

Source: github.com/vllm-project/compressed-tensors.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from jaxllm.errors import ModelLoadError
from jaxllm.quantization.formats.kv_scales import UNUSED, KVScales, read_cache_scheme
from jaxllm.quantization.formats.packed import PART, PackedFormat
from jaxllm.quantization.formats.patterns import matches, read_names
from jaxllm.quantization.numbers import NUMBERS, Scheme
from jaxllm.weight_format import Expected, Files, Options, WeightFormat

if TYPE_CHECKING:
    from jaxllm.model_config import ModelConfig

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
    per_tensor: bool = False
    """One scale is stored, of all outputs."""


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
        group = self._group(module)
        return None if group is None else group.scheme

    def _group(self, module: str) -> Group | None:
        """The first group with a target that names a module, else the first with its class; None: it is not quantised."""
        of_class = _class_of(module)
        if any(matches(pattern, module) or pattern == of_class for pattern in self.ignored):
            return None
        named = (group for group in self.groups if any(matches(target, module) for target in group.targets))
        return next(named, None) or next((group for group in self.groups if of_class in group.targets), None)

    def told(self, dtype: str) -> str:
        kinds = ", ".join(dict.fromkeys(str(group.scheme) for group in self.groups))
        if not self.computes:
            return f"the checkpoint's weights ({kinds}) become {dtype}"
        activations = (
            f"; it was made for activations of 8 bits, which stay {dtype}: that is more exact" if self.activations else ""
        )
        return f"weights as the checkpoint has them ({kinds}){activations}"

    def unrestorable(self, names: Collection[str]) -> str:
        is_packed = any(name.endswith(".codes") for name in names)
        if is_packed == self.computes:
            return ""
        if is_packed:
            return "holds packed weights, which are widened only while a checkpoint is read; leave --dequantize out"
        return "holds an orbax checkpoint without packed weights; convert the original again with scripts/convert_checkpoint.py"

    def stored(self, module: str, num_outputs: int, num_inputs: int) -> dict[str, Expected]:
        group = self._of_module(module)
        scheme, number = group.scheme, NUMBERS[group.scheme.number]
        num_groups = num_inputs // (scheme.group or num_inputs)
        scales = SCALE_TYPES[scheme.scale_type]
        other = f'config.json says {scheme.scale_type}: set --dtype, and --hf-overrides \'{{"dtype": "float32"}}\''
        if number.code_type == "int8":
            found = {"weight": Expected((num_outputs, num_inputs), ("I8",))}
        else:
            per_word = _WORD_BITS // number.bits
            found = {"weight_packed": Expected((num_outputs, -(-num_inputs // per_word)), ("I32",))}
            if scheme.zeros:
                found["weight_zero_point"] = Expected((-(-num_outputs // per_word), num_groups), ("I32",))
        found["weight_scale"] = Expected((1,) if group.per_tensor else (num_outputs, num_groups), scales, other)
        return {f"{module}.{name}": expected for name, expected in found.items()}

    def part(self, name: str, module: str, num_outputs: int, num_inputs: int, files: Files) -> np.ndarray:
        group = self._of_module(module)
        number = NUMBERS[group.scheme.number]
        if name == "scale":
            scale = files.tensor(f"{module}.weight_scale")
            return np.broadcast_to(scale, (num_outputs, 1)) if group.per_tensor else scale
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

    def saved_config(self, given: Any, config: "ModelConfig", formats: Mapping[str, WeightFormat]) -> Mapping[str, Any] | None:
        return given if self.computes else None

    def saved(self, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        parts: dict[str, dict[str, np.ndarray]] = {}
        written: dict[str, np.ndarray] = {}
        for name, array in tensors.items():
            weight, _, part = name.partition(PART)
            if part:
                parts.setdefault(weight, {})[part] = array
            else:
                written[name] = array
        for weight, arrays in parts.items():
            codes, group = arrays["codes"], self._of_module(weight.removesuffix(".weight"))
            number = NUMBERS[group.scheme.number]
            written[f"{weight}_scale"] = arrays["scale"][0] if group.per_tensor else arrays["scale"]
            if number.code_type == "int8":
                written[weight] = codes
                continue
            written[f"{weight}_packed"] = np.pad(codes, ((0, 0), (0, -codes.shape[1] % 4))).view(np.int32)
            written[f"{weight}_shape"] = np.array([len(codes), codes.shape[1] * number.per_value])
            if "zero" in arrays:
                written[f"{weight}_zero_point"] = _in_words(arrays["zero"], number.bits)
        return written

    def _of_module(self, module: str) -> Group:
        group = self._group(module)
        assert group is not None
        return group


def _in_words(codes: np.ndarray, bits: int) -> np.ndarray:
    """int32 [N / codes in a word, G] of codes [N, G], the first in the lowest bits."""
    shifts = np.arange(0, _WORD_BITS, bits, dtype=np.uint32)[:, None]
    padded = np.pad(codes.astype(np.uint32), ((0, -len(codes) % len(shifts)), (0, 0)))
    shifted = padded.reshape(-1, len(shifts), codes.shape[1]) << shifts
    return shifted.sum(axis=1, dtype=np.uint32).view(np.int32)


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
    return Group(targets, Scheme(number, size if has_groups else None, zeros, scale_type=scale_type), strategy == "tensor")
