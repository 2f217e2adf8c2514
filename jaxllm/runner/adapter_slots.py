"""The slots of adapters on the devices of a runner: what is on its way into one, and what a failed write lost."""

from typing import TYPE_CHECKING

import jax
import numpy as np

from jaxllm.device_ops import DropStaged, WriteAdapter
from jaxllm.loaders.layout import delete, zeros
from jaxllm.parallel.across_hosts import put
from jaxllm.runner.features.adapters import Adapters
from jaxllm.runner.step_programs import ProgramKey

if TYPE_CHECKING:
    from jaxllm.runner.runner import ModelRunner


class AdapterSlots:
    """An OpFeature. Nothing happens on a stage of a pipeline that adapters do not change."""

    ops = (WriteAdapter, DropStaged)
    program = "write_adapter"

    def __init__(self, runner: "ModelRunner"):
        self._runner = runner
        self._staged: dict[int, jax.Array] = {}
        """Packed adapters, by handle."""

    @property
    def _adapting(self) -> Adapters | None:
        return self._runner.shapes.functions.find(Adapters)

    def stage(self, handle: int, data: np.ndarray) -> None:
        """Send a packed adapter, or its bytes, to the devices, as far as it is of this stage; it has arrived when this returns. Any thread
        may call it."""
        if (adapting := self._adapting) is not None:
            wanted = self._runner.shapes.packed_adapter
            own = adapting.adaptation.own(data.view(wanted.dtype).reshape(wanted.shape[0], -1))
            self._staged[handle] = jax.block_until_ready(put(own, wanted.sharding))

    def run(self, op: WriteAdapter | DropStaged) -> None:
        staged = self._staged.pop(op.staged, None)
        if isinstance(op, WriteAdapter) and self._adapting is not None:
            assert staged is not None, "no adapter was staged"
            self._write(op.slot, staged)

    def run_on_nothing(self, key: ProgramKey) -> None:
        """Write zeros into the first slot, which is empty."""
        wanted = self._runner.shapes.packed_adapter
        self._write(0, put(np.zeros(wanted.shape, wanted.dtype), wanted.sharding))

    def _write(self, slot: int, packed: jax.Array) -> None:
        """Write an adapter (`StepPrograms.packed_adapter`), whose array is taken."""
        runner, adapting = self._runner, self._adapting
        assert adapting is not None
        arrays = runner.program(ProgramKey(self.program))(runner.params[adapting.part], packed, runner.put(np.int32(slot)))
        runner.params = (*runner.params[: adapting.part.start], *arrays)

    def replace_lost(self) -> None:
        """Empty slots in place of arrays that a failed write took."""
        runner, adapting = self._runner, self._adapting
        if adapting is None or not any(array.is_deleted() for array in runner.params[adapting.part]):
            return
        delete(runner.params[adapting.part])
        empty = jax.tree.leaves(zeros(adapting.adaptation.model, runner.shapes.mesh))
        runner.params = (*runner.params[: adapting.part.start], *empty)

    def delete_arrays(self) -> None:
        """Release what was staged."""
        delete(self._staged)
        self._staged.clear()
