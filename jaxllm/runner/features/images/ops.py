"""Runs a plan's operations that encode images, and maps tokens of a step to their embeddings. The host's part of the feature."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxllm.device_ops import EncodeItem, EncodeParts, UseItem
from jaxllm.media.payload import unpack
from jaxllm.runner.batch import Chunk
from jaxllm.runner.features.images.packing import (
    NUM_LATER,
    SHIFTS,
    EncoderInput,
    num_patches,
    rope_shifts,
    together,
)
from jaxllm.runner.features.images.programs import Encode
from jaxllm.runner.item_embeddings import ItemsOnHost, slab_rows, spans
from jaxllm.runner.programs.key import ProgramKey
from jaxllm.runner.programs.kind import fit

if TYPE_CHECKING:
    from jaxllm.runner.features.images.programs import Encode
    from jaxllm.runner.features.images.step import Images


@dataclass(eq=False)
class _InParts:
    """An image that is encoded in parts."""

    kind: Encode
    keys: list[ProgramKey]
    """The programs that have not been planned."""
    given: list[EncoderInput]
    """The image, until its first part runs."""
    indices: tuple[np.ndarray, ...] = ()

    def arrays(self, key: ProgramKey) -> tuple[np.ndarray, ...]:
        """Host arrays that a part takes."""
        if self.given:
            *patches_PC, indices = self.kind.arrays(key, self.given)
            self.given, self.indices = [], (indices,)
            return (*patches_PC, indices)
        return self.indices


class ImagesOnHost(ItemsOnHost):
    """Encodes small images together, large ones in parts."""

    ops = (EncodeItem, EncodeParts, UseItem)

    def __init__(self, runner: Any, images: "Images"):
        super().__init__(runner, images)
        self._images = images
        self._kinds = images.programs()
        self._waiting: list[list[EncoderInput]] = [[] for _ in range(runner.ranks.num)]
        """Images that the next step encodes together, by rank."""
        self._begun: list[_InParts | None] = [None] * runner.ranks.num
        """The image of each rank that was begun last, of those that are encoded in parts."""
        self._parts: list[list[tuple[ProgramKey, _InParts]]] = [[] for _ in range(runner.ranks.num)]
        """Parts that the next step runs, by rank."""

    def add(self, op: EncodeItem | EncodeParts) -> None:
        if isinstance(op, EncodeItem):
            grid, patches_NC = unpack(op.payload)
            kind = next((kind for kind in self._kinds if kind.patch_values == patches_NC.shape[1]), None)
            assert kind is not None, f"patches of {patches_NC.shape[1]} values"
            num_results = len(patches_NC) // self._images.vision.merge_size**2
            rows = slab_rows(op.pages, self._images.sizes.page_embeddings, num_results)
            given, keys = EncoderInput(grid, patches_NC, rows), kind.keys(self._images.sizes.program_size(len(patches_NC)))
            if len(keys) == 1:
                self._waiting[op.rank].append(given)
                return
            self._begun[op.rank] = _InParts(kind, keys, [given])
        begun = self._begun[op.rank]
        assert begun is not None and len(begun.keys) >= op.num_parts, "no image has so many parts left"
        self._parts[op.rank] += [(begun.keys.pop(0), begun) for _ in range(op.num_parts)]

    def encode(self) -> None:
        # Pages of an image whose last part runs now may be given to another in the same plan.
        self._encode_parts()
        self._encode_together()

    def _encode_parts(self) -> None:
        """Start the parts that wait, of all ranks at the same time as far as they run the same programs."""
        for parts in zip_longest(*self._parts):
            begun = {rank: part for rank, part in enumerate(parts) if part is not None}
            for key in dict.fromkeys(key for key, _ in begun.values()):
                of_key = {rank: each for rank, (other, each) in begun.items() if other == key}
                kind = next(iter(of_key.values())).kind
                ranks = range(len(parts))
                self._run(kind, key, [of_key[i].arrays(key) if i in of_key else kind.arrays(key) for i in ranks])

    def _encode_together(self) -> None:
        """Start to encode the images that share programs, of all ranks at the same time."""
        for kind in self._kinds:
            of_kind = [[each for each in waiting if each.patches_NC.shape[1] == kind.patch_values] for waiting in self._waiting]
            if not any(of_kind):
                continue
            sizes = self._sizes(kind, max(len(each.patches_NC) for inputs in of_kind for each in inputs))
            of_ranks = [together(inputs, sizes[-1]) for inputs in of_kind]
            for groups in zip_longest(*of_ranks, fillvalue=()):
                key = ProgramKey(kind.name, fit(sizes, max(map(num_patches, groups))))
                self._run(kind, key, [kind.arrays(key, group) for group in groups])

    def _run(self, kind: Encode, key: ProgramKey, of_ranks: Sequence[tuple[np.ndarray, ...]]) -> None:
        """Start a program with the host arrays of each rank."""
        runner = self._runner
        if key.part == 0:  # the parts of an image are one run of the encoder
            num_computed, num_runs = runner.encoder_totals
            runner.encoder_totals = num_computed + key.size * len(of_ranks), num_runs + 1
        kind.run(runner, key, runner.program(key), tuple(map(runner.ranks.joined, zip(*of_ranks, strict=True))))

    def forget(self) -> None:
        for waiting, parts in zip(self._waiting, self._parts, strict=True):
            waiting.clear()
            parts.clear()

    def _sizes(self, kind: "Encode", largest: int) -> tuple[int, ...]:
        """The sizes of programs to take, the last of which holds the largest image: those that are there, if one of them does."""
        whole = self._images.sizes.whole_programs
        ready = self._runner.ready_sizes(ProgramKey(kind.name), whole)
        return ready if ready and ready[-1] >= largest else whole

    def fill(self, inputs_IT: np.ndarray, chunk: Chunk) -> None:
        super().fill(inputs_IT, chunk)
        if self._images.vision.attends_within:
            for item, first, last in spans(chunk):
                assert last == item.end, "the step cuts an image whose tokens see each other"
                inputs_IT[NUM_LATER, first - chunk.start : last - chunk.start] = np.arange(last - first)[::-1]
        if self._images.has_rope_sections:
            inputs_IT[SHIFTS] = rope_shifts(chunk)

    def replace_lost(self) -> None:
        super().replace_lost()
        self._begun = [None] * len(self._begun)
