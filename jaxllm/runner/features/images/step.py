"""Images as a feature of the step: embeddings of the slab replace those of placeholder tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.encoder_sizes import EncoderSizes
from jaxllm.layers.vision import PatchIndices, VisionTower
from jaxllm.model_parts import Vision
from jaxllm.runner.buckets import Buckets
from jaxllm.runner.features.images.ops import ImagesOnHost
from jaxllm.runner.features.images.packing import NUM_LATER, SHIFTS, hidden_shape
from jaxllm.runner.features.images.programs import HIDDEN, Encode, EncodeVideo
from jaxllm.runner.item_embeddings import ItemEmbeddings
from jaxllm.runner.kernels import Kernels
from jaxllm.runner.paged_context import PagedContext
from jaxllm.runner.row_arrays import Params
from jaxllm.runner.step_feature import StepRun
from pallas_kernels.span_attention import Later


@dataclass(frozen=True)
class Images(ItemEmbeddings):
    """An encoder of images, and what programs take of each token in addition to its row of the slab: with ropes in sections how far its
    positions in time, row and column are from those that it would have behind the last image; where tokens of an image see each other, how
    many later ones it sees.

    While an image is encoded in parts, another array than the slab has its hidden state: one image of each rank at a time."""

    vision: Vision
    sizes: EncoderSizes
    dtype: str
    kernels: Kernels
    merge: Callable[[Params], VisionTower]
    """All weights -> the encoder."""
    has_rope_sections: bool

    name = "images"

    @property
    def num_token_inputs(self) -> int:  # type: ignore[override]
        return (SHIFTS.stop if self.has_rope_sections else SHIFTS.start) + self.vision.attends_within

    @property
    def result_width(self) -> int:
        return self.vision.result_width

    def layers_of(self, size: int, part: int) -> range:
        """The layers that a part of programs of this size computes."""
        num_parts, num_layers = self.sizes.num_parts(size), self.vision.num_layers
        return range(num_layers * part // num_parts, num_layers * (part + 1) // num_parts)

    def programs(self) -> Sequence[Encode]:
        kinds = [Encode, EncodeVideo] if "video" in self.vision.item_kinds else [Encode]
        return [kind(self) for kind in kinds]

    def op_runner(self, device: Any) -> ImagesOnHost:
        return ImagesOnHost(device, self)

    def row_arrays(self, buckets: Buckets) -> dict[str, Any]:
        found, shape = super().row_arrays(buckets), hidden_shape(self.vision, self.sizes)
        return {**found, HIDDEN: jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype))} if all(shape) else found

    def give(self, run: StepRun, found_TX: jax.Array) -> None:
        inputs_IT, step, width = run.token_inputs[self.name], run.step, self.vision.output_size
        step.given_TD, *added = (found_TX[:, start : start + width] for start in range(0, found_TX.shape[1], width))
        if added:
            assert step.is_given_T is not None
            is_given_T1 = step.is_given_T[:, None]
            step.deepstack = [jnp.where(is_given_T1, added_TD, 0) for added_TD in added]
        if self.has_rope_sections:
            assert step.rope_positions_3T is not None, "rope_delta comes before"
            step.rope_positions_3T = step.rope_positions_3T + inputs_IT[SHIFTS]
        if self.vision.attends_within:
            assert isinstance(step.attend, PagedContext)
            step.attend.later = Later(inputs_IT[NUM_LATER], self.sizes.max_item_embeddings - 1)

    def encode(self, params: Params, slab: jax.Array, patches_PC: jax.Array, indices: jax.Array) -> tuple[jax.Array]:
        """The slab with the embeddings of some images. indices: see `packing.arrays`."""
        num_results = self._num_results(len(patches_PC))
        placed = PatchIndices.unpack(indices[:-num_results].reshape(-1, len(patches_PC)))
        found = self.merge(params)(patches_PC, placed, **self.kernels.of_encoder)
        return (slab.at[indices[-num_results:]].set(found.astype(slab.dtype), mode="drop"),)

    def encode_part(
        self, size: int, layers: range, params: Params, slab: jax.Array, hidden_XD: jax.Array, *given: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The slab with the results that these layers complete for an image, and the hidden state behind them. given: the indices of
        `size` patches, and before them, for the first layers, the patches; later ones go on from the hidden state. That of a rank without
        an image stays."""
        *patches, indices = given
        num_results = self._num_results(size)
        placed = PatchIndices.unpack(indices[:-num_results].reshape(-1, size))
        tower, before_PD = self.merge(params), hidden_XD[: self.vision.hidden_rows(size)]
        x_PD = tower.embed(patches[0], placed) if patches else before_PD
        x_PD, results = tower.run_layers(x_PD, placed, layers, **self.kernels.of_encoder)
        width = self.vision.output_size
        for place, found in results.items():
            columns = slice(place * width, (place + 1) * width)
            slab = slab.at[indices[-num_results:], columns].set(found.astype(slab.dtype), mode="drop")
        after_PD = jnp.where(placed.segment_P[0] >= 0, x_PD.astype(hidden_XD.dtype), before_PD)
        return slab, hidden_XD.at[: len(after_PD)].set(after_PD)

    def _num_results(self, num_patches: int) -> int:
        return num_patches // self.vision.merge_size**2
