"""Sizes of an encoder's programs, of its budgets per step and of its cache on the device, shared by scheduler and runner."""

from dataclasses import dataclass

from jaxllm.device_ops import PAGE_TOKENS
from jaxllm.model_parts.audio import Audio
from jaxllm.model_parts.vision import Vision

STEP_PATCHES = 8192
"""Patches encoded per step in which no request decodes."""
DECODE_STEP_PATCHES = 3072
"""Patches, as `EncoderSizes.cost` counts them, encoded per step in which requests decode: about 7 ms for 0.4 B parameters on an H200."""
MAX_STEP_CLIPS = 4
"""Longest clips of audio encoded per step: with the encoder of Whisper large-v3 on an H100 about 30 ms (computed, not measured)."""
PROGRAM_SIZES = (256, 1024, 2048, 4096, 8192, 16384)
"""Patches that a program encodes."""
ATTENTION_PATCHES = 8192
"""Among so many patches attention takes as long as all else of a layer: 7770, fitted to the times of Qwen3-VL-8B on an H200."""


def program_sizes(vision: Vision, max_patches: int) -> tuple[int, ...]:
    """The sizes of the programs that encode images of at most so many patches, ascending: whole tiles, or whole images where all have one
    size, or else whole cells."""
    unit = vision.position_grid**2 if vision.has_tiles or vision.family == "gemma3" else vision.merge_size**2
    last = -(-max_patches // PROGRAM_SIZES[0]) * PROGRAM_SIZES[0]
    sizes = (*(size for size in PROGRAM_SIZES if size < max_patches), last)
    return tuple(sorted({-(-size // unit) * unit for size in sizes}))


MAX_PATCHES = 16384
"""Patches of the largest image by default."""
_IDEFICS3_TILES = 17
"""Tiles of the largest image that Idefics 3 and SmolVLM make: four rows and columns, and the whole."""


def most_patches(vision: Vision, given: int | None) -> int:
    """Most patches of an image. given: as the option mm_max_patches says; None: as many as the largest image of a family whose images are
    not made smaller has, at least MAX_PATCHES."""
    if given is not None:
        return given
    return max(MAX_PATCHES, _IDEFICS3_TILES * vision.position_grid**2 if vision.family == "idefics3" else 0)


@dataclass(frozen=True)
class EncoderSizes:
    """Sizes of one data-parallel rank. They count patches: so many of them make an embedding that one limit serves both.

    An image whose program costs more than max_decode_patches is encoded alone, in parts: programs of consecutive layers, one for each step
    while requests decode. Smaller ones share a program.
    """

    patches_per_embedding: int
    max_item_patches: int
    """Most patches of an image."""
    max_step_patches: int
    """Most patches that a step encodes, unless its first image has more."""
    num_pages: int
    """Pages of the slab, which keeps embeddings on the device."""
    page_embeddings: int = PAGE_TOKENS
    max_decode_patches: int = 0
    """Most that a step encodes in which requests decode, as `cost` counts; 0: as in other steps, and no image is encoded in parts."""
    programs: tuple[int, ...] = ()
    """Patches that programs encode, ascending."""
    num_layers: int = 1
    """Layers of the encoder; a part has at least one."""
    max_segment_patches: int = 1 << 30
    """Most patches that attend to each other."""
    min_item_patches: int = 0
    """An item counts as so many at least: its program encodes them, however small it is."""

    @classmethod
    def of(cls, vision: Vision, max_patches: int | None, max_decode_patches: int = 0) -> "EncoderSizes":
        """The sizes for a model's encoder. max_patches: see `most_patches`; it counts where images differ in size. The slab holds the
        embeddings of one step, and as many that requests still compute with."""
        per_embedding = vision.merge_size**2
        max_item_patches = vision.position_grid**2 if vision.family == "gemma3" else most_patches(vision, max_patches)
        num_rows = max(STEP_PATCHES, max_item_patches) // per_embedding
        programs = program_sizes(vision, max_item_patches)
        return cls(
            per_embedding,
            max_item_patches,
            STEP_PATCHES,
            2 * -(-num_rows // PAGE_TOKENS),
            max_decode_patches=max_decode_patches,
            programs=programs,
            num_layers=vision.num_layers,
            max_segment_patches=vision.position_grid**2 if vision.has_tiles else programs[-1],
        )

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

    @property
    def whole_programs(self) -> tuple[int, ...]:
        """The sizes of programs of all layers."""
        return tuple(size for size in self.programs if self.num_parts(size) == 1)

    def program_size(self, num_patches: int) -> int:
        """The size of the programs that encode an image alone."""
        return next(size for size in self.programs if size >= num_patches)

    def cost(self, num_patches: int) -> int:
        """Time to encode an image, as a number of patches without attention, which grows with the square of those that attend to each
        other."""
        return num_patches + num_patches * min(num_patches, self.max_segment_patches) // ATTENTION_PATCHES

    def num_parts(self, num_patches: int) -> int:
        """Programs, one after the other, that encode an image of so many patches."""
        if not self.max_decode_patches:
            return 1
        return min(-(-self.cost(self.program_size(num_patches)) // self.max_decode_patches), self.num_layers)

    def part_cost(self, num_patches: int) -> int:
        """The cost of an image, or of each of its parts: at most max_decode_patches, but of parts of a single layer."""
        num_parts = self.num_parts(num_patches)
        return self.cost(num_patches) if num_parts == 1 else -(-self.cost(self.program_size(num_patches)) // num_parts)
