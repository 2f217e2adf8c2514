"""Scales of an fp8 KV cache, which checkpoints may hold whatever the format of their weights."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxllm.layers.source import Tensor
from jaxllm.log import warn_once
from jaxllm.weight_format import Array, Expected, Files, ParamSpec, Reader, WeightFormat

UNUSED = r"[kvq]_scale|[kvq]_proj\.[kvq]_scale|[kvq]_proj\.output_scale|prob_scale"
"""A pattern of the ends of their names, and of the names of other scales of attention, which are not read."""
_STORED = (8, "float", "tensor")
_NAMES = ("{0}.{1}_scale", "{0}.attn.{1}_scale", "{0}.{1}_proj.{1}_scale", "{0}.{1}_proj.output_scale")
_SCALED = {"k": "keys", "v": "values"}


@dataclass(frozen=True)
class KVScales(WeightFormat):
    """Divisors of the keys and values of a layer before they become fp8, float32 [2]; 1 where the checkpoint has no scale."""

    def expected(self, parts: Mapping[str, ParamSpec], files: Files) -> dict[str, Expected]:
        return {}

    def load(self, reader: Reader, parts: Mapping[str, ParamSpec]) -> Iterator[tuple[str, Array]]:
        yield from ((part, reader.array(spec, lambda tensor, _: _scale(reader, tensor))) for part, spec in parts.items())


def read_cache_scheme(given: Mapping[str, Any], faults: list[str]) -> bool:
    """Whether a quantization_config of compressed-tensors says that the cache is fp8."""
    scheme = given.get("kv_cache_scheme")
    fields = ("num_bits", "type", "strategy")
    if scheme is not None and (not isinstance(scheme, Mapping) or tuple(map(scheme.get, fields)) != _STORED):
        faults.append(f"kv_cache_scheme is {scheme!r}, supported: 8 bits of type float with strategy tensor")
    return scheme is not None


def _scale(files: Files, tensor: Tensor) -> np.ndarray:
    """The scale of keys or of values, float32 [1], under any of the names that writers give it."""
    attention, _, scale = tensor.name.rpartition(".")
    names = [form.format(attention, scale[0]) for form in _NAMES]
    if (found := next((name for name in names if name in files.entries), None)) is None:
        warn_once(f"the checkpoint has no {names[0]}: {_SCALED[scale[0]]} are stored as they are")
        return np.ones(1, np.float32)
    return files.tensor(found).astype(np.float32).reshape(1)
