"""Runs a plan's operations that encode images, and maps tokens of a step to their embeddings. The host's part of the feature."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxllm.device_ops import EncodeItem, UseItem
from jaxllm.media.payload import unpack
from jaxllm.runner.batch import Batch, Chunk
from jaxllm.runner.features.images.packing import (
    NUM_LATER,
    SHIFTS,
    SLAB_ROW,
    EncoderInput,
    embedding_of_tokens,
    num_patches,
    rope_shifts,
    slab_rows,
    together,
)
from jaxllm.runner.ops import OpRunner
from jaxllm.runner.programs.key import ProgramKey
from jaxllm.runner.programs.kind import fit

if TYPE_CHECKING:
    from jaxllm.runner.features.images.step import Images


class ImagesOnHost(OpRunner):
    """Collects the images of a plan, encodes them together before its step, and maps the step's tokens to their embeddings."""

    ops = (EncodeItem, UseItem)

    def __init__(self, runner: Any, images: "Images"):
        self._runner, self._images = runner, images
        self._kinds = images.programs()
        self._waiting: list[list[EncoderInput]] = [[] for _ in range(runner.ranks.num)]
        """Images that the next step encodes, by rank."""
        self._pages: dict[tuple[str, int], Sequence[int]] = {}
        """Pages of the items whose tokens the next step computes, by request and position."""

    def run(self, op: EncodeItem | UseItem) -> None:
        if isinstance(op, UseItem):
            self._pages[op.request_id, op.position] = op.pages
            return
        grid, patches_NC = unpack(op.payload)
        assert any(kind.patch_values == patches_NC.shape[1] for kind in self._kinds), f"patches of {patches_NC.shape[1]} values"
        num_results = len(patches_NC) // self._images.vision.merge_size**2
        rows = slab_rows(op.pages, self._images.sizes.page_embeddings, num_results)
        self._waiting[op.rank].append(EncoderInput(grid, patches_NC, rows))

    def before_step(self, batches: Sequence[Batch]) -> None:
        self._encode()
        for batch in batches:
            inputs_IT = self._runner.shapes.inputs.token_inputs_of(batch, self._images.name)
            if inputs_IT is not None:
                for chunk in batch.chunks:
                    self._fill(inputs_IT[:, chunk.first_token : chunk.first_token + chunk.count], chunk)
        self._pages.clear()

    def _encode(self) -> None:
        """Start to encode all that waits, of all ranks at the same time."""
        for kind in self._kinds:
            of_kind = [[each for each in waiting if each.patches_NC.shape[1] == kind.patch_values] for waiting in self._waiting]
            of_ranks = [together(inputs, kind.sizes[-1]) for inputs in of_kind]
            for groups in zip_longest(*of_ranks, fillvalue=()):
                size = fit(kind.sizes, max(map(num_patches, groups)))
                num_computed, num_runs = self._runner.encoder_totals
                self._runner.encoder_totals = num_computed + size * len(groups), num_runs + 1
                kind.run(self._runner, self._runner.program(ProgramKey(kind.name, size)), size, groups)
        for waiting in self._waiting:
            waiting.clear()

    def _fill(self, inputs_IT: np.ndarray, chunk: Chunk) -> None:
        """Set the values of a chunk's tokens."""
        request = chunk.row.data
        if not request.items:
            return
        for item in request.items:
            first, last = max(item.position, chunk.start), min(item.end, chunk.stop)
            if first < last:
                index = embedding_of_tokens(item)
                rows = slab_rows(
                    self._pages[request.request_id, item.position], self._images.sizes.page_embeddings, index.max() + 1
                )
                found = np.where(index < 0, 0, 1 + rows[index])
                own = slice(first - chunk.start, last - chunk.start)
                inputs_IT[SLAB_ROW, own] = found[first - item.position : last - item.position]
                if self._images.vision.attends_within:
                    assert last == item.end, "the step cuts an image whose tokens see each other"
                    inputs_IT[NUM_LATER, own] = np.arange(last - first)[::-1]
        if self._images.has_rope_sections:
            inputs_IT[SHIFTS] = rope_shifts(chunk)

    def replace_lost(self) -> None:
        """Forget what waits for a step that does not come. The slab is one of the rows' arrays."""
        self._pages.clear()
        for waiting in self._waiting:
            waiting.clear()
