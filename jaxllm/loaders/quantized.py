"""Fp8 weights of a checkpoint: the scales that belong to them, and how they are read as plain numbers."""

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from jaxllm.layers.source import AnySource, Index, Source, Tensor
from jaxllm.loaders.checkpoint import Checkpoint
from jaxllm.loaders.layout import ParamPath
from jaxllm.log import logger
from jaxllm.model_config import ModelConfig
from jaxllm.quantization_config import StoredFp8

BESIDE_WEIGHTS = re.compile(r"\.(input_scale|[kvq]_scale|[kvq]_proj\.[kvq]_scale|[kvq]_proj\.output_scale|prob_scale)$")
"""Scales that a checkpoint may hold and that need not be used: those of activations and of the cache."""
_KV_SCALES = ("{0}.{1}_scale", "{0}.attn.{1}_scale", "{0}.{1}_proj.{1}_scale", "{0}.{1}_proj.output_scale")


def is_quantized_here(path: ParamPath, config: ModelConfig) -> bool:
    """Whether these fp8 values, or this scale, are computed while loading: the checkpoint has none that could be used as is."""
    is_computed = config.stored_fp8 is None or config.stored_fp8.block_shape is not None
    return path[-1] in ("values", "scale") and is_computed


def block_scales(path: ParamPath, source: AnySource, config: ModelConfig) -> Iterator[tuple[Tensor, str, tuple[int, int]]]:
    """(weight, name of its scales, their shape) of the tensors of a parameter that the checkpoint holds with a scale per block."""
    stored = config.stored_fp8
    if stored is None or stored.block_shape is None or path[-1] == "scale":
        return
    linears = {f"{name}.weight" for modules in config.linears() for name in modules}
    if any(tensor.name not in linears for tensor in source.tensors):
        return
    for tensor in source.tensors:
        module = tensor.name.removesuffix(".weight")
        if stored.covers(module):
            (rows, columns), (outputs, inputs) = stored.block_shape, tensor.shape
            yield tensor, f"{module}.{stored.scale_name}", (math.ceil(outputs / rows), math.ceil(inputs / columns))


def scale_of_outputs(scale: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The float32 scale per output channel that a checkpoint holds, or the one of the whole tensor for each of them."""
    wide = scale.astype(np.float32)
    return np.broadcast_to(wide.reshape(()), shape) if wide.size == 1 else wide.reshape(shape)


def without_blocks(
    tensor: Tensor, values: np.ndarray, scale: np.ndarray, block_shape: tuple[int, int], index: Index
) -> np.ndarray:
    """Float32 weights: that part of a tensor whose values [outputs, inputs] come with a scale per block."""
    rows, columns = block_shape
    outputs, inputs = tensor.shape
    # The view's last dimensions are the inputs.
    split = next(i for i in range(len(tensor.view)) if math.prod(tensor.view[i:]) == inputs)
    by_output = replace(tensor, view=tensor.view[:split])
    row = by_output.read(np.arange(outputs) // rows, index[:split]).ravel()
    column = (np.arange(inputs) // columns).reshape(tensor.view[split:])[index[split:]].ravel()
    part = tensor.read(values, index)
    wide = part.astype(np.float32).reshape(len(row), len(column))
    starts = [0, *(np.flatnonzero(np.diff(row)) + 1), len(row)]
    for start, stop in itertools.pairwise(starts):
        # A row of blocks at a time: a scale for every value would take as much memory as the weights.
        wide[start:stop] *= scale[row[start]].astype(np.float32)[column]
    return wide.reshape(part.shape)


def kv_scale(checkpoint: Checkpoint, source: Source) -> np.ndarray:
    """What keys and values of a layer are divided by before they become fp8, float32 [2]; 1 where the checkpoint has no scale."""
    scales = np.ones(2, np.float32)
    missing = []
    for i, tensor in enumerate(source.tensors):
        attention, _, scale = tensor.name.rpartition(".")
        names = [form.format(attention, scale[0]) for form in _KV_SCALES]
        found = next((name for name in names if name in checkpoint.entries), None)
        if found is None:
            missing.append(names[0])
        else:
            scales[i] = checkpoint.tensor(found).astype(np.float32).reshape(())
    if missing:
        logger.warning("%s has no %s: keys and values are stored as they are", checkpoint.directory, " and no ".join(missing))
    return scales


def describe(stored: StoredFp8, config: ModelConfig) -> str:
    """What happens to the checkpoint's weights, for the log."""
    if stored.block_shape is not None:
        size = "x".join(map(str, stored.block_shape))
        if config.quantization is None:
            return (
                f"the checkpoint's fp8 weights have a scale per {size} block: they become {config.dtype} (for 8 bits a weight, with a "
                "scale per output channel instead: --quantization fp8)"
            )
        return f"the checkpoint's fp8 weights have a scale per {size} block: they get one per output channel, rounded once more"
    if stored.static_activations:
        return "fp8 weights; the checkpoint's scales of activations are not used: each token gets its own in every step"
    return "fp8 weights as the checkpoint has them"
