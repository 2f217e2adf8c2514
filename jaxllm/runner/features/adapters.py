"""Adapters as a feature of the step: the weights of a request's adapter change what is computed of its tokens."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.device_ops import DropStaged, WriteAdapter
from jaxllm.kernel_policy import CONCURRENT
from jaxllm.layers.step import Adapt
from jaxllm.parallel.across_hosts import put
from jaxllm.parallel.arrays import delete
from jaxllm.parallel.mesh import TENSOR, tensor_size
from jaxllm.parallel.shards import Shards
from jaxllm.progress import SILENT
from jaxllm.runner.adaptation import Adaptation
from jaxllm.runner.batch import Chunk
from jaxllm.runner.kernels import Kernels
from jaxllm.runner.layout import Column
from jaxllm.runner.ops import OpRunner
from jaxllm.runner.programs.key import ProgramKey
from jaxllm.runner.programs.kind import ProgramKind
from jaxllm.runner.row_arrays import Params
from jaxllm.runner.split_program import CompiledProgram, Lowered
from jaxllm.runner.step_feature import FeatureParts, StepFeature, StepRun
from jaxllm.scheduler_output import NO_ADAPTER

if TYPE_CHECKING:
    from jaxllm.runner.step_programs import StepPrograms


@dataclass(frozen=True)
class Adapters(StepFeature):
    """An adaptation, and its arrays among those of all weights."""

    adaptation: Adaptation
    merge: Callable[[Params], Any]
    part: slice
    kernels: Kernels

    name = "adapters"
    is_optional = True

    def is_needed(self, columns_RC: np.ndarray, chunks: Sequence[Chunk]) -> bool:
        return bool((columns_RC[:, Column.ADAPTER] != NO_ADAPTER).any())

    def programs(self) -> Sequence[ProgramKind]:
        return [WriteProgram(self)]

    def compiler_options(self, mesh: Mesh, key: ProgramKey) -> dict[str, str | bool]:
        """The products of adapters do not depend on those that they are added to: on one device, nodes of a CUDA graph that do not depend
        on each other run concurrently."""
        return CONCURRENT if self.name in key.features and mesh.size == 1 else {}

    def op_runner(self, device: Any) -> "AdapterSlots":
        return AdapterSlots(device, self)

    @property
    def changes_logits(self) -> bool:  # type: ignore[override]
        return self.adaptation.changes_logits

    def before(self, run: StepRun) -> None:
        columns_RC, places = run.columns_RC, run.places
        slot_T = jnp.where(places.is_real_T, columns_RC[places.owner_T, Column.ADAPTER], NO_ADAPTER)
        slot_t = run.share(slot_T)
        step_adapt = run.step.adapt = self._adapt(run.params, slot_t, run.shards)
        if self.changes_logits:
            # Logits are of all tokens, the layers perhaps of a share of them.
            run.adapts = lambda: (step_adapt if slot_t is slot_T else self._adapt(run.params, slot_T, run.shards),)

    def of_logits(self, params: Params, slot_T: jax.Array, shards: Shards) -> tuple[Adapt, ...]:
        return (self._adapt(params, slot_T, shards),) if self.changes_logits else ()

    def _adapt(self, params: Params, slot_T: jax.Array, shards: Shards) -> Adapt:
        return self.adaptation.adapt(self.merge(params), slot_T, shards, self.kernels)

    def write(self, arrays: Params, packed_1P: jax.Array, slot: jax.Array) -> Params:
        """The arrays of all slots with an adapter in one of them."""
        return self.adaptation.write(arrays, packed_1P, slot)

    def packed(self, mesh: Mesh) -> jax.ShapeDtypeStruct:
        """One adapter: each device's part of its arrays, one after the other."""
        by_device = NamedSharding(mesh, PartitionSpec(TENSOR))
        shape = (tensor_size(mesh), self.adaptation.packed_size)
        return jax.ShapeDtypeStruct(shape, jnp.dtype(self.adaptation.dtype), sharding=by_device)


class WriteProgram(ProgramKind):
    """See `Adapters.write`."""

    name = "write_adapter"
    only = "common"

    def __init__(self, adapters: Adapters):
        self.adapters = adapters

    def lower(self, programs: "StepPrograms", key: ProgramKey) -> Lowered:
        arrays = programs.params[self.adapters.part]
        out = tuple(array.sharding for array in arrays)
        arguments = (arrays, self.adapters.packed(programs.mesh), programs.ints())
        return programs.lower_on_each(self.adapters.write, arguments, out, donate=(0,))

    def run_on_nothing(self, runner: Any, key: ProgramKey, program: CompiledProgram) -> None:
        wanted = self.adapters.packed(runner.shapes.mesh)
        write(runner, self.adapters, program, 0, put(np.zeros(wanted.shape, wanted.dtype), wanted.sharding))


def write(runner: Any, adapters: Adapters, program: CompiledProgram, slot: int, packed: jax.Array) -> None:
    """Write an adapter (`Adapters.packed`), whose array is taken, into a slot."""
    arrays = program(runner.params[adapters.part], packed, runner.put(np.int32(slot)))
    _replace(runner, adapters.part, arrays)


def _replace(runner: Any, part: slice, arrays: Iterable[jax.Array]) -> None:
    runner.params = (*runner.params[: part.start], *arrays, *runner.params[part.stop :])


class AdapterSlots(OpRunner):
    """The slots of adapters on the devices of a runner, and what was staged for one."""

    ops = (WriteAdapter, DropStaged)

    def __init__(self, runner: Any, adapters: Adapters):
        self._runner, self._adapters = runner, adapters
        self._staged: dict[int, jax.Array] = {}
        """Packed adapters, by handle."""

    def stage(self, handle: int, data: np.ndarray) -> None:
        """Send a packed adapter, or its bytes, to the devices, as far as it is of this stage; it has arrived when this returns."""
        wanted = self._adapters.packed(self._runner.shapes.mesh)
        own = self._adapters.adaptation.own(data.view(wanted.dtype).reshape(wanted.shape[0], -1))
        self._staged[handle] = jax.block_until_ready(put(own, wanted.sharding))

    def run(self, op: WriteAdapter | DropStaged) -> None:
        staged = self._staged.pop(op.staged, None)
        if isinstance(op, WriteAdapter):
            assert staged is not None, "no adapter was staged"
            write(self._runner, self._adapters, self._runner.program(ProgramKey(WriteProgram.name)), op.slot, staged)

    def replace_lost(self) -> None:
        """Empty slots in place of arrays that a failed write took."""
        runner, part = self._runner, self._adapters.part
        if not any(array.is_deleted() for array in runner.params[part]):
            return
        delete(runner.params[part])
        empty = jax.tree.leaves(self._adapters.adaptation.load(runner.shapes.mesh, SILENT))
        _replace(runner, part, empty)

    def delete_arrays(self) -> None:
        delete(self._staged)
        self._staged.clear()


def make(parts: FeatureParts) -> StepFeature | None:
    """For engines with adapters, where these change something."""
    adaptation: Adaptation | None = parts.beside["adaptation"]
    if adaptation is None:
        return None
    weights = parts.weights["adaptation"]
    return Adapters(adaptation, weights.merge, weights.part, parts.kernels)
