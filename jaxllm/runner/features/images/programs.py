"""`encode`: the programs that turn patches into embeddings in the slab."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from jaxllm.layers.vision import PatchIndices
from jaxllm.runner.features.images.packing import EncoderInput, arrays
from jaxllm.runner.programs.key import ProgramKey
from jaxllm.runner.programs.kind import ProgramKind, Wanted, fit
from jaxllm.runner.split_program import CompiledProgram, Lowered

if TYPE_CHECKING:
    from jaxllm.runner.features.images.step import Images
    from jaxllm.runner.step_programs import StepPrograms

HIDDEN = "images_hidden"
"""Name of the array that has the hidden state of images that are encoded in parts, among those of features."""
COMMON_PATCHES, FIRST_PATCHES = 2048, 1024
"""Programs up to these sizes are made at the start; one with few programs makes the one of the second size."""


class Encode(ProgramKind):
    """See `Images.encode`, and of sizes that are encoded in parts `Images.encode_part`: the key has its number. The key's size counts
    patches. With data-parallel ranks, a rank without images encodes padding meanwhile."""

    name = "encode"
    item_kind = "image"
    frames = 1
    """Frames in a patch."""

    def __init__(self, images: "Images"):
        self.images, self.sizes = images, images.sizes.programs

    @property
    def patch_values(self) -> int:
        """Values of a patch."""
        return self.frames * 3 * self.images.vision.patch_size**2

    def keys(self, size: int) -> list[ProgramKey]:
        """The programs of a size, in the order in which they run."""
        return [ProgramKey(self.name, size, part=part) for part in range(self.images.sizes.num_parts(size))]

    def common(self, programs: "StepPrograms") -> Iterable[ProgramKey]:
        sizes = [size for size in reversed(self.sizes) if size <= COMMON_PATCHES or size == self.sizes[0]]
        return [key for size in sizes for key in self.keys(size)]

    def rare(self, programs: "StepPrograms") -> Iterable[ProgramKey]:
        common = {*self.common(programs)}
        return [key for size in self.sizes for key in self.keys(size) if key not in common]

    def is_needed(self, key: ProgramKey, wanted: Wanted) -> bool:
        # Each image may be encoded alone, and all that share programs as far as a step encodes so much.
        sizes, alone = self.images.sizes, self._patches(wanted)
        needed = {fit(self.sizes, num_patches) for num_patches in alone}
        if whole := [num_patches for num_patches in alone if sizes.num_parts(num_patches) == 1]:
            needed.add(fit(sizes.whole_programs, min(sum(whole), max(sizes.max_step_patches, *whole))))
        return key.size in needed

    def awaited(self, programs: "StepPrograms", wanted: Wanted) -> Iterable[Sequence[ProgramKey]]:
        """All parts of images that are encoded in parts, and one program that holds the largest other: it encodes one after the other."""
        sizes, alone = self.images.sizes, self._patches(wanted)
        in_parts = {fit(self.sizes, num_patches) for num_patches in alone if sizes.num_parts(num_patches) > 1}
        needed = [[key] for size in sorted(in_parts) for key in self.keys(size)]
        if largest := max((num_patches for num_patches in alone if sizes.num_parts(num_patches) == 1), default=0):
            needed.append([ProgramKey(self.name, size) for size in sizes.whole_programs if size >= largest])
        return needed

    def _patches(self, wanted: Wanted) -> list[int]:
        """Patches of each item of a request that it encodes."""
        counts = (item.num_embeddings for item in wanted.items if item.kind == self.item_kind)
        return [count * self.images.sizes.patches_per_embedding for count in counts]

    def is_first(self, programs: "StepPrograms", key: ProgramKey) -> bool:
        return key.size == fit(self.sizes, FIRST_PATCHES)

    def lower(self, programs: "StepPrograms", key: ProgramKey) -> Lowered:
        images, shapes = self.images, programs.rows.of_features
        patches = programs.shape((key.size, self.patch_values), jnp.uint8)
        num_indices = PatchIndices.num_rows(images.vision) * key.size + key.size // images.vision.merge_size**2
        given = (*(() if key.part else (patches,)), programs.ints(num_indices))
        changed = {name: shapes[name] for name in self._changed(key)}
        layers = images.layers_of(key.size, key.part)
        function = partial(images.encode_part, key.size, layers) if len(self.keys(key.size)) > 1 else images.encode
        out = tuple(programs.replicated for _ in changed)
        return programs.lower_on_each(
            function, (programs.params, *changed.values(), *given), out, donate=tuple(range(1, 1 + len(changed)))
        )

    def _changed(self, key: ProgramKey) -> tuple[str, ...]:
        """The arrays of features that a program changes."""
        return (self.images.name, HIDDEN) if len(self.keys(key.size)) > 1 else (self.images.name,)

    def arrays(self, key: ProgramKey, inputs: Sequence[EncoderInput] = ()) -> tuple[np.ndarray, ...]:
        """Host arrays that a program takes of a rank: patches, but for parts behind the first, and indices. See `packing.arrays`."""
        found = arrays(self.images.vision, inputs, key.size, self.images.slab_shape[0], self.patch_values)
        return found[1:] if key.part else found

    def run_on_nothing(self, runner: Any, key: ProgramKey, program: CompiledProgram) -> None:
        self.run(runner, key, program, tuple(map(runner.ranks.repeated, self.arrays(key))))

    def run(self, runner: Any, key: ProgramKey, program: CompiledProgram, given: tuple[Any, ...]) -> None:
        """Start a program with the joint arrays of all ranks."""
        names = self._changed(key)
        before = (runner.row_arrays.of_features[name] for name in names)
        changed = program(runner.params, *before, *runner.put(given))
        runner.row_arrays = runner.row_arrays.replaced(**dict(zip(names, changed, strict=True)))


class EncodeVideo(Encode):
    """Encodes videos, as many frames at once as a patch has. Compiled for the first video, or ahead when nothing else is to be compiled."""

    name = "encode_video"
    item_kind = "video"

    def __init__(self, images: "Images"):
        super().__init__(images)
        self.frames = images.vision.temporal_patch_size

    def common(self, programs: "StepPrograms") -> Iterable[ProgramKey]:
        return ()

    def rank(self, key: ProgramKey) -> int:
        return 1
