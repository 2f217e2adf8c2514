"""The formats of weights. To add one: a file with a subclass of `WeightFormat`, and its line in FORMATS."""

from typing import Any

from jaxllm.quantization.formats.fp8 import Fp8
from jaxllm.quantization.formats.mxfp4 import Mxfp4
from jaxllm.weight_format import Options, WeightFormat

FORMATS: tuple[type[WeightFormat], ...] = (
    Fp8,
    Mxfp4,
)
"""The first that claims a quantization_config reads it; a weight is in the first that declares it."""


def read_formats(given: Any, options: Options, faults: list[str]) -> tuple[WeightFormat, ...]:
    """The formats of a model, of the quantization_config of its config.json and an engine's options. What is not supported is added
    to `faults`."""
    supported = f"supported: {', and '.join(kind.supported for kind in FORMATS)}"
    if given and not isinstance(given, dict):
        faults.append(f"quantization_config is {given!r}, must be an object")
        given = None
    kinds = [kind for kind in FORMATS if given and kind.claims(given)][:1]
    if given and not kinds:
        faults.append(f"the weights are quantised with quant_method {given.get('quant_method')!r}; {supported}")
    read = (kind.read(given if kind in kinds else {}, options._replace(supported=supported), faults) for kind in FORMATS)
    return tuple(format for format in read if format is not None)
