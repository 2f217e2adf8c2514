"""Sizes of an encoder's budget per step and of its cache on the device, shared by scheduler and runner."""

from dataclasses import dataclass

from jaxllm.device_ops import PAGE_TOKENS
from jaxllm.model_parts.audio import Audio
from jaxllm.model_parts.vision import Vision

STEP_PATCHES = 8192
"""Patches encoded per step. Decodes of the step wait for them: about 40 ms for 0.4 B parameters on an H100 (computed, not measured)."""
MAX_STEP_CLIPS = 4
"""Longest clips of audio encoded per step: with the encoder of Whisper large-v3 on an H100 about 30 ms (computed, not measured)."""


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
    min_item_patches: int = 0
    """An item counts as so many at least: its program encodes them, however small it is."""

    @classmethod
    def of(cls, vision: Vision, max_patches: int) -> "EncoderSizes":
        """The sizes for a model's encoder. max_patches: most patches of an image, where images differ in size. The slab holds the
        embeddings of one step, and as many that requests still compute with."""
        per_embedding = vision.merge_size**2
        max_item_patches = vision.position_grid**2 if vision.family == "gemma3" else max_patches
        num_rows = max(STEP_PATCHES, max_item_patches) // per_embedding
        return cls(per_embedding, max_item_patches, STEP_PATCHES, 2 * -(-num_rows // PAGE_TOKENS))

    @classmethod
    def of_audio(cls, audio: Audio) -> "EncoderSizes":
        """The sizes for an encoder of audio, whose positions are the patches. The slab is as large in proportion."""
        assert audio.tokens is not None
        per_embedding, most = audio.tokens.num_averaged, audio.num_positions
        max_step = MAX_STEP_CLIPS * most
        num_pages = 2 * -(-max_step // per_embedding // PAGE_TOKENS)
        return cls(per_embedding, most, max_step, num_pages, min_item_patches=audio.sizes[0])

    def num_patches(self, num_embeddings: int) -> int:
        """Patches of an item."""
        return max(self.min_item_patches, num_embeddings * self.patches_per_embedding)

    @property
    def max_item_embeddings(self) -> int:
        return self.max_item_patches // self.patches_per_embedding

    @property
    def max_encoded_patches(self) -> int:
        """Most patches that a step encodes, however large its first image is."""
        return max(self.max_step_patches, self.max_item_patches)
