"""The Mamba-2 part of layers."""

from dataclasses import dataclass, replace

from jaxllm.model_parts.norm import Norm
from jaxllm.model_parts.state_mixer import StateMixer


@dataclass(frozen=True)
class Mamba2(StateMixer):
    """A state-space model: each head sums up the sequence in a matrix, which decays from token to token. Source: arXiv:2405.21060.

    Values of heads, and the vectors by which a group of heads takes into its matrices and out of them, are products of the input that
    go through a short convolution over the sequence first.
    """

    num_heads: int
    num_groups: int
    """Groups of heads. Counts copies: see group_replicas."""
    head_dim: int
    """Values of a head."""
    state_size: int
    """Values of a vector of a group."""
    kernel_size: int
    """Tokens that the convolution sees."""
    norm: Norm
    """Norm of each group's output, multiplied with its gate before."""
    conv_bias: bool = True
    bias: bool = False
    """Whether the products with the input and the output have biases."""
    time_step_limit: tuple[float, float] | None = None
    """Least and most of a token's time step; None: any."""
    name: str = "mamba"
    group_replicas: int = 1
    """Number of devices that share the heads of a group, each with a copy of its vectors; copies count as groups."""

    @property
    def group_size(self) -> int:
        """Heads per group (G)."""
        return self.num_heads // self.num_groups

    @property
    def num_channels(self) -> int:
        """Values of a group that go through the convolution: those of its heads, and two vectors (C)."""
        return self.group_size * self.head_dim + 2 * self.state_size

    @property
    def state_heads(self) -> int:
        return self.num_groups

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes for a row and group: the last inputs of the convolution, and the matrices of its heads."""
        return (self.kernel_size - 1, self.num_channels), (self.group_size, self.head_dim, self.state_size)

    def input_shapes(self, num_tokens: int) -> tuple[tuple[int, ...], ...]:
        """Inputs of the convolution, and a time step for each head."""
        return (num_tokens, self.num_channels), (num_tokens, self.group_size)

    @property
    def flops_per_token(self) -> float:
        """The recurrence has a product with the matrix of each head, and a change of it."""
        return 5.0 * self.num_heads * self.head_dim * self.state_size

    @property
    def linears(self) -> dict[str, tuple[str, ...]]:
        return {"in": (f"{self.name}.in_proj",), "out": (f"{self.name}.out_proj",)}

    @property
    def values_per_token(self) -> int:
        return 8 * self.num_groups * self.num_channels

    def indivisible(self, size: int) -> list[str]:
        stored = self.num_groups // self.group_replicas
        faults = [f"{self.num_heads} heads of Mamba-2"] if self.num_heads % size else []
        return faults + ([f"{stored} groups of Mamba-2"] if stored % size and stored > 1 else [])

    def split(self, size: int) -> "Mamba2":
        """With a copy of the only group for every device."""
        stored = self.num_groups // self.group_replicas
        replicas = size if stored == 1 else 1
        return replace(self, num_groups=stored * replicas, group_replicas=replicas)
