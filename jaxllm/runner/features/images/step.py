"""Images as a feature of the step: embeddings of a slab stand in place of those of placeholder tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.encoder_sizes import EncoderSizes
from jaxllm.layers.vision import PatchIndices, VisionTower
from jaxllm.model_parts import Vision
from jaxllm.request import PromptItem
from jaxllm.runner.batch import Chunk
from jaxllm.runner.buckets import Buckets
from jaxllm.runner.features.images.ops import ImagesOnHost
from jaxllm.runner.features.images.packing import NUM_LATER, SHIFTS, SLAB_ROW, encode_sizes
from jaxllm.runner.features.images.programs import Encode, EncodeVideo
from jaxllm.runner.kernels import Kernels
from jaxllm.runner.paged_context import PagedContext
from jaxllm.runner.row_arrays import Params
from jaxllm.runner.step_feature import StepFeature, StepRun
from pallas_kernels.span_attention import Later

COMMON_TOKENS = 2048
"""Programs of at most so many tokens are made for images at the start, larger ones later."""


@dataclass(frozen=True)
class Images(StepFeature):
    """An encoder, and the slab: embeddings [rows, result_width] of each data-parallel rank, in pages that the scheduler gives to images.

    Programs that compute tokens up to the end of a prompt's last image take the row of the slab of each token. With ropes in sections they
    also take how far the token's positions in time, row and column are from those that it would have behind the last image; where tokens
    of an image see each other, how many later ones a token sees."""

    vision: Vision
    sizes: EncoderSizes
    dtype: str
    kernels: Kernels
    merge: Callable[[Params], VisionTower]
    """All weights -> the encoder."""
    has_rope_sections: bool

    name = "images"
    is_optional = True
    is_in_decodes = False

    @property
    def num_token_inputs(self) -> int:  # type: ignore[override]
        return (SHIFTS.stop if self.has_rope_sections else SHIFTS.start) + self.vision.attends_within

    @property
    def slab_shape(self) -> tuple[int, int]:
        return self.sizes.num_pages * self.sizes.page_embeddings, self.vision.result_width

    def programs(self) -> Sequence[Encode]:
        kinds = [Encode, EncodeVideo] if "video" in self.vision.item_kinds else [Encode]
        return [kind(self, encode_sizes(self.vision, self.sizes.max_item_patches)) for kind in kinds]

    def op_runner(self, device: Any) -> ImagesOnHost:
        return ImagesOnHost(device, self)

    def row_arrays(self, buckets: Buckets) -> dict[str, Any]:
        return {self.name: jax.ShapeDtypeStruct(self.slab_shape, jnp.dtype(self.dtype))}

    def is_needed(self, columns_RC: np.ndarray, chunks: Sequence[Chunk]) -> bool:
        return any(chunk.row.data.items and chunk.start < chunk.row.data.items[-1].end for chunk in chunks)

    def computes(self, items: Sequence[PromptItem]) -> bool:
        return bool(items)

    def is_common(self, num_tokens: int) -> bool:
        return num_tokens <= COMMON_TOKENS

    def before(self, run: StepRun) -> None:
        inputs_IT, step, width = run.token_inputs[self.name], run.step, self.vision.output_size
        row_T = inputs_IT[SLAB_ROW] - 1
        step.is_given_T = row_T >= 0
        found_TX = run.rows.of_features[self.name][jnp.maximum(row_T, 0)]
        step.given_TD, *added = (found_TX[:, start : start + width] for start in range(0, found_TX.shape[1], width))
        if added:
            step.deepstack = [jnp.where(step.is_given_T[:, None], added_TD, 0) for added_TD in added]
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
