"""Pooling as a feature of the step: one vector of a prompt, one of each of its tokens, or scores of its classes."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxllm.model_config import ModelConfig
from jaxllm.runner.features.pooling.head import Pooling
from jaxllm.runner.features.pooling.programs import AddUp, Classify, Pool
from jaxllm.runner.heads import Device
from jaxllm.runner.programs.kind import ProgramKind
from jaxllm.runner.row_arrays import Params
from jaxllm.runner.step_feature import FeatureParts, StepFeature


class PoolingFeature(StepFeature):
    """Makes vectors of hidden states, by programs behind `forward`. Vectors of tokens need none: their hidden states are read as they
    are."""

    def __init__(self, model: ModelConfig, merge: Callable[[Params], Any]):
        self.model, self.merge = model, merge

    def programs(self) -> Sequence[ProgramKind]:
        adds_up = self.model.pooling.pooling_type != "last"
        pool = Pool(adds_up=adds_up) if self.model.classifier is None else Classify(self.merge, adds_up=adds_up)
        return [*([AddUp()] if adds_up else []), pool]

    def head(self, device: Device) -> Pooling:
        return Pooling(device, self.model)


def make(parts: FeatureParts) -> StepFeature | None:
    """Where the last layers are."""
    return PoolingFeature(parts.model_config, parts.weights["model"].merge) if parts.is_last else None
