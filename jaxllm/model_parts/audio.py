"""How a model hears: the encoder that the attention of its decoder layers reads. Source: arXiv:2212.04356 (Whisper)."""

from dataclasses import dataclass

from jaxllm.model_parts.attention import Attention
from jaxllm.model_parts.decoder import Layer
from jaxllm.model_parts.mlp import MLP
from jaxllm.model_parts.norm import Norm

SAMPLE_RATE = 16000
"""Samples of a second."""
HOP = 160
"""Samples between frames of features."""


@dataclass(frozen=True)
class Audio:
    """The encoder of audio: convolutions of features over time, learned positions, layers with attention between all positions."""

    num_bins: int
    """Mel frequencies of a frame of features."""
    num_positions: int
    """Positions that the encoder computes of each clip; each is two frames of features."""
    hidden_size: int
    num_layers: int
    num_heads: int
    mlp: MLP
    prefix: str = "model.encoder."
    """How the names of all its tensors begin."""

    def name_of(self, name: str) -> str | None:
        """The name of a tensor of the checkpoint, if it is the encoder's; None: it is not."""
        return name if name.startswith(self.prefix) else None

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def num_frames(self) -> int:
        """Frames of features of a clip."""
        return 2 * self.num_positions

    @property
    def num_samples(self) -> int:
        """Samples of a clip; shorter audio is followed by silence."""
        return self.num_frames * HOP


@dataclass(frozen=True)
class CrossAttentionLayer(Layer):
    """A decoder layer that also attends to what an encoder has computed, between its attention and its MLP."""

    cross: Attention | None = None
    cross_norm: Norm | None = None

    @property
    def parts(self) -> dict[str, Attention | MLP]:
        """See Layer."""
        return {**super().parts, "cross": self.cross}
