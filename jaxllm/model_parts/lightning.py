"""The lightning attention part of layers."""

from dataclasses import dataclass
from typing import ClassVar

from jaxllm.model_parts.norm import Norm
from jaxllm.model_parts.rope import Rope
from jaxllm.model_parts.state_mixer import StateMixer


@dataclass(frozen=True)
class LightningAttention(StateMixer):
    """Linear attention with a fixed decay: each head sums up products of keys and values in a matrix, which a query reads. Source:
    arXiv:2401.04658.

    The heads' outputs are normed by groups, and multiplied with the sigmoids of gates.
    """

    num_heads: int
    head_dim: int
    rope: Rope
    decay: float
    """Factor of the rates by which the heads' sums decay: those of a layer differ from head to head."""
    norm: Norm
    num_norm_groups: int
    """Equal parts of the heads, whose values are normed together."""
    head_norms: tuple[Norm, Norm] | None = None
    """The norms of each query head and each key head, before the rotation."""
    name: str = "attention"

    has_convolution: ClassVar[bool] = False
    group_size: ClassVar[int] = 1
    """Heads that share a key: as the state-space op has it, whose recurrence it is."""

    @property
    def num_groups(self) -> int:
        """Groups of one head each, as the state-space op has it."""
        return self.num_heads

    @property
    def state_size(self) -> int:
        """Values of a key."""
        return self.head_dim

    @property
    def rates(self) -> tuple[float, ...]:
        """How fast each head's sums decay: they are multiplied with exp(-rate) at each token."""
        return tuple(self.decay * slope for slope in _slopes(self.num_heads))

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape for a row and head: its matrix, values by keys."""
        return ((1, self.head_dim, self.head_dim),)

    def input_shapes(self, num_tokens: int) -> tuple[tuple[int, ...], ...]:
        """Value, key and query."""
        return ((num_tokens, 3 * self.head_dim),)

    @property
    def flops_per_token(self) -> float:
        """The recurrence has a product with the matrix of each head, and a change of it."""
        return 5.0 * self.num_heads * self.head_dim**2

    @property
    def linears(self) -> dict[str, tuple[str, ...]]:
        names = {"qkv": "query_key_value", "gate": "g_proj", "out": "dense"}
        return {part: (f"{self.name}.{name}",) for part, name in names.items()}

    @property
    def values_per_token(self) -> int:
        return 8 * self.num_heads * self.head_dim

    def indivisible(self, size: int) -> list[str]:
        faults = [f"{self.num_heads} heads of lightning attention"] if self.num_heads % size else []
        return faults + ([f"{self.num_norm_groups} groups of its norm"] if self.num_norm_groups % size else [])


def _slopes(num_heads: int) -> list[float]:
    """A falling geometric series, as ALiBi has it (arXiv:2108.12409, section 3); between those of two powers of 2 some of the larger."""
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2 ** (-8 / power * (i + 1)) for i in range(power)]
    return slopes if power == num_heads else slopes + _slopes(2 * power)[::2][: num_heads - power]
