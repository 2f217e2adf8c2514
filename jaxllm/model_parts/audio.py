"""How a model hears: an encoder, whose results the attention of its decoder layers reads, or which stand in place of tokens of prompts.

Source: arXiv:2212.04356 (Whisper).
"""

from dataclasses import dataclass

from jaxllm.model_parts.attention import Attention
from jaxllm.model_parts.decoder import Layer
from jaxllm.model_parts.mlp import MLP
from jaxllm.model_parts.norm import Norm
from jaxllm.model_parts.vision import MergerLinear

SAMPLE_RATE = 16000
"""Samples of a second."""
HOP = 160
"""Samples between frames of features."""


@dataclass(frozen=True)
class AudioTokens:
    """How the results of an encoder become embeddings, each in place of a placeholder token of a prompt.

    Positions behind the end of a clip are not attended to and have no embeddings.
    """

    token_id: int
    """The placeholder of one embedding."""
    placeholder: str
    """Text that stands for a clip in a prompt of plain text."""
    prefix: str
    """How the names of the tensors of `linears` begin."""
    linears: tuple[MergerLinear, ...]
    """From the encoder's width to that of the text model."""
    num_averaged: int = 1
    """So many positions are averaged to one, before the encoder's last norm."""

    def num_embeddings(self, num_positions: int) -> int:
        """Embeddings of so many positions of a clip."""
        return num_positions // self.num_averaged

    @property
    def output_size(self) -> int:
        """Width of an embedding."""
        return self.linears[-1].outputs


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
    """How the names of its tensors begin."""
    tokens: AudioTokens | None = None
    """None: every prompt has a clip, and the layers of the decoder attend to what the encoder computes of it."""

    @property
    def prefixes(self) -> tuple[str, ...]:
        """How the names of all its tensors begin, those behind it included."""
        return (self.prefix,) if self.tokens is None else (self.prefix, self.tokens.prefix)

    def name_of(self, name: str) -> str | None:
        """The name of a tensor of the checkpoint, if it is the encoder's; None: it is not."""
        return name if name.startswith(self.prefixes) else None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Positions of programs that encode clips to embeddings of tokens: all, half or a quarter of the longest clip's. Even."""
        whole = self.num_positions
        return -(-whole // 8) * 2, -(-whole // 4) * 2, whole

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def num_frames(self) -> int:
        """Frames of features of a clip."""
        return 2 * self.num_positions

    def positions_of(self, num_frames: int) -> int:
        """Positions that the encoder computes of so many frames."""
        return -(-num_frames // 2)

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
