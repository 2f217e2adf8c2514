"""`gather_blocks` and `scatter_blocks`: between blocks of the KV cache and a staging buffer on the devices.

Copies to and from the host touch staging buffers alone. The programs run in the order of steps, so a block that is read has what earlier
steps wrote, and may be given away at once.
"""

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxllm.cache_spec import WORD_BYTES
from jaxllm.device_ops import GatherBlocks
from jaxllm.parallel.mesh import CONTEXT, TENSOR, context_size, tensor_size
from jaxllm.runner.block_format import NO_BLOCK, BlockFormat
from jaxllm.runner.programs.key import ProgramKey
from jaxllm.runner.programs.kind import ProgramKind
from jaxllm.runner.row_arrays import Caches
from jaxllm.runner.split_program import CompiledProgram, Lowered

if TYPE_CHECKING:
    from jaxllm.runner.step_programs import StepPrograms

STAGING_BYTES = 128 << 20
"""Most bytes of a staging buffer on each device. The host takes 0.5 to 1.5 ms to launch a program of many arrays, as long as a copy of
64 MiB takes; larger copies than this one are no faster."""
MAX_BATCH = 256
"""Most blocks of a staging buffer."""


def batch_sizes(format: BlockFormat) -> tuple[int, ...]:
    """Numbers of blocks that are gathered or scattered at a time. A staging buffer holds the last."""
    most = max(1, min(MAX_BATCH, STAGING_BYTES // (format.part_words * WORD_BYTES)))
    return tuple(dict.fromkeys((max(1, most // 8), most)))


def staging_bytes(format: BlockFormat) -> int:
    """Bytes of a staging buffer on each device."""
    return batch_sizes(format)[-1] * format.part_words * WORD_BYTES


class BlockProgram(ProgramKind):
    """A program that reads or writes blocks. The size of its key is their number."""

    def __init__(self, num_copies: int):
        """num_copies: see BlockFormat."""
        self.num_copies = num_copies

    def format(self, programs: "StepPrograms") -> BlockFormat:
        """The format of the engine's blocks."""
        return BlockFormat.of(programs.cache, tensor_size(programs.mesh), self.num_copies, context_size(programs.mesh))

    def common(self, programs: "StepPrograms") -> Iterable[ProgramKey]:
        return [ProgramKey(self.name, size) for size in batch_sizes(self.format(programs))]

    def staging(self, programs: "StepPrograms") -> jax.ShapeDtypeStruct:
        """A staging buffer: uint32 [devices, blocks, words]."""
        format = self.format(programs)
        return by_device(programs, batch_sizes(format)[-1], format.part_words)

    def run_on_nothing(self, runner: Any, key: ProgramKey, program: CompiledProgram) -> None:
        runner.op_runner(GatherBlocks).run_on_nothing(key, program)


class Gather(BlockProgram):
    """Reads blocks into the first rows of a staging buffer, which it takes. Returns it, and the checksums of each device's rows."""

    name = "gather_blocks"

    def lower(self, programs: "StepPrograms", key: ProgramKey) -> Lowered:
        staging = self.staging(programs)
        arguments = (programs.caches, programs.ints(key.size), staging)
        return programs.lower_on_each(partial(_gather, self.format(programs)), arguments, (staging.sharding,) * 2, donate=(2,))


class Scatter(BlockProgram):
    """Writes the first rows of a staging buffer into blocks, where their checksums are right. Returns the cache, and for each device which
    were."""

    name = "scatter_blocks"

    def lower(self, programs: "StepPrograms", key: ProgramKey) -> Lowered:
        staging, format = self.staging(programs), self.format(programs)
        arguments = (programs.caches, programs.ints(key.size), staging, by_device(programs, key.size, format.num_sums))
        out = (programs.cache_shardings, staging.sharding)
        return programs.lower_on_each(partial(_scatter, format), arguments, out, donate=(0,))


def _gather(format: BlockFormat, caches: Caches, block_n: jax.Array, staging_1Nw: jax.Array) -> tuple[jax.Array, jax.Array]:
    words_nw, sums_nH = format.gather(caches, block_n)
    return jax.lax.dynamic_update_slice(staging_1Nw, words_nw[None], (0, 0, 0)), sums_nH[None]


def _scatter(
    format: BlockFormat, caches: Caches, block_n: jax.Array, staging_1Nw: jax.Array, sums_1nH: jax.Array
) -> tuple[Caches, jax.Array]:
    written, is_right_n = format.scatter(caches, block_n, staging_1Nw[0, : len(block_n)], sums_1nH[0])
    return tuple(written), is_right_n[None]


def by_device(programs: "StepPrograms", *shape: int) -> jax.ShapeDtypeStruct:
    """An array of words that has this shape on each device."""
    is_split = context_size(programs.mesh) > 1
    place = NamedSharding(programs.mesh, PartitionSpec((CONTEXT, TENSOR) if is_split else TENSOR))
    return jax.ShapeDtypeStruct((programs.mesh.size, *shape), jnp.uint32, sharding=place)


def gather(
    runner: Any, program: CompiledProgram, size: int, block_ids: list[int], staging: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Start to read at most `size` blocks of a runner. Returns what `Gather` does; rows behind have the null block."""
    ids_n = np.zeros(size, np.int32)
    ids_n[: len(block_ids)] = block_ids
    return program(runner.caches, runner.argument(ids_n), staging)  # type: ignore[no-any-return]


def scatter(
    runner: Any, program: CompiledProgram, size: int, block_ids: list[int], staging: jax.Array, sums_DnH: np.ndarray
) -> jax.Array:
    """Start to write at most `size` blocks of a runner. Returns bool [devices, size]: which parts were right."""
    ids_n = np.full(size, NO_BLOCK, np.int32)
    ids_n[: len(block_ids)] = block_ids
    padded = np.zeros((len(sums_DnH), size, sums_DnH.shape[2]), np.uint32)
    padded[:, : len(block_ids)] = sums_DnH
    sums = runner.argument(padded, staging.sharding)
    caches, is_right_Dn = program(runner.caches, runner.argument(ids_n), staging, sums)
    runner.caches = tuple(caches)
    return is_right_Dn  # type: ignore[no-any-return]
