"""`encode`: the program that turns patches into embeddings in the slab."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from jaxllm.layers.vision import PatchIndices
from jaxllm.runner.features.images.packing import arrays
from jaxllm.runner.programs.key import ProgramKey
from jaxllm.runner.programs.kind import ProgramKind, Wanted, fit
from jaxllm.runner.split_program import CompiledProgram, Lowered

if TYPE_CHECKING:
    from jaxllm.runner.features.images.step import Images
    from jaxllm.runner.step_programs import StepPrograms

COMMON_PATCHES, FIRST_PATCHES = 2048, 1024
"""Programs up to these sizes are made at the start; one with few programs makes the one of the second size."""


class Encode(ProgramKind):
    """See `Images.encode`. The key's size counts patches. With data-parallel ranks, a rank without images encodes padding meanwhile."""

    name = "encode"

    def __init__(self, images: "Images", sizes: tuple[int, ...]):
        self.images, self.sizes = images, sizes

    def common(self, programs: "StepPrograms") -> Iterable[ProgramKey]:
        return [ProgramKey(self.name, size) for size in reversed(self.sizes) if size <= COMMON_PATCHES or size == self.sizes[0]]

    def rare(self, programs: "StepPrograms") -> Iterable[ProgramKey]:
        common = {*self.common(programs)}
        return [key for size in self.sizes if (key := ProgramKey(self.name, size)) not in common]

    def is_needed(self, key: ProgramKey, wanted: Wanted) -> bool:
        # Each image may be encoded alone, and all of them as far as a step encodes so much.
        sizes, counts = self.images.sizes, [item.num_embeddings for item in wanted.items]
        alone = [count * sizes.patches_per_embedding for count in counts]
        together = min(sum(alone), max(sizes.max_step_patches, *alone, 0)) if alone else 0
        return key.size in {fit(self.sizes, num_patches) for num_patches in (*alone, together) if num_patches}

    def is_first(self, programs: "StepPrograms", key: ProgramKey) -> bool:
        return key.size == fit(self.sizes, FIRST_PATCHES)

    def lower(self, programs: "StepPrograms", key: ProgramKey) -> Lowered:
        vision, slab = self.images.vision, programs.rows.of_features[self.images.name]
        patches = programs.shape((key.size, 3 * vision.patch_size**2), jnp.uint8)
        num_indices = PatchIndices.num_rows(vision) * key.size + key.size // vision.merge_size**2
        arguments = (programs.params, slab, patches, programs.ints(num_indices))
        return programs.lower_on_each(self.images.encode, arguments, programs.replicated, donate=(1,))

    def run_on_nothing(self, runner: Any, key: ProgramKey, program: CompiledProgram) -> None:
        run(
            runner,
            self.images,
            program,
            [arrays(self.images.vision, (), key.size, self.images.slab_shape[0])] * runner.ranks.num,
        )


def run(runner: Any, images: "Images", program: CompiledProgram, of_ranks: Iterable[tuple[Any, Any]]) -> None:
    """Start to encode what `packing.arrays` made for each rank."""
    joined = tuple(map(runner.ranks.joined, zip(*of_ranks, strict=True)))
    slab = program(runner.params, runner.row_arrays.of_features[images.name], *runner.put(joined))
    runner.row_arrays = runner.row_arrays.replaced(**{images.name: slab})
