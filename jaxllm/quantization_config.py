"""Reads how a config.json describes quantised weights; names what is not supported."""

import functools
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import regex

from jaxllm.errors import shortened

SUPPORTED = (
    "supported: fp8 (e4m3) weights with a scale per output channel, tensor or block, of quant_method compressed-tensors "
    "(format float-quantized) or fp8, and experts of quant_method mxfp4"
)

_MATCH_SECONDS = 0.1
"""Longest time for a pattern and a name."""
_MAX_SECONDS = 1.0
"""Longest CPU time for all of them."""
_MAX_PATTERN = 500
_TOO_SLOW = "the patterns of modules that are not quantised take too long; give the names of the modules there"
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
        """Describe what cannot be computed: a linear layer made of several modules, some of them quantised. `linears` has the modules
        of each."""
        deadline = time.process_time() + _MAX_SECONDS
        found = []
        for modules in linears:
            try:
                covered = {name: self.covers(name) for name in modules}
            except (TimeoutError, RecursionError):
                return [_TOO_SLOW]
            if len(set(covered.values())) > 1:
                told = ", ".join(f"{name} {'is' if on else 'is not'}" for name, on in covered.items())
                found.append(f"these modules are one product, so all of them must be quantised or none: {told}")
            if time.process_time() > deadline:
                return [_TOO_SLOW]
        return found


@dataclass(frozen=True)
class StoredMxfp4:
    """A checkpoint whose experts are 4-bit floats (e2m1) with a scale per 32; nothing else is quantised."""

    ignored: tuple[str, ...] = ()
    """Modules that are not quantised: regular expressions of how their names begin, or how they end."""

    def covers(self, module: str) -> bool:
        """Whether a module, by its name in the checkpoint, is quantised."""
        return not any(_begins(pattern, module) or module.endswith(pattern) for pattern in self.ignored)


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return _begins(pattern[3:], module)
    return f".{pattern}." in f".{module}."


def _begins(pattern: str, module: str) -> bool:
    """Whether a regular expression fits how a name begins. Raises TimeoutError."""
    return _compiled(pattern).match(module, timeout=_MATCH_SECONDS) is not None


@functools.lru_cache(maxsize=1024)
def _compiled(pattern: str) -> "regex.Pattern[str]":
    return regex.compile(pattern)


def _names(given: Any, key: str, faults: list[str], prefix: str = "") -> tuple[str, ...]:
    """Names of modules and regular expressions of them, which begin with `prefix`."""
    if given is None:
        return ()
    if not isinstance(given, list) or not all(isinstance(each, str) and len(each) <= _MAX_PATTERN for each in given):
        faults.append(f"{key} is {shortened(repr(given))}, must be a list of names of up to {_MAX_PATTERN} characters")
        return ()
    for pattern in given:
        try:
            _compiled(pattern[len(prefix) :] if pattern.startswith(prefix) else "")
        except (regex.error, RecursionError, OverflowError) as error:
            faults.append(f"{key} has {shortened(pattern)!r}, which is no regular expression ({error})")
            return ()
    return tuple(given)


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
    return StoredMxfp4(_names(given.get("modules_to_not_convert"), "modules_to_not_convert", faults))


def _read_fp8(given: Mapping[str, Any], faults: list[str]) -> StoredFp8 | None:
    scheme, number_format = given.get("activation_scheme", "dynamic"), given.get("fmt", "e4m3")
    if scheme not in ("dynamic", "static"):
        faults.append(f"activation_scheme of the fp8 weights is {scheme!r}, must be dynamic or static")
    if number_format not in ("e4m3", "e4m3fn", "float8_e4m3fn"):
        faults.append(f"the weights are quantised to {number_format!r}; {SUPPORTED}")
    block = _block_shape(given.get("weight_block_size"), faults)
    key = "ignored_layers" if given.get("ignored_layers") else "modules_to_not_convert"
    cache = given.get("kv_cache_scheme")
    if cache is not None and block is not None:
        faults.append(_NO_BLOCKS_WITH_CACHE)
    return StoredFp8(
        scale_name="weight_scale_inv" if block else "weight_scale",
        block_shape=block,
        ignored=_names(given.get(key), key, faults, "re:"),
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
    parts = {name: group.get(name) or {} for name in ("weights", "input_activations")} if isinstance(group, Mapping) else {}
    cache = given.get("kv_cache_scheme")
    if not parts or not all(isinstance(part, Mapping) for part in (*parts.values(), cache or {})):
        faults.append("config_groups and kv_cache_scheme of the quantised weights must be objects of objects")
        return None
    weights, inputs = parts["weights"], parts["input_activations"]
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
    if cache is not None and (cache.get("num_bits"), cache.get("type"), cache.get("strategy")) != (8, "float", "tensor"):
        faults.append(f"kv_cache_scheme is {cache!r}, supported: 8 bits of type float with strategy tensor")
    if cache is not None and block is not None:
        faults.append(_NO_BLOCKS_WITH_CACHE)
    return StoredFp8(
        scale_name="weight_scale",
        block_shape=block,
        ignored=_names(given.get("ignore"), "ignore", faults, "re:"),
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
