"""`encode`: the program that turns patches into embeddings in the slab."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from jaxllm.layers.vision import PatchIndices
from jaxllm.runner.features.images.packing import EncoderInput, arrays
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
    item_kind = "image"
    frames = 1
    """Frames in a patch."""

    def __init__(self, images: "Images", sizes: tuple[int, ...]):
        self.images, self.sizes = images, sizes

    @property
    def patch_values(self) -> int:
        """Values of a patch."""
        return self.frames * 3 * self.images.vision.patch_size**2

    def common(self, programs: "StepPrograms") -> Iterable[ProgramKey]:
        return [ProgramKey(self.name, size) for size in reversed(self.sizes) if size <= COMMON_PATCHES or size == self.sizes[0]]

    def rare(self, programs: "StepPrograms") -> Iterable[ProgramKey]:
        common = {*self.common(programs)}
        return [key for size in self.sizes if (key := ProgramKey(self.name, size)) not in common]

    def is_needed(self, key: ProgramKey, wanted: Wanted) -> bool:
        # Each image may be encoded alone, and all of them as far as a step encodes so much.
        sizes, alone = self.images.sizes, self._patches(wanted)
        together = min(sum(alone), max(sizes.max_step_patches, *alone, 0)) if alone else 0
        return key.size in {fit(self.sizes, num_patches) for num_patches in (*alone, together) if num_patches}

    def awaited(self, programs: "StepPrograms", wanted: Wanted) -> Iterable[Sequence[ProgramKey]]:
        """One that holds the largest image: it encodes the others one after the other."""
        largest = max(self._patches(wanted), default=0)
        return [[ProgramKey(self.name, size) for size in self.sizes if size >= largest]] if largest else ()

    def _patches(self, wanted: Wanted) -> list[int]:
        """Patches of each item of a request that it encodes."""
        counts = (item.num_embeddings for item in wanted.items if item.kind == self.item_kind)
        return [count * self.images.sizes.patches_per_embedding for count in counts]

    def is_first(self, programs: "StepPrograms", key: ProgramKey) -> bool:
        return key.size == fit(self.sizes, FIRST_PATCHES)

    def lower(self, programs: "StepPrograms", key: ProgramKey) -> Lowered:
        vision, slab = self.images.vision, programs.rows.of_features[self.images.name]
        patches = programs.shape((key.size, self.patch_values), jnp.uint8)
        num_indices = PatchIndices.num_rows(vision) * key.size + key.size // vision.merge_size**2
        arguments = (programs.params, slab, patches, programs.ints(num_indices))
        return programs.lower_on_each(self.images.encode, arguments, programs.replicated, donate=(1,))

    def run_on_nothing(self, runner: Any, key: ProgramKey, program: CompiledProgram) -> None:
        self.run(runner, program, key.size, [()] * runner.ranks.num)

    def run(self, runner: Any, program: CompiledProgram, size: int, of_ranks: Sequence[Sequence[EncoderInput]]) -> None:
        """Start to encode the inputs of each rank with a program of so many patches."""
        vision, num_rows = self.images.vision, self.images.slab_shape[0]
        made = [arrays(vision, inputs, size, num_rows, self.patch_values) for inputs in of_ranks]
        joined = tuple(map(runner.ranks.joined, zip(*made, strict=True)))
        slab = program(runner.params, runner.row_arrays.of_features[self.images.name], *runner.put(joined))
        runner.row_arrays = runner.row_arrays.replaced(**{self.images.name: slab})


class EncodeVideo(Encode):
    """Encodes videos, as many frames at once as a patch has. Compiled for the first video, or ahead when nothing else is to be compiled."""

    name = "encode_video"
    item_kind = "video"

    def __init__(self, images: "Images", sizes: tuple[int, ...]):
        super().__init__(images, sizes)
        self.frames = images.vision.temporal_patch_size

    def common(self, programs: "StepPrograms") -> Iterable[ProgramKey]:
        return ()

    def rank(self, key: ProgramKey) -> int:
        return 1
