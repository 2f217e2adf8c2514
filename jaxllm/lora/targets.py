"""The parts of a model that adapters may change, and the arrays that hold adapters."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from flax import nnx

from jaxllm.layers.decoder import CausalLM
from jaxllm.layers.linear import Linear, abstract_param
from jaxllm.layers.moe import MixtureOfExperts
from jaxllm.layers.parameters import axes_of, parameters, source_of
from jaxllm.layers.source import Index, Source, Tensor, output_major
from jaxllm.lora.embedding import EmbeddingTarget
from jaxllm.lora.experts import ExpertsTarget, modules_of
from jaxllm.lora.shapes import TargetShape
from jaxllm.parallel.axes import MESH_AXES
from pallas_kernels.lora import Parts

Read = Callable[[str], np.ndarray]
"""A tensor of an adapter by its name, such as "model.layers.0.mlp.up_proj.lora_A.weight", with the rank of the slots."""


class Target(nnx.Module):
    """The adapters in all slots of one product, of which M modules of the checkpoint are made.

    down [S, M * R, inputs...] takes the input of each module to R values, up [S, R, outputs...] these to its outputs. Both are split
    over devices as the layer's weight.
    """

    def __init__(self, name: str, down: nnx.Param, up: nnx.Param, before: int = 0, sizes: Sequence[int] = (1,)):
        """before: dimensions of the outputs before the one along which the modules are joined; sizes: each module's share of that."""
        self.name, self.down, self.up = name, down, up
        self.before, self.sizes = before, tuple(sizes)

    @classmethod
    def of_linear(cls, linear: Linear, num_slots: int, rank: int, dtype: str) -> "Target":
        """The target of a linear layer."""
        n, shape, axes = linear.num_contracted, linear.shape, linear.axes
        modules = linear.modules
        lora_a = tuple(
            Tensor(f"{m.name}.lora_A.weight", (rank, math.prod(linear.inputs)), (rank, *linear.inputs)) for m in modules
        )
        source = Source(lora_a, 0, tuple(range(len(linear.inputs) + 1)))
        lead = (num_slots, len(modules) * rank)
        down = abstract_param((*lead, *shape[:n]), ("slot", "rank", *axes[:n]), dtype, source=source)
        source = output_major(modules, "lora_B.weight", linear.joined, (rank,))
        up = abstract_param((num_slots, rank, *shape[n:]), ("slot", "rank", *axes[n:]), dtype, source=source)
        return cls(name_of(linear), down, up, *_parts(linear))

    def parts(self, outputs: Sequence[int]) -> Parts:
        """Which of these outputs, those of a device, belong to which module."""
        if len(self.sizes) == 1:
            return Parts(1, (1,), math.prod(outputs))
        return Parts(math.prod(outputs[: self.before]), self.sizes, math.prod(outputs[self.before + 1 :]))


class ScoresTarget(Target):
    """The adapters in all slots of float32 scores by a module with a weight [outputs, inputs]: logits, or those of a router."""

    def __init__(
        self,
        name: str,
        whole: tuple[int, ...],
        axes: Sequence[str],
        shape: TargetShape,
        num_slots: int,
        rank: int,
        dtype: str,
    ):
        """whole, axes: shape of the weight and its logical axes. shape: as stored, without padding."""
        N, D = whole
        lora_a = Tensor(f"{name}.lora_A.weight", (rank, D), (rank, D))
        lora_b = Tensor(f"{name}.lora_B.weight", (shape.outputs, rank), (shape.outputs, rank))
        down = abstract_param((num_slots, rank, D), ("slot", "rank", axes[1]), dtype, source=Source((lora_a,), 0, (0, 1)))
        up = abstract_param((num_slots, rank, N), ("slot", "rank", axes[0]), dtype, source=Source((lora_b,), 0, (1, 0)))
        super().__init__(name, down, up)


def name_of(linear: Linear) -> str:
    """Names a layer by the modules that it is made of."""
    return ",".join(f"{m.name}{'' if m.columns is None else list(m.columns)}" for m in linear.modules)


def _parts(linear: Linear) -> tuple[int, tuple[int, ...]]:
    """Dimensions of the outputs before the one along which the modules are joined, and each module's share of that one."""
    outputs = linear.shape[linear.num_contracted :]
    copies = outputs[0] // linear.modules[0].outputs[0]
    sizes = [m.outputs[linear.joined] // (copies if m.distributed else 1) for m in linear.modules]
    sizes[0] += outputs[linear.joined] - sum(sizes)  # of copied KV heads, each has a part of the query heads
    return linear.joined, tuple(sizes)


@dataclass(frozen=True)
class Adaptable:
    """A part of a model that adapters may change."""

    name: str
    modules: Mapping[str, TargetShape]
    """The checkpoint's modules that it is made of."""
    make: Callable[[int, int, str], nnx.Module]
    """(number of slots, rank, type) -> the arrays of all slots."""
    is_optional: bool = False
    """Whether there are slots for it only if it is named: those of a vocabulary are large, and few adapters have them."""

    def is_wanted(self, names: Sequence[str] | None) -> bool:
        """Whether one of these is the last name of one of its modules; None: whatever is not optional."""
        return not self.is_optional if names is None else any(last_name(module) in names for module in self.modules)


def last_name(module: str) -> str:
    """The last name of a module: "q_proj"."""
    return module.rpartition(".")[2]


def adaptable(model: nnx.Module) -> list[Adaptable]:
    """All parts of a model, or of a stage of it, that adapters may change, in the order of its modules."""
    found: dict[str, Adaptable] = {}
    for _, part in nnx.iter_modules(model):
        for each in _adaptable(part):
            found[each.name] = each
    return list(found.values())


def _adaptable(part: nnx.Module) -> Iterator[Adaptable]:
    if isinstance(part, Linear):
        yield Adaptable(name_of(part), _modules_of(part), partial(Target.of_linear, part))
    if isinstance(part, MixtureOfExperts):
        if part.part.has_kernels:
            yield Adaptable(part.name, modules_of(part), partial(ExpertsTarget, part))
        yield _of_scores(part.router_name, part.router.shape, axes_of(part.router))
        if part.shared_gate is not None:
            yield _of_scores(part.shared_gate_name, part.shared_gate.shape, axes_of(part.shared_gate))
    if isinstance(part, CausalLM):
        names, config = part.config.names, part.config
        if part.layers.start == 0:
            shape = TargetShape(config.vocab_size, config.hidden_size, "embedding")
            yield Adaptable(
                names.embedding,
                {names.embedding: shape},
                partial(EmbeddingTarget, names.embedding, part.embedding),
                is_optional=True,
            )
        if config.generates and part.layers.stop == config.num_layers:
            head = part.embedding if part.head is None else part.head
            yield _of_scores(names.head, head.shape, head.axes, config.vocab_size, is_optional=True)


def _of_scores(
    name: str, whole: tuple[int, ...], axes: Sequence[str], num_outputs: int | None = None, *, is_optional: bool = False
) -> Adaptable:
    N, D = whole
    shape = TargetShape(D, N if num_outputs is None else num_outputs)
    return Adaptable(name, {name: shape}, partial(ScoresTarget, name, whole, axes, shape), is_optional)


def _modules_of(linear: Linear) -> dict[str, TargetShape]:
    rows: dict[str, int] = {}
    for module in linear.modules:
        rows[module.name] = rows.get(module.name, 0) + module.num_rows
    return {name: TargetShape(math.prod(linear.inputs), num_rows) for name, num_rows in rows.items()}


class Slots(nnx.Module):
    """The adapters in all slots, of all parts that they may change. Abstract: without values."""

    def __init__(self, parts: Sequence[Adaptable], num_slots: int, rank: int, dtype: str):
        self.targets = nnx.List([part.make(num_slots, rank, dtype) for part in parts])


def packed_size(slots: nnx.Module, num_devices: int) -> int:
    """Values of one adapter on one device, of all slots or of a target."""
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
        axes, shape = axes_of(variable)[1:], variable.shape[1:]
        whole = source_of(variable).placed(axes, shape).read(tensor, (slice(None),) * len(shape), dtype)
        split = next((i for i, axis in enumerate(axes) if MESH_AXES[axis]), None)
        parts = [whole] * num_devices if split is None else np.split(whole, num_devices, split)
        end = start + parts[0].size
        for device, part in enumerate(parts):
            packed[device, start:end] = part.reshape(-1)
        start = end
    return packed
