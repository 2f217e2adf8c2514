"""Pooling as a feature of the step: one vector of a prompt, or one of each of its tokens."""

from collections.abc import Sequence

from jaxllm.model_config import ModelConfig
from jaxllm.runner.features.pooling.head import Pooling
from jaxllm.runner.features.pooling.programs import AddUp, Pool
from jaxllm.runner.heads import Device
from jaxllm.runner.programs.kind import ProgramKind
from jaxllm.runner.step_feature import FeatureParts, StepFeature


class PoolingFeature(StepFeature):
    """Makes vectors of hidden states, by programs behind `forward`. Vectors of tokens need none: their hidden states are read as they
    are."""

    def __init__(self, model: ModelConfig):
        self.model = model

    def programs(self) -> Sequence[ProgramKind]:
        is_mean = self.model.pooling.pooling_type == "mean"
        return [*([AddUp()] if is_mean else []), Pool(is_mean=is_mean)]

    def head(self, device: Device) -> Pooling:
        return Pooling(device, self.model)


def make(parts: FeatureParts) -> StepFeature | None:
    """Where the last layers are."""
    return PoolingFeature(parts.model_config) if parts.is_last else None
