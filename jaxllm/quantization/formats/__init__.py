"""The formats of weights: a file with a subclass of `WeightFormat` for each. `jaxllm/options/quantization.py` registers them."""

import functools
import importlib
from typing import Any

from jaxllm.options.quantization import FORMATS
from jaxllm.weight_format import Options, WeightFormat


@functools.cache
def kinds() -> tuple[type[WeightFormat], ...]:
    """The classes of all registered formats."""
    paths = (each.path.split(":") for each in FORMATS)
    return tuple(getattr(importlib.import_module(module), name) for module, name in paths)


def supported_checkpoints() -> str:
    """The checkpoints that can be read, for pages."""
    return ", and ".join(kind.supported for kind in kinds() if kind.supported)


def read_formats(given: Any, options: Options, faults: list[str]) -> tuple[WeightFormat, ...]:
    """The formats of a model, of the quantization_config of its config.json and an engine's options. What is not supported is added
    to `faults`."""
    methods = dict.fromkeys(method for kind in kinds() if kind.supported for method in kind.methods)
    supported = f"supported: quant_method {', '.join(methods)}, as docs/MODELS.md says"
    if given and not isinstance(given, dict):
        faults.append(f"quantization_config is {given!r}, must be an object")
        given = None
    claiming = [kind for kind in kinds() if given and kind.claims(given)][:1]
    if given and not claiming:
        faults.append(f"the weights are quantised with quant_method {given.get('quant_method')!r}; {supported}")
    options, found = options._replace(supported=supported), []
    for kind in kinds():
        if (format := kind.read(given if kind in claiming else {}, options, faults)) is not None:
            found += [format, *format.others(options)]
            options = options._replace(unquantized=(*options.unquantized, *format.excluded))
    return tuple(found)
