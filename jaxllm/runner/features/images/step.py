"""Images as a feature of the step: embeddings of the slab replace those of placeholder tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.encoder_sizes import EncoderSizes
from jaxllm.layers.vision import PatchIndices, VisionTower
from jaxllm.model_parts import Vision
from jaxllm.runner.features.images.ops import ImagesOnHost
from jaxllm.runner.features.images.packing import NUM_LATER, SHIFTS, encode_sizes
from jaxllm.runner.features.images.programs import Encode, EncodeVideo
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
    many later ones it sees."""

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

    def programs(self) -> Sequence[Encode]:
        kinds = [Encode, EncodeVideo] if "video" in self.vision.item_kinds else [Encode]
        return [kind(self, encode_sizes(self.vision, self.sizes.max_item_patches)) for kind in kinds]

    def op_runner(self, device: Any) -> ImagesOnHost:
        return ImagesOnHost(device, self)

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

    def encode(self, params: Params, slab: jax.Array, patches_PC: jax.Array, indices: jax.Array) -> jax.Array:
        """The slab with the embeddings of some images. indices: see `packing.arrays`."""
        num_patches = len(patches_PC)
        num_results = num_patches // self.vision.merge_size**2
        packed_KP = indices[:-num_results].reshape(-1, num_patches)
        attention = self.kernels.segment_attention or "xla"
        found = self.merge(params)(
            patches_PC, PatchIndices.unpack(packed_KP), attention=attention, interpret=self.kernels.interpret
        )
        return slab.at[indices[-num_results:]].set(found.astype(slab.dtype), mode="drop")
