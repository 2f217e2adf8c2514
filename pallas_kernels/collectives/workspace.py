"""The memory through which the GPUs of a mesh exchange, made and controlled from the host."""

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.collectives import peer, programs
from pallas_kernels.collectives.exchange import (
    EMPTY,
    FAILED,
    HEADER_WORDS,
    MAX_DEVICES,
    RANK,
    SILENT,
    STATE,
    WAITING,
    WORKSPACE_BYTES,
)

NUM_FIRST_RUNS = 3
"""XLA loads a program's kernels in its first run, and instantiates its CUDA graphs in one of the first."""


class Communicator:
    """The workspace of the one axis of a mesh. Everything here blocks until the devices have done it.

    Programs take `workspace` as an argument sharded over the axis. Keep this object as long as any of them may run.
    """

    def __init__(self, mesh: Mesh):
        """Raises ValueError for a mesh of another form, and where devices cannot read and write each other's memory."""
        if len(mesh.axis_names) != 1 or not 2 <= mesh.size <= MAX_DEVICES:
            raise ValueError(
                f"collectives by 'peer' need a mesh of one axis with 2 to {MAX_DEVICES} devices, this is {mesh.shape}"
            )
        devices = list(mesh.devices.ravel())
        if not peers_can_access(devices):
            raise ValueError(f"the devices {', '.join(map(str, devices))} cannot access each other's memory; use 'xla'")
        self.mesh = mesh
        self._sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names[0]))
        shape = (mesh.size, WORKSPACE_BYTES // 4)
        make = jax.jit(lambda: jnp.full(shape, EMPTY, jnp.uint32), out_shardings=self._sharding)
        self.workspace = make().block_until_ready()
        """uint32 [n, words]. Never donate it: kernels know it by its address."""
        rank_of = {device: rank for rank, device in enumerate(devices)}
        self._addresses = [0] * mesh.size
        for shard in self.workspace.addressable_shards:
            self._addresses[rank_of[shard.device]] = shard.data.unsafe_buffer_pointer()
        self._run_clear = self._program(programs.clear(), "workspace")
        self._run_write = self._program(programs.write_header(), "workspace", "header")
        self._run_status = self._program(programs.status(), "workspace", "after")
        self.reset()

    def _program(self, program: programs.Program, *names: str) -> Callable[..., jax.Array]:
        spec = self._sharding.spec

        def call(*arrays: jax.Array) -> jax.Array:
            return peer.run(program, dict(zip(names, arrays, strict=True)))[0]

        specs = (spec,) * len(names)
        return jax.jit(jax.shard_map(call, mesh=self.mesh, in_specs=specs, out_specs=spec, check_vma=False))

    def reset(self) -> None:
        """As new, also after a failure: nothing is in the slots, and collectives wait. No program may be running."""
        self._expect(self._run_clear(self.workspace), [0] * self.mesh.size)
        self._write([WAITING] * self.mesh.size)

    def set_waiting(self, waiting: bool, ranks: Sequence[int] | None = None) -> None:
        """Whether collectives of later programs exchange and wait, or are silent: their results are then garbage, of own numbers alone.

        ranks: of the devices that change, None for all. Raises RuntimeError after a failure, which only `reset` ends.
        """
        states = self.states()
        if FAILED in states:
            raise RuntimeError("a collective gave up waiting, so words of it may still lie in the slots; call reset()")
        for rank in range(self.mesh.size) if ranks is None else ranks:
            states[rank] = WAITING if waiting else SILENT
        self._write(states)

    def first_runs(self, run: Callable[[], Any], count: int = NUM_FIRST_RUNS) -> None:
        """Run a new program (all of `run`) some times silently. Its results are garbage; no other program may be running.

        A kernel is loaded where it is first launched. If another GPU is then waiting for it inside a kernel, the load may never end.
        """
        self.set_waiting(False)
        try:
            for _ in range(count):
                jax.block_until_ready(run())
        finally:
            self.set_waiting(True)

    def states(self) -> list[int]:
        """Of each device: 0 exchanging, 1 failed, 2 silent."""
        after = jax.device_put(np.zeros(self.mesh.size, np.int32), self._sharding)
        return np.asarray(self._run_status(self.workspace, after)).tolist()

    def failed(self) -> bool:
        """Whether a wait was given up since the last reset. Programs have this by `status` without stopping."""
        return FAILED in self.states()

    def close(self) -> None:
        """Give back the memory. No program that takes it may be running."""
        self.workspace.delete()

    def _write(self, states: Sequence[int]) -> None:
        header = jax.device_put(self._header(states), self._sharding)
        self._expect(self._run_write(self.workspace, header), states)

    def _header(self, states: Sequence[int]) -> np.ndarray:
        size = self.mesh.size
        header = np.zeros((size, HEADER_WORDS), np.uint32)
        for rank in range(size):
            neighbours = [self._addresses[(rank + i) % size] for i in range(size)]
            header[rank, : 2 * size] = np.array(neighbours, np.uint64).view(np.uint32)
            header[rank, RANK // 4], header[rank, STATE // 4] = rank, states[rank]
        return header

    def _expect(self, result: jax.Array, values: Sequence[int]) -> None:
        if (found := np.asarray(result).tolist()) != list(values):
            raise RuntimeError(f"kernels say that they wrote {found} into the workspaces of the devices, not {list(values)}")


def peers_can_access(devices: Sequence[jax.Device]) -> bool:
    """Whether every one of these devices is a GPU whose kernels can access the memory of every other, in this process."""
    if any(device.platform != "gpu" or device.process_index != jax.process_index() for device in devices):
        return False
    ordinals = [device.local_hardware_id for device in devices]
    if None in ordinals:
        return False
    return all(_can_access(a, b) for a in ordinals for b in ordinals if a != b)


@functools.cache
def _can_access(device: int, other: int) -> bool:
    """What the driver says of two of its devices, counted as CUDA_VISIBLE_DEVICES lets this process see them, as JAX does."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    handles = [ctypes.c_int(), ctypes.c_int()]
    can_access = ctypes.c_int(0)
    failed = driver.cuInit(0)
    for handle, ordinal in zip(handles, (device, other), strict=True):
        failed = failed or driver.cuDeviceGet(ctypes.byref(handle), ordinal)
    failed = failed or driver.cuDeviceCanAccessPeer(ctypes.byref(can_access), *handles)
    return not failed and can_access.value == 1
