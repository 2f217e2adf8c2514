"""What a config.json says of quantised weights: plain facts, and a clear word about what is not supported."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

SUPPORTED = (
    "supported: fp8 (e4m3) weights with a scale per output channel, tensor or block, of quant_method compressed-tensors "
    "(format float-quantized) or fp8, and experts of quant_method mxfp4"
)

_NO_BLOCKS_WITH_CACHE = "scales of the KV cache beside a weight scale per block are not supported"


@dataclass(frozen=True)
class StoredFp8:
    """How a checkpoint holds its fp8 weights: values and scales, a weight being their product."""

    scale_name: str
    """The last part of the name of a scale; weight_scale unless there is one per block."""
    block_shape: tuple[int, int] | None = None
    """(outputs, inputs) that share a scale; None: the scales are per output channel or per tensor."""
    ignored: tuple[str, ...] = ()
    """Modules that are not quantised: parts of dotted names, or regular expressions that begin with `re:`."""
    kv_cache: bool = False
    """The KV cache is fp8 too, and the checkpoint may hold its scales."""
    static_activations: bool = False
    """Scales of activations are stored. They are not used: a scale per token is computed, which is at least as precise."""

    def covers(self, module: str) -> bool:
        """Whether a module, by its name in the checkpoint, is quantised."""
        return not any(_matches(pattern, module) for pattern in self.ignored)

    def faults(self, linears: Iterable[tuple[str, ...]]) -> list[str]:
        """What of this cannot be computed: a linear layer made of several modules, some of them quantised. `linears` has the modules
        of each."""
        return [
            "these modules are one product, so all of them must be quantised or none: "
            + ", ".join(f"{name} {'is' if self.covers(name) else 'is not'}" for name in modules)
            for modules in linears
            if len(set(map(self.covers, modules))) > 1
        ]


@dataclass(frozen=True)
class StoredMxfp4:
    """A checkpoint whose experts are 4-bit floats (e2m1) with a scale per 32; nothing else is quantised."""

    ignored: tuple[str, ...] = ()
    """Modules that are not quantised: regular expressions of how their names begin, or how they end."""

    def covers(self, module: str) -> bool:
        """Whether a module, by its name in the checkpoint, is quantised."""
        return not any(re.match(pattern, module) or module.endswith(pattern) for pattern in self.ignored)


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return f".{pattern}." in f".{module}."


def read_quantization(given: Any, faults: list[str]) -> StoredFp8 | StoredMxfp4 | None:
    """The `quantization_config` of a config.json. Whatever is not supported is added to `faults`."""
    if not given:
        return None
    if not isinstance(given, Mapping):
        faults.append(f"quantization_config is {given!r}, must be an object")
        return None
    method = given.get("quant_method")
    if method == "fp8":
        return _read_fp8(given, faults)
    if method == "compressed-tensors":
        return _read_compressed_tensors(given, faults)
    if method == "mxfp4":
        return _read_mxfp4(given, faults)
    faults.append(f"the weights are quantised with quant_method {method!r}; {SUPPORTED}")
    return None


def _read_mxfp4(given: Mapping[str, Any], faults: list[str]) -> StoredMxfp4 | None:
    ignored = given.get("modules_to_not_convert") or []
    try:
        for pattern in ignored:
            re.compile(pattern)
    except (re.error, TypeError) as error:
        faults.append(f"modules_to_not_convert is {ignored!r}, must be a list of regular expressions ({error})")
        return None
    return StoredMxfp4(tuple(ignored))


def _read_fp8(given: Mapping[str, Any], faults: list[str]) -> StoredFp8 | None:
    scheme, number_format = given.get("activation_scheme", "dynamic"), given.get("fmt", "e4m3")
    if scheme not in ("dynamic", "static"):
        faults.append(f"activation_scheme of the fp8 weights is {scheme!r}, must be dynamic or static")
    if number_format not in ("e4m3", "e4m3fn", "float8_e4m3fn"):
        faults.append(f"the weights are quantised to {number_format!r}; {SUPPORTED}")
    block = _block_shape(given.get("weight_block_size"), faults)
    ignored = given.get("ignored_layers") or given.get("modules_to_not_convert") or []
    cache = given.get("kv_cache_scheme")
    if cache is not None and block is not None:
        faults.append(_NO_BLOCKS_WITH_CACHE)
    return StoredFp8(
        scale_name="weight_scale_inv" if block else "weight_scale",
        block_shape=block,
        ignored=tuple(map(str, ignored)),
        kv_cache=cache is not None,
        static_activations=scheme == "static",
    )


def _read_compressed_tensors(given: Mapping[str, Any], faults: list[str]) -> StoredFp8 | None:
    groups = given.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        count = len(groups) if isinstance(groups, Mapping) else 0
        faults.append(f"the quantised weights have {count} config_groups, supported: one for all linear layers; {SUPPORTED}")
        return None
    (group,) = groups.values()
    weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
    form = group.get("format") or given.get("format")
    told = f"format {form}, {weights.get('num_bits')} bits of type {weights.get('type')}"
    if not inputs:
        faults.append(f"the quantised weights ({told}) go with activations that are not quantised; {SUPPORTED}")
    elif form != "float-quantized" or any((x.get("num_bits"), x.get("type")) != (8, "float") for x in (weights, inputs)):
        faults.append(f"the weights are quantised with compressed-tensors ({told}); {SUPPORTED}")
    if group.get("targets") != ["Linear"]:
        faults.append(
            f"targets of the quantised weights are {group.get('targets')!r}, supported: ['Linear'], with an ignore list"
        )
    if weights.get("strategy") not in ("channel", "tensor", "block") or weights.get("symmetric") is False:
        symmetry = "asymmetric " if weights.get("symmetric") is False else ""
        faults.append(f"the weights have {symmetry}scales per {weights.get('strategy')}; {SUPPORTED}")
    block = _block_shape(weights.get("block_structure"), faults) if weights.get("strategy") == "block" else None
    cache = given.get("kv_cache_scheme")
    if cache is not None and (cache.get("num_bits"), cache.get("type"), cache.get("strategy")) != (8, "float", "tensor"):
        faults.append(f"kv_cache_scheme is {cache!r}, supported: 8 bits of type float with strategy tensor")
    if cache is not None and block is not None:
        faults.append(_NO_BLOCKS_WITH_CACHE)
    return StoredFp8(
        scale_name="weight_scale",
        block_shape=block,
        ignored=tuple(map(str, given.get("ignore") or [])),
        kv_cache=cache is not None,
        static_activations=not inputs.get("dynamic"),
    )


def _block_shape(given: Any, faults: list[str]) -> tuple[int, int] | None:
    if given is None:
        return None
    if isinstance(given, list) and len(given) == 2 and all(isinstance(n, int) and n > 0 for n in given):
        return given[0], given[1]
    faults.append(f"the block of the quantised weights is {given!r}, must be two sizes such as [128, 128]")
    return None
