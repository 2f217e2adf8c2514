"""Sizes of the vision encoder's budget per step and of its cache on the device, shared by scheduler and runner."""

from dataclasses import dataclass

from jaxllm.device_ops import PAGE_TOKENS
from jaxllm.model_parts.vision import Vision

STEP_PATCHES = 8192
"""Patches encoded per step. Decodes of the step wait for them: about 40 ms for 0.4 B parameters on an H100 (computed, not measured)."""

MAX_PATCHES = 16384
"""Patches of the largest image by default."""
_IDEFICS3_TILES = 17
"""Of the largest image that Idefics 3 and SmolVLM make: four rows and columns, and the whole."""


def most_patches(vision: Vision, given: int | None) -> int:
    """Most patches of an image. given: as the option mm_max_patches says; None: as many as the largest image of a family whose images are
    not made smaller has, at least MAX_PATCHES."""
    if given is not None:
        return given
    return max(MAX_PATCHES, _IDEFICS3_TILES * vision.position_grid**2 if vision.family == "idefics3" else 0)


@dataclass(frozen=True)
class EncoderSizes:
    """Sizes of one data-parallel rank. They count patches: so many of them make an embedding that one limit serves both."""

    patches_per_embedding: int
    max_item_patches: int
    """Most patches of an image."""
    max_step_patches: int
    """Most patches that a step encodes, unless its first image has more."""
    num_pages: int
    """Pages of the slab, which keeps embeddings on the device."""
    page_embeddings: int = PAGE_TOKENS

    @classmethod
    def of(cls, vision: Vision, max_patches: int | None) -> "EncoderSizes":
        """The sizes for a model's encoder. max_patches: see `most_patches`; it counts where images differ in size. The slab holds the
        embeddings of one step, and as many that requests still compute with."""
        per_embedding = vision.merge_size**2
        max_item_patches = vision.position_grid**2 if vision.family == "gemma3" else most_patches(vision, max_patches)
        num_rows = max(STEP_PATCHES, max_item_patches) // per_embedding
        return cls(per_embedding, max_item_patches, STEP_PATCHES, 2 * -(-num_rows // PAGE_TOKENS))

    @property
    def max_item_embeddings(self) -> int:
        return self.max_item_patches // self.patches_per_embedding

    @property
    def max_encoded_patches(self) -> int:
        """Most patches that a step encodes, however large its first image is."""
        return max(self.max_step_patches, self.max_item_patches)
