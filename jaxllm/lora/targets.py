"""The linear layers that adapters may change, and the arrays that hold adapters beside them."""

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from flax import nnx

from jaxllm.layers.linear import Linear, abstract_param
from jaxllm.layers.source import Index, Source, Tensor, output_major
from jaxllm.loaders.layout import axes_of, expand, parameters, source_of
from jaxllm.lora.shapes import TargetShape
from jaxllm.parallel.axes import MESH_AXES
from pallas_kernels.lora import Parts

Read = Callable[[str], np.ndarray]
"""A tensor of an adapter by its name, such as "model.layers.0.mlp.up_proj.lora_A.weight", with the rank of the slots."""


class Target(nnx.Module):
    """The adapters in all slots of one linear layer, of which M modules of the checkpoint are made.

    down [S, M * R, inputs...] takes the input of each module to R values, up [S, R, outputs...] these to its outputs. Both are split
    over devices as the layer's weight.
    """

    def __init__(self, linear: Linear, num_slots: int, rank: int, dtype: str):
        n, shape, axes = linear.num_contracted, linear.shape, linear.axes
        modules = linear.modules
        self.name = name_of(linear)
        self.before, self.sizes = _parts(linear)
        lora_a = tuple(
            Tensor(f"{m.name}.lora_A.weight", (rank, math.prod(linear.inputs)), (rank, *linear.inputs)) for m in modules
        )
        source = Source(lora_a, 0, tuple(range(len(linear.inputs) + 1)))
        lead = (num_slots, len(modules) * rank)
        self.down = abstract_param((*lead, *shape[:n]), ("slot", "rank", *axes[:n]), dtype, source=source)
        source = output_major(modules, "lora_B.weight", linear.joined, (rank,))
        self.up = abstract_param((num_slots, rank, *shape[n:]), ("slot", "rank", *axes[n:]), dtype, source=source)

    def parts(self, outputs: Sequence[int]) -> Parts:
        """Which of these outputs, those of a device, belong to which module."""
        return Parts(math.prod(outputs[: self.before]), self.sizes, math.prod(outputs[self.before + 1 :]))


def name_of(linear: Linear) -> str:
    """Names a layer by the modules that it is made of."""
    return ",".join(f"{m.name}{'' if m.columns is None else list(m.columns)}" for m in linear.modules)


def _parts(linear: Linear) -> tuple[int, tuple[int, ...]]:
    """Dimensions of the outputs before the one along which the modules are joined, and each module's share of that one."""
    size = linear.shape[linear.num_contracted + linear.joined]
    sizes = [m.outputs[linear.joined] for m in linear.modules]
    sizes[0] += size - sum(sizes)  # of copied KV heads, each has a part of the query heads
    return linear.joined, tuple(sizes)


def shapes_of(linear: Linear) -> Iterator[tuple[str, TargetShape]]:
    """The checkpoint's modules of a layer."""
    rows: dict[str, int] = {}
    for module in linear.modules:
        rows[module.name] = rows.get(module.name, 0) + module.num_rows
    for name, num_rows in rows.items():
        yield name, TargetShape(math.prod(linear.inputs), num_rows)


class Slots(nnx.Module):
    """The adapters in all slots, of all layers that they may change. Abstract: without values."""

    def __init__(self, layers: Sequence[Linear], num_slots: int, rank: int, dtype: str):
        self.targets = nnx.List([Target(linear, num_slots, rank, dtype) for linear in layers])


def adaptable(model: nnx.Module, names: Sequence[str] | None) -> list[Linear]:
    """The linear layers of a model, those with one of these last names if names are given, in the order of their modules."""
    found = {
        name_of(part): part
        for _, part in nnx.iter_modules(model)
        if isinstance(part, Linear)
        if names is None or any(m.name.rsplit(".", 1)[-1] in names for m in part.modules)
    }
    return list(found.values())


def packed_size(slots: Slots, num_devices: int) -> int:
    """Values of one adapter on one device."""
    size = 0
    for _, variable in parameters(slots):
        is_split = any(MESH_AXES[axis] for axis in axes_of(variable))
        size += math.prod(variable.shape[1:]) // (num_devices if is_split else 1)
    return size


def pack(slots: Slots, read: Read, dtype: np.dtype, num_devices: int) -> np.ndarray:
    """[num_devices, packed size]: each device's part of an adapter's arrays, one after the other."""
    packed = np.empty((num_devices, packed_size(slots, num_devices)), dtype)

    def tensor(wanted: Tensor, index: Index) -> np.ndarray:
        return wanted.read(read(wanted.name), index)

    start = 0
    for _, variable in parameters(slots):
        source, axes, shape = source_of(variable), axes_of(variable)[1:], variable.shape[1:]
        assert isinstance(source, Source)
        whole = expand(np, source.read(tensor).transpose(source.permutation), axes, shape)
        split = next((i for i, axis in enumerate(axes) if MESH_AXES[axis]), None)
        parts = [whole] * num_devices if split is None else np.split(whole, num_devices, split)
        end = start + parts[0].size
        for device, part in enumerate(parts):
            packed[device, start:end] = part.reshape(-1)
        start = end
    return packed
