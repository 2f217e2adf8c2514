"""The Kimi delta attention part of layers."""

from dataclasses import dataclass

from jaxllm.model_parts.norm import Norm
from jaxllm.model_parts.state_mixer import StateMixer


@dataclass(frozen=True)
class KimiDeltaAttention(StateMixer):
    """Linear attention by the gated delta rule in which each channel of a key decays at its own rate. Source: arXiv:2510.26692.

    Queries, keys and values are products of x that go through a short convolution over the sequence first. The heads' outputs are normed,
    and multiplied with the sigmoids of gates.
    """

    num_heads: int
    head_dim: int
    """Values of a head's query, key and value."""
    kernel_size: int
    """Tokens that the convolution sees."""
    norm: Norm
    """Norm of each head's output."""
    lower_bound: float | None = None
    """Least logarithm of a decay, as which it is bound * sigmoid(rate * z), negative; None: it is -rate * softplus(z)."""
    narrow_dim: int | None = None
    """Width of the vectors of which z and gates are products; None: they are products of x."""
    nested_rates: bool = False
    """Whether the checkpoint holds the heads' rates as [1, 1, heads, 1]."""
    name: str = "self_attn"

    @property
    def num_channels(self) -> int:
        """Values of a head that go through the convolution: a query, a key and a value (C)."""
        return 3 * self.head_dim

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes for a row and head: the last inputs of the convolution, and its matrix, keys by values."""
        return (self.kernel_size - 1, self.num_channels), (self.head_dim, self.head_dim)

    def input_shapes(self, num_tokens: int) -> tuple[tuple[int, ...], ...]:
        """Inputs of the convolution; the inputs of the decays, and a rate of change."""
        return (num_tokens, self.num_channels), (num_tokens, self.head_dim + 1)

    @property
    def flops_per_token(self) -> float:
        """The rule has two products with the matrix of each head, and a change of it."""
        return 7.0 * self.num_heads * self.head_dim**2

    @property
    def linears(self) -> dict[str, tuple[str, ...]]:
        names = {"qkv": ("q_proj", "k_proj", "v_proj"), "strength": ("b_proj",), "out": ("o_proj",)}
        if self.narrow_dim is None:
            names |= {"decay": ("f_proj",), "gate": ("g_proj",)}
        else:
            names |= {"into_decay": ("f_a_proj",), "decay": ("f_b_proj",), "into_gate": ("g_a_proj",), "gate": ("g_b_proj",)}
        return {part: tuple(f"{self.name}.{name}" for name in found) for part, found in names.items()}

    @property
    def values_per_token(self) -> int:
        return 12 * self.num_heads * self.head_dim

    def indivisible(self, size: int) -> list[str]:
        return [f"{self.num_heads} heads of linear attention"] if self.num_heads % size else []
