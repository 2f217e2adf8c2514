"""Runs a plan's operations that encode images, and maps tokens of a step to their embeddings. The host's part of the feature."""

from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxllm.device_ops import EncodeItem
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
from jaxllm.runner.item_embeddings import ItemsOnHost, slab_rows, spans
from jaxllm.runner.programs.key import ProgramKey
from jaxllm.runner.programs.kind import fit

if TYPE_CHECKING:
    from jaxllm.runner.features.images.step import Images


class ImagesOnHost(ItemsOnHost):
    """Encodes images that have patches of the same kind together."""

    def __init__(self, runner: Any, images: "Images"):
        super().__init__(runner, images)
        self._images = images
        self._kinds = images.programs()
        self._waiting: list[list[EncoderInput]] = [[] for _ in range(runner.ranks.num)]
        """Images that the next step encodes, by rank."""

    def add(self, op: EncodeItem) -> None:
        grid, patches_NC = unpack(op.payload)
        assert any(kind.patch_values == patches_NC.shape[1] for kind in self._kinds), f"patches of {patches_NC.shape[1]} values"
        num_results = len(patches_NC) // self._images.vision.merge_size**2
        rows = slab_rows(op.pages, self._images.sizes.page_embeddings, num_results)
        self._waiting[op.rank].append(EncoderInput(grid, patches_NC, rows))

    def encode(self) -> None:
        for kind in self._kinds:
            of_kind = [[each for each in inputs if each.patches_NC.shape[1] == kind.patch_values] for inputs in self._waiting]
            of_ranks = [together(inputs, kind.sizes[-1]) for inputs in of_kind]
            for groups in zip_longest(*of_ranks, fillvalue=()):
                size = fit(kind.sizes, max(map(num_patches, groups)))
                kind.run(self._runner, self._runner.program(ProgramKey(kind.name, size)), size, groups)

    def forget(self) -> None:
        for waiting in self._waiting:
            waiting.clear()

    def fill(self, inputs_IT: np.ndarray, chunk: Chunk) -> None:
        super().fill(inputs_IT, chunk)
        if self._images.vision.attends_within:
            for item, first, last in spans(chunk):
                assert last == item.end, "the step cuts an image whose tokens see each other"
                inputs_IT[NUM_LATER, first - chunk.start : last - chunk.start] = np.arange(last - first)[::-1]
        if self._images.has_rope_sections:
            inputs_IT[SHIFTS] = rope_shifts(chunk)
