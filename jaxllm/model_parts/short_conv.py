"""The short convolution of layers."""

from dataclasses import dataclass

from jaxllm.model_parts.state_mixer import StateMixer


@dataclass(frozen=True)
class ShortConv(StateMixer):
    """A gated convolution over the last tokens, channel by channel: out(c * conv(b * x)), of which b, c and x are products of its input.

    Source: arXiv:2511.23404.
    """

    num_heads: int
    """Equal parts of the channels, which devices can share."""
    head_dim: int
    """Channels of each."""
    kernel_size: int
    """Tokens that the convolution sees."""
    bias: bool = False
    """Whether its products and the convolution have biases."""
    name: str = "conv"

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes for a row and head: the last inputs of the convolution."""
        return ((self.kernel_size - 1, self.head_dim),)

    def input_shapes(self, num_tokens: int) -> tuple[tuple[int, ...], ...]:
        """Inputs of the convolution."""
        return ((num_tokens, self.head_dim),)

    @property
    def flops_per_token(self) -> float:
        """Operations for each token in addition to its products."""
        return (2.0 * self.kernel_size + 2.0) * self.num_heads * self.head_dim

    @property
    def linears(self) -> dict[str, tuple[str, ...]]:
        return {"in": (f"{self.name}.in_proj",), "out": (f"{self.name}.out_proj",)}

    @property
    def values_per_token(self) -> int:
        return 8 * self.num_heads * self.head_dim

    def indivisible(self, size: int) -> list[str]:
        return [f"{self.num_heads} parts of short convolutions"] if self.num_heads % size else []
