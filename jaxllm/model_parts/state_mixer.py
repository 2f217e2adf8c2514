"""The common part of all that layers mix tokens by with states by row, instead of keys and values of each token."""

from typing import Any, ClassVar, Self


class StateMixer:
    """Keeps states by row: for each of `state_heads` arrays of `state_shapes`, in float32; if it `has_convolution`, the first is the last
    inputs of that, in the model's type. With drafts also arrays of `input_shapes`, one for each of these, all in the model's type: the
    inputs from which the states behind some tokens follow. Subclasses are frozen dataclasses.
    """

    num_heads: Any
    """Heads that devices can share."""
    has_convolution: ClassVar[bool] = True
    window: ClassVar[int | None] = None
    """Keys that a token sees, as `Attention.window`: it has none, or sees all before it."""
    flops_per_pair: ClassVar[float] = 0.0
    """Operations for each query token and token that it sees: none."""

    @property
    def state_heads(self) -> int:
        return self.num_heads  # type: ignore[no-any-return]

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """For a row and head."""
        raise NotImplementedError

    def input_shapes(self, num_tokens: int) -> tuple[tuple[int, ...], ...]:
        """For a row and head, of so many tokens."""
        raise NotImplementedError

    @property
    def flops_per_token(self) -> float:
        """Operations for each token in addition to the products of linear layers."""
        raise NotImplementedError

    @property
    def linears(self) -> dict[str, tuple[str, ...]]:
        """The checkpoint's modules that each linear layer is made of."""
        raise NotImplementedError

    @property
    def values_per_token(self) -> int:
        """Intermediate values that a step has at once for each token, over all devices."""
        raise NotImplementedError

    def indivisible(self, size: int) -> list[str]:
        """The numbers that keep this part from being split over `size` devices."""
        raise NotImplementedError

    def split(self, size: int) -> Self:
        """The part of a model that is split over so many devices."""
        return self
