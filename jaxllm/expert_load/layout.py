"""Which experts a device has."""

from dataclasses import dataclass

import numpy as np

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import MoE


@dataclass(frozen=True)
class Layout:
    """The mixtures of a model, and how their experts are distributed."""

    layers: tuple[int, ...]
    """The layers that have a mixture."""
    num_experts: tuple[int, ...]
    """Of each of these layers."""
    num_layers: int
    """Of the model."""
    num_devices: int
    """Devices that experts are distributed to; 1: every device computes a part of each expert, or is alone."""

    @classmethod
    def of(cls, model: ModelConfig, *, num_devices: int) -> "Layout":
        """num_devices: that the experts are split over."""
        found = {i: layer.mlp for i, layer in enumerate(model.layers) if isinstance(layer.mlp, MoE)}
        is_distributed = all(part.by_expert for part in found.values())
        sizes = tuple(part.routing.num_experts for part in found.values())
        return cls(tuple(found), sizes, model.num_layers, num_devices if is_distributed else 1)

    def loads(self, layer: int, tokens_E: np.ndarray) -> np.ndarray:
        """The tokens of each device, or with one of each expert, in a layer. layer: its index in `layers`."""
        tokens_E = tokens_E[: self.num_experts[layer]]
        return tokens_E if self.num_devices == 1 else tokens_E.reshape(self.num_devices, -1).sum(1)
