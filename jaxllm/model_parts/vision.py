"""How a model sees images: the encoder that turns their patches into embeddings of the text model's width."""

from dataclasses import dataclass
from typing import Literal

VisionFamily = Literal["qwen3_vl", "qwen2_5_vl", "gemma3", "pixtral"]


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

    @property
    def head_dim(self) -> int:
        """Width of a head of the encoder's attention."""
        return self.hidden_size // self.num_heads

    @property
    def num_deepstack(self) -> int:
        return len(self.deepstack_layers)

    @property
    def result_width(self) -> int:
        """Values of an encoded token: its embedding, then what is added behind each of the first text layers."""
        return (1 + self.num_deepstack) * self.output_size
