"""The tokens of each expert of each mixture, on their way from the device (`features.expert_counts`) to the host."""

from collections.abc import Iterable, Sequence

import jax
import numpy as np

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import MoE


def mixture_layers(config: ModelConfig) -> tuple[int, ...]:
    """The layers of a model that have a mixture of experts."""
    return tuple(i for i, layer in enumerate(config.layers) if isinstance(layer.mlp, MoE))


class CountsInFlight:
    """Counts on their way to the host: of each stage of a pipeline, or of the one engine."""

    def __init__(self, parts: Sequence[jax.Array]):
        self._parts = parts
        for part in parts:
            part.copy_to_host_async()

    @classmethod
    def joined(cls, stages: Iterable["CountsInFlight"]) -> "CountsInFlight":
        """The counts of several stages, in their order."""
        return cls([part for stage in stages for part in stage._parts])

    def is_ready(self) -> bool:
        """Whether `result` returns at once."""
        return all(part.is_ready() for part in self._parts)  # type: ignore[attr-defined]

    def result(self) -> np.ndarray:
        """Int32 [mixtures, experts]. Waits for the device, and raises the error of a step before."""
        parts = [np.asarray(part) for part in self._parts if len(part)]
        most = max((part.shape[1] for part in parts), default=0)
        return np.concatenate(
            [np.pad(part, ((0, 0), (0, most - part.shape[1]))) for part in parts or [np.zeros((0, 0), np.int32)]]
        )
