"""Norms."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Norm:
    """A normalisation over the width of its input, computed in float32: x / rms(x) * weight unless fields say otherwise."""

    name: str
    eps: float = 1e-6
    centred: bool = False
    """Subtract the mean first, as LayerNorm does."""
    weighted: bool = True
    """Whether it has a weight."""
    weight_offset: float = 0.0
    """Added to the weight."""
    bias: bool = False
