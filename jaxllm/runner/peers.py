"""The runner's control of devices that exchange data through each other's memory: separate first runs of programs, and a single
transfer of a step's buffer. For the reasons see `pallas_kernels.collectives`."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxllm.parallel.arrays import delete
from jaxllm.runner.layout import StepLayout
from jaxllm.runner.programs.key import ProgramKey
from pallas_kernels.collectives import Communicator


class Peers:
    """The devices of a mesh, each of which can access the others' memory."""

    def __init__(self, mesh: Mesh):
        self._devices = list(mesh.devices.flat)
        self._communicator = Communicator(mesh)
        self._known: set[ProgramKey] = set()
        """Programs that had their first runs."""
        self._blanks: dict[StepLayout, list[jax.Array]] = {}
        """Placeholders for a step's buffer on all devices except the first."""

    @property
    def workspace(self) -> jax.Array:
        """The workspace that programs exchange through."""
        return self._communicator.workspace

    def knows(self, key: ProgramKey) -> bool:
        """Whether a program had its first runs."""
        return key in self._known

    def note(self, keys: Iterable[ProgramKey]) -> None:
        """Record programs that need no silent first runs, or have had them."""
        self._known.update(keys)

    def first_runs(self, run: Callable[[], Any]) -> None:
        """Run new programs some times without exchanging anything: their results are garbage. Nothing else may be running."""
        self._communicator.first_runs(run)

    def send(self, layout: StepLayout, buffer: np.ndarray, empty: Callable[[StepLayout], np.ndarray]) -> jax.Array:
        """A step's buffer, in one transfer: to the first device, which gives it to the others. They hold that of an empty step."""
        first, *others = self._devices
        if layout not in self._blanks:
            blank = empty(layout)[None]
            self._blanks[layout] = [jax.device_put(blank, device) for device in others]
        parts = [jax.device_put(buffer[None], first), *self._blanks[layout]]
        return jax.make_array_from_single_device_arrays((len(parts), layout.size), self.workspace.sharding, parts)

    def failed(self) -> bool:
        """Whether a device gave up waiting for another. Waits for the programs that are running."""
        return self._communicator.failed()

    def reset(self) -> None:
        """Exchange as new, also after a wait that was given up. Nothing may be running."""
        self._communicator.reset()

    def delete_arrays(self) -> None:
        """Release the devices' memory."""
        delete(list(self._blanks.values()))
        self._communicator.close()
