"""What ModelOpt says of a checkpoint: the quantization_config of config.json, or hf_quant_config.json."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxllm.errors import shortened
from jaxllm.quantization.formats.patterns import read_names

FP8, FP8_CHANNEL, FP8_BLOCK = "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"
ALL_FP8 = (FP8, FP8_CHANNEL, FP8_BLOCK)
"""A scale per tensor, output channel, and block of BLOCK."""
BLOCK = (128, 128)
MIXED = "MIXED_PRECISION"
_ALIASES = {"FP8_BLOCK_SCALES": FP8_BLOCK}


class Description(NamedTuple):
    """How the weights of a checkpoint are stored."""

    algorithm: str | None
    """That of modules that `layers` do not name; None: they are plain."""
    layers: tuple[tuple[str, str], ...]
    """Algorithms of modules, or of all below them."""
    ignored: tuple[str, ...]
    """Modules that are not quantised, as `patterns.matches` takes them."""
    cache: str | None
    """The algorithm of the KV cache."""


def is_modelopt(given: Mapping[str, Any]) -> bool:
    """Whether a quantization_config is ModelOpt's."""
    return str(given.get("quant_method")).startswith("modelopt")


def algorithm_of(given: Mapping[str, Any]) -> str:
    """The algorithm of a quantization_config of ModelOpt."""
    return _algorithm(_body(given).get("quant_algo"))


def read_description(given: Mapping[str, Any], groups: Mapping[str, int | None], faults: list[str]) -> Description:
    """A quantization_config of ModelOpt. groups: the inputs that share a scale in each supported algorithm, None: all or a block."""
    supported = f"supported: {', '.join(groups)}, and {MIXED} of these"
    body, algorithm, cache = _body(given), algorithm_of(given), _cache(_body(given))
    layers = body.get("quantized_layers") if algorithm == MIXED else {}
    if not isinstance(layers, Mapping) or not all(isinstance(layer, Mapping) for layer in layers.values()):
        faults.append(f"quantized_layers of ModelOpt is {shortened(repr(layers))}, must say the quant_algo of each module")
        layers = {}
    of_layers = {name: _algorithm(layer.get("quant_algo")) for name, layer in layers.items()}
    has_cache_alone = body.get("quant_algo") is None and cache is not None
    for found in dict.fromkeys(of_layers.values() if algorithm == MIXED else [] if has_cache_alone else [algorithm]):
        if found not in groups:
            faults.append(f"the weights are quantised with ModelOpt's quant_algo {found!r}; {supported}")
    for told in [body, *layers.values()]:
        size, wanted = told.get("group_size"), groups.get(_algorithm(told.get("quant_algo")))
        if size and wanted and size != wanted:
            faults.append(f"group_size of ModelOpt's {told.get('quant_algo')} is {size!r}, must be {wanted}")
    key = "exclude_modules" if "exclude_modules" in body else "ignore"
    ignored = read_names(body.get(key), key, faults, "re:")
    of_others = None if algorithm == MIXED or has_cache_alone else algorithm
    return Description(of_others, tuple(of_layers.items()), _patterns(ignored), cache)


def _body(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The description itself, which hf_quant_config.json has below `quantization`."""
    inner = given.get("quantization")
    return inner if isinstance(inner, Mapping) else given


def _algorithm(name: Any) -> str:
    upper = str(name).upper()
    return _ALIASES.get(upper, upper)


def _patterns(wildcards: Sequence[str]) -> tuple[str, ...]:
    """Names of modules in which `*` is any text and `?` any character, as `patterns.matches` takes them: all with one of these are one
    regular expression, which is tried on each of perhaps thousands of experts."""
    wild = [name for name in wildcards if ("*" in name or "?" in name) and not name.startswith("re:")]
    names = tuple(name for name in wildcards if name not in wild)
    if not wild:
        return names
    either = "|".join(re.escape(name).replace(r"\*", ".*").replace(r"\?", ".") for name in wild)
    return (*names, f"re:(?:{either})$")


def _cache(body: Mapping[str, Any]) -> str | None:
    scheme = body.get("kv_cache_quant_algo") or body.get("kv_cache_scheme")
    if isinstance(scheme, Mapping):
        return "FP8" if (scheme.get("num_bits"), scheme.get("type")) == (8, "float") else f"{scheme.get('num_bits')} bits"
    return None if scheme is None else str(scheme).upper()
