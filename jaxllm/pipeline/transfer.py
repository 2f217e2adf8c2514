"""Transfers hidden states from a stage to the next one on other hosts, by a program that the devices of both stages run together."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxllm.model_config import ModelConfig
from jaxllm.progress import Progress
from jaxllm.runner.buckets import Buckets
from jaxllm.runner.program_pool import ProgramPool
from jaxllm.runner.warm_up import WARM_UP_RUNS

SIDE = "side"
"""The mesh axis of the two stages."""


class TransferKey(NamedTuple):
    """Which program."""

    kind: str
    """transfer; or zeros: the receiving devices' input of it."""
    num_tokens: int


@dataclass(frozen=True)
class Sizes:
    """Shapes of hidden states: [T, D], for each T."""

    num_tokens: tuple[int, ...]
    width: int
    dtype: jnp.dtype

    @classmethod
    def of(cls, model: ModelConfig, buckets: Buckets) -> "Sizes":
        """The sizes of all steps."""
        decode_rows = buckets.decode_rows if model.generates else ()
        return cls(tuple(sorted({*buckets.tokens, *decode_rows})), model.hidden_size, jnp.dtype(model.dtype))


class Transfer:
    """Sends from the devices of one stage to as many of the next. This process has devices of one of both.

    Both sides must call it for the same steps in the same order, and among all other programs in which their devices wait for each
    other: a device runs programs in the order of their launches.
    """

    def __init__(self, before: Mesh, after: Mesh, sizes: Sizes):
        axes = before.axis_names
        self._stage_axes, self._num_devices, self._sizes = axes, before.size, sizes
        # In the order of their numbers, because XLA compiles for any other order with an error in its log.
        sides = sorted([before.devices, after.devices], key=lambda devices: devices.flat[0].id)
        self._from_to = (0, 1) if sides[0] is before.devices else (1, 0)
        self._mesh = Mesh(np.stack(sides), (SIDE, *axes), axis_types=(AxisType.Auto,) * (1 + len(axes)))
        self._own = NamedSharding(before if before.local_devices else after, PartitionSpec())
        self._both = NamedSharding(self._mesh, PartitionSpec(SIDE))
        self.programs = ProgramPool(self._lower, threads=1, compiler_options=self._compiler_options)

    def send(self, leaving_TD: jax.Array) -> jax.Array:
        """Start to send what a stage leaves, whose memory is taken. Returns a small array that is ready when it was sent."""
        _, done = self._transfer(leaving_TD)
        return done.addressable_shards[0].data

    def receive(self, num_tokens: int) -> jax.Array:
        """Start to receive. Returns what enters the stage, [T, D] on each of its devices."""
        entering, _ = self._transfer(self._zeros(num_tokens))
        parts = [shard.data for shard in entering.addressable_shards]
        return jax.make_array_from_single_device_arrays((num_tokens, self._sizes.width), self._own, parts)

    def _zeros(self, num_tokens: int) -> jax.Array:
        """Zeros of this side: a program takes as much of both."""
        return self.programs.get(TransferKey("zeros", num_tokens))()  # type: ignore[no-any-return]

    def _transfer(self, x_TD: jax.Array) -> tuple[jax.Array, jax.Array]:
        num_tokens, width = x_TD.shape
        parts = [shard.data for shard in x_TD.addressable_shards]
        both = jax.make_array_from_single_device_arrays((2 * num_tokens, width), self._both, parts)
        return self.programs.get(TransferKey("transfer", num_tokens))(both)  # type: ignore[no-any-return]

    # Programs

    def _lower(self, key: TransferKey) -> jax.stages.Lowered:
        shape, dtype = (key.num_tokens, self._sizes.width), self._sizes.dtype
        if key.kind == "zeros":
            return jax.jit(partial(jnp.zeros, shape, dtype), out_shardings=self._own).lower()
        given = jax.ShapeDtypeStruct((2 * shape[0], shape[1]), dtype, sharding=self._both)
        spec, out = self._both.spec, (self._both, self._both)
        on_each = jax.shard_map(self._on_each, mesh=self._mesh, in_specs=spec, out_specs=(spec, spec), check_vma=False)
        return jax.jit(on_each, donate_argnums=0, out_shardings=out).lower(given)

    def _on_each(self, x_TD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Runs on each device. Each sends a part of what all devices of its stage have; those that receive exchange the parts, because
        they reach each other faster than the other host."""
        steps = [self._from_to]
        if x_TD.size % self._num_devices:
            found_TD = jax.lax.ppermute(x_TD, SIDE, steps)
        else:
            size = x_TD.size // self._num_devices
            first = jax.lax.axis_index(self._stage_axes) * size
            part = jax.lax.ppermute(jax.lax.dynamic_slice(x_TD.reshape(-1), (first,), (size,)), SIDE, steps)
            found_TD = part if self._num_devices == 1 else jax.lax.all_gather(part, self._stage_axes, tiled=True)
            found_TD = found_TD.reshape(x_TD.shape)
        return found_TD, found_TD[0, :1]

    def _compiler_options(self, key: TransferKey) -> dict[str, str | bool]:
        # As for all programs of several hosts: they do not share the work of choosing how products are computed.
        return {"xla_gpu_shard_autotuning": False} if self._mesh.devices.flat[0].platform in ("gpu", "cuda") else {}

    # The start

    def start_programs(self, *, rare_later: bool) -> None:
        """See ModelRunner, as for the methods that follow."""
        self.programs.start(self._keys())

    def start_programs_when_idle(self) -> None:
        self.programs.start((), self._keys())

    def wait_for_programs(self, progress: Progress, *, rare: bool) -> None:
        self.programs.wait(self._keys(), progress)

    def warm_up(self) -> None:
        """Send zeros, and wait until they are there. The other side must do so at the same time."""
        for _ in range(WARM_UP_RUNS):
            for num_tokens in self._sizes.num_tokens:
                jax.block_until_ready(self._transfer(self._zeros(num_tokens)))
        self.programs.is_warm = True

    def _keys(self) -> list[TransferKey]:
        return [TransferKey(kind, size) for kind in ("zeros", "transfer") for size in self._sizes.num_tokens]
