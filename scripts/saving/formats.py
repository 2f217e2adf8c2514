"""Writes weights as their formats have them: the tensors of a file, and the quantization_config that describes them."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxllm.model_config import ModelConfig
from jaxllm.quantization.formats.compressed_tensors import PACKED, CompressedTensors
from jaxllm.quantization.formats.fp8 import Fp8
from jaxllm.quantization.formats.fp8_blocks import Fp8Blocks
from jaxllm.quantization.formats.fp8_checkpoint import ALL_FP8, BLOCK, FP8_BLOCK
from jaxllm.quantization.formats.fp8_experts import Fp8Experts
from jaxllm.quantization.formats.gguf import Gguf
from jaxllm.quantization.formats.modelopt import SCHEMES, ModelOpt
from jaxllm.quantization.formats.mxfp4 import Mxfp4
from jaxllm.quantization.formats.packed import PART, PackedFormat
from jaxllm.quantization.formats.rounded import LINEAR, Rounded
from jaxllm.quantization.numbers import NUMBERS, Scheme
from jaxllm.weight_format import WeightFormat

Formats = Mapping[str, WeightFormat]
"""The format of each module with a weight in a format, as `WeightFormat.of` gives it."""
_FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}
_WORD_BITS = 32


@functools.singledispatch
def saved(format: WeightFormat, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of a file, of those that sources of this format's parts wrote, and others, which stay."""
    return tensors


@saved.register
def _(format: CompressedTensors, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    written, parts = _parts_by_module(tensors)
    for module, arrays in parts.items():
        group, scheme, number = format.of_module(module)
        codes, scale, weight = arrays["codes"], arrays["scale"], f"{module}.weight"
        written[f"{weight}_scale"] = scale[:1, 0] if group.rows is None else scale[:: group.rows]
        if "factor" in arrays:
            written[f"{weight}_global_scale"] = 1 / arrays["factor"][:1]
        if number.code_type != "uint8":
            written[weight] = codes
        elif scheme.number == "e2m1":
            written[f"{weight}_packed"] = codes
        else:
            written[f"{weight}_packed"] = np.pad(codes, ((0, 0), (0, -codes.shape[1] % 4))).view(np.int32)
            written[f"{weight}_shape"] = np.array([len(codes), codes.shape[1] * number.per_value])
        if "zero" in arrays:
            written[f"{weight}_zero_point"] = _in_words(arrays["zero"], number.bits)
    return written


@saved.register
def _(format: Fp8Blocks, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    written, parts = _parts_by_module(tensors)
    for module, arrays in parts.items():
        codes, scale = arrays["codes"], arrays["scale"]
        rows, columns = format.block_shape or (1, codes.shape[-1])
        name = f"{module}.weight" if codes.ndim == 2 else module
        written[name] = codes
        written[f"{name}{format.scale_ending(codes.shape)}"] = scale[
            ..., ::rows, :: max(1, columns * scale.shape[-1] // codes.shape[-1])
        ]
    return written


@saved.register
def _(format: ModelOpt, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    written, parts = _parts_by_module(tensors)
    for module, arrays in parts.items():
        codes, scale, algorithm = arrays["codes"], arrays["scale"], format.algorithm_for(module)
        if algorithm == FP8_BLOCK:
            scale = scale[:: BLOCK[0]]
        elif algorithm in ALL_FP8:
            scale = scale[:, 0]
        stored = format.stored(module, len(codes), codes.shape[1] * NUMBERS[SCHEMES[str(algorithm)].number].per_value)
        found = {"weight": codes, "weight_scale": scale, "weight_scale_2": arrays.get("factor")}
        for name, array in found.items():
            if array is not None:
                shape = stored[f"{module}.{name}"].shape
                written[f"{module}.{name}"] = array.reshape(-1)[: math.prod(shape)].reshape(shape)
    return written


def _parts_by_module(tensors: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, dict[str, np.ndarray]]]:
    """The tensors that are no parts of weights, and the parts of each module."""
    others: dict[str, np.ndarray] = {}
    parts: dict[str, dict[str, np.ndarray]] = {}
    for name, array in tensors.items():
        weight, _, part = name.partition(PART)
        if part:
            parts.setdefault(weight.removesuffix(".weight"), {})[part] = array
        else:
            others[name] = array
    return others, parts


def _in_words(codes: np.ndarray, bits: int) -> np.ndarray:
    """int32 [N / codes in a word, G] of codes [N, G], the first in the lowest bits."""
    shifts = np.arange(0, _WORD_BITS, bits, dtype=np.uint32)[:, None]
    padded = np.pad(codes.astype(np.uint32), ((0, -len(codes) % len(shifts)), (0, 0)))
    shifted = padded.reshape(-1, len(shifts), codes.shape[1]) << shifts
    return shifted.sum(axis=1, dtype=np.uint32).view(np.int32)


@functools.singledispatch
def saved_config(format: WeightFormat, given: Any, config: ModelConfig, formats: Formats) -> Mapping[str, Any] | None:
    """The quantization_config of a saved model, which was read with `given`; None: it needs none for this format."""
    return None


@saved_config.register
def _(format: PackedFormat | Mxfp4, given: Any, config: ModelConfig, formats: Formats) -> Mapping[str, Any] | None:
    return given if format.computes else None


@saved_config.register
def _(format: Gguf, given: Any, config: ModelConfig, formats: Formats) -> Mapping[str, Any] | None:
    return given  # type: ignore[no-any-return]


@saved_config.register
def _(format: Fp8Experts, given: Any, config: ModelConfig, formats: Formats) -> None:
    """That of `Fp8` says it."""


@saved_config.register
def _(format: Fp8, given: Any, config: ModelConfig, formats: Formats) -> Mapping[str, Any] | None:
    """Compressed-tensors with a scale per output channel."""
    if not format.computes:
        return None
    linear = {
        "targets": [LINEAR],
        "weights": {**_FLOAT, "strategy": "channel", "dynamic": False},
        "input_activations": {**_FLOAT, "strategy": "token", "dynamic": True},
    }
    plain = [name for modules in config.linears() if not all(map(format.covers, modules)) for name in modules]
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": linear},
        "ignore": [config.names.head, *plain],
    }


@saved_config.register
def _(format: Rounded, given: Any, config: ModelConfig, formats: Formats) -> Mapping[str, Any] | None:
    schemes = {module: each.weight_scheme for module, each in formats.items() if isinstance(each, Rounded)}
    modules: dict[Scheme, list[str]] = {}
    for module, scheme in schemes.items():
        assert scheme is not None
        modules.setdefault(scheme, []).append(module)
    commonest = max(modules, key=lambda scheme: len(modules[scheme]))
    plain = [name for names in config.linears() for name in names if name not in schemes]
    return {
        "quant_method": "compressed-tensors",
        "format": PACKED,
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{i}": _group(scheme, [LINEAR] if scheme == commonest else names)
            for i, (scheme, names) in enumerate(modules.items())
        },
        "ignore": [config.names.head, *plain],
        "kv_cache_scheme": None,
    }


def _group(scheme: Scheme, targets: list[str]) -> dict[str, Any]:
    size = {"strategy": "channel"} if scheme.group is None else {"strategy": "group", "group_size": scheme.group}
    number = {"num_bits": NUMBERS[scheme.number].bits, "type": "int", "symmetric": True, "dynamic": False}
    return {"targets": targets, "weights": {**number, **size}, "input_activations": None}
