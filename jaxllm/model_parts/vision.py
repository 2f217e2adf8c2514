"""Vision encoder of a model, which computes embeddings of patches in the text model's width."""

from dataclasses import dataclass
from typing import Literal

from jaxllm.model_parts.mlp import MLP, Activation
from jaxllm.model_parts.norm import Norm

VisionFamily = Literal["qwen3_vl", "qwen2_5_vl", "gemma3", "pixtral", "idefics3", "internvl"]


@dataclass(frozen=True)
class VisionLayer:
    """A layer of the encoder: x + attention(attention_norm(x)), then x + mlp(mlp_norm(x))."""

    attention_norm: Norm
    mlp_norm: Norm
    mlp: MLP
    qkv: tuple[str, ...]
    """One name: a tensor with the rows of queries, keys and values, in this order."""
    out: str
    qkv_bias: bool = True
    out_bias: bool = True
    qk_norms: tuple[Norm, Norm] | None = None
    """Norms of queries and keys, over all heads together."""
    scales: tuple[str, str] | None = None
    """Tensors of factors of the values that attention and MLP add."""


@dataclass(frozen=True)
class MergerLinear:
    """A linear layer of a merger. Its inputs are the outputs of what comes before it."""

    name: str
    outputs: int
    activation: Activation | None = None
    """Applied to its outputs."""
    bias: bool = True
    weight: str = "weight"
    """Name of its weight within the module."""
    transposed: bool = False
    """Whether the checkpoint holds [inputs, outputs]."""


@dataclass(frozen=True)
class Merger:
    """Makes an embedding of each cell of merge_size² patches: norms them, joins them, and computes linear layers."""

    linears: tuple[MergerLinear, ...]
    norm: Norm | None = None
    """Norm of each patch."""
    joined_norm: Norm | None = None
    """Norm of the joined patches."""
    channel_major: bool = False
    """Whether the values of the joined patches alternate, instead of coming patch by patch."""
    averages: bool = False
    """Whether patches are averaged instead of joined."""


@dataclass(frozen=True)
class VisionEncoder:
    """The parts of an encoder, and what a checkpoint calls them. Norms and layers name their tensors as those of decoder layers do."""

    prefixes: tuple[str, ...]
    """How the names of all its tensors begin, those of the mergers included."""
    patch: str
    """The product of a patch's pixels."""
    layer_name: str
    """With {} for the number."""
    layer: VisionLayer
    merger: Merger
    deepstack: tuple[Merger, ...] = ()
    """A merger for each of `Vision.deepstack_layers`."""
    patch_bias: bool = True
    positions: str | None = None
    """The tensor of learned positions."""
    class_token: str | None = None
    """The tensor of what stands before the patches of each tile, and is left out of the results. The first row of positions is its own."""
    first_norm: Norm | None = None
    """Before the first layer."""
    last_norm: Norm | None = None
    """After the last layer."""
    rope_theta: float | None = None
    """Base of the frequencies by which row and column turn half of a head's values each; None: they do not."""
    columns_turn_between: bool = False
    """Whether columns turn by the frequencies between those of rows, instead of the same."""
    window: int = 0
    """Patches along each side of a window, within which patches attend to each other; 0: to all of their image."""
    full_layers: tuple[int, ...] = ()
    """Layers without windows, in an encoder that has windows."""
    other_prefix: str | None = None
    """In place of the first of `prefixes` in the names of other checkpoints of the family."""
    ignored: tuple[str, ...] = ()
    """Prefixes of the tensors that are not loaded."""

    def name_of(self, name: str) -> str | None:
        """The encoder's name for a tensor of a checkpoint; None: it is not one of the encoder's."""
        if self.other_prefix is not None and name.startswith(self.other_prefix):
            name = self.prefixes[0] + name.removeprefix(self.other_prefix)
        return name if name.startswith(self.prefixes) and not name.startswith(self.ignored) else None


@dataclass(frozen=True)
class Vision:
    """The encoder of a family, and how its results stand in prompts. Sizes are in patches unless said."""

    family: VisionFamily
    """Which preparation of images (`jaxllm/media/`) and which encoder (`jaxllm/layers/vision.py`)."""
    image_token_id: int
    """The placeholder of one embedding."""
    patch_size: int
    """Pixels along each side of a patch."""
    merge_size: int
    """merge_size² patches become one embedding."""
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    output_size: int
    """Width of an embedding: that of the text model."""
    temporal_patch_size: int = 1
    """Frames of a video in one patch; a still image is encoded with the sum of their weights."""
    position_grid: int = 0
    """Rows, and columns, of the table of learned positions; 0: there is none."""
    deepstack_layers: tuple[int, ...] = ()
    """Layers of the encoder behind which further results are taken, each added to the tokens behind one more of the first text layers."""
    video_token_id: int | None = None
    """The placeholder of one embedding of a video."""
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """Mean of red, green and blue, in a range of 0 to 1, that the encoder subtracts: that of the family."""
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """Deviation that it divides by."""
    has_tiles: bool = False
    """Whether an image consists of tiles that each fill the table of learned positions, whose patches attend to each other."""
    encoder: VisionEncoder | None = None
    """Its layers."""
    attends_within: bool = False
    """Whether the tokens of an image see each other in the text model: earlier ones also see later ones. A step computes all of them."""

    @property
    def item_kinds(self) -> tuple[str, ...]:
        """Kinds of items that prompts may have."""
        return ("image", "video") if self.family == "qwen3_vl" else ("image",)

    @property
    def max_patch_values(self) -> int:
        """Most values of pixels that a patch has: of one frame, or of all frames that a patch of a video has."""
        return 3 * self.patch_size**2 * (self.temporal_patch_size if "video" in self.item_kinds else 1)

    @property
    def head_dim(self) -> int:
        """Width of a head of the encoder's attention."""
        return self.hidden_size // self.num_heads

    def hidden_rows(self, num_patches: int) -> int:
        """Rows of the encoder's hidden state: the patches, and what stands before those of each tile."""
        has_class_token = self.encoder is not None and self.encoder.class_token is not None
        return num_patches + (num_patches // self.position_grid**2 if has_class_token else 0)

    @property
    def num_deepstack(self) -> int:
        return len(self.deepstack_layers)

    @property
    def result_width(self) -> int:
        """Values of an encoded token: its embedding, then what is added behind each of the first text layers."""
        return (1 + self.num_deepstack) * self.output_size
