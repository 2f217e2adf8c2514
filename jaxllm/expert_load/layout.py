"""Which experts a device has."""

from dataclasses import dataclass, field

import numpy as np

from jaxllm.expert_load.balancer import device_loads
from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import MoE
from jaxllm.model_parts.mlp import slots as first_slots


@dataclass
class Layout:
    """The mixtures of a model, and how their experts are distributed."""

    layers: tuple[int, ...]
    """The layers that have a mixture."""
    num_experts: tuple[int, ...]
    """Number of experts in each of these layers."""
    num_layers: int
    """Number of layers of the model."""
    num_devices: int
    """Devices that experts are distributed to; 1: every device computes a part of each expert, or is alone."""
    num_redundant: int = 0
    """Further copies of experts in each of these layers."""
    slots: list[np.ndarray] = field(init=False)
    """The expert in each slot, for each of these layers; devices have equally many slots, one device after the other."""

    def __post_init__(self) -> None:
        self.start_over()

    @classmethod
    def of(cls, model: ModelConfig, *, num_devices: int) -> "Layout":
        """num_devices: that the experts are split over."""
        found = {i: layer.mlp for i, layer in enumerate(model.layers) if isinstance(layer.mlp, MoE)}
        is_distributed = all(part.by_expert for part in found.values())
        sizes = tuple(part.routing.num_experts for part in found.values())
        more = max((part.num_redundant for part in found.values()), default=0)
        return cls(tuple(found), sizes, model.num_layers, num_devices if is_distributed else 1, more)

    @property
    def num_copies(self) -> int:
        """Most copies of an expert."""
        return min(self.num_devices, 1 + self.num_redundant)

    def start_over(self) -> None:
        """Experts are where they are loaded to."""
        self.slots = [np.array(first_slots(size, size + self.num_redundant)) for size in self.num_experts]

    def loads(self, mixture: int, tokens_E: np.ndarray) -> np.ndarray:
        """The tokens of each device, or with one of each expert, in a layer. mixture: its index in `layers`."""
        tokens_E = tokens_E[: self.num_experts[mixture]]
        return tokens_E if self.num_devices == 1 else device_loads(self.slots[mixture], tokens_E, self.num_devices)


def balance_of(loads: list[np.ndarray]) -> float:
    """The mean load over the largest, both summed over layers: the share of the time of experts in which a device computes, if the
    busiest is waited for in each layer. loads: of each layer, those of its devices."""
    busiest = sum(float(load.max()) for load in loads)
    return sum(float(load.mean()) for load in loads) / busiest if busiest else 1.0
