"""Positions of models with ropes in sections, as a feature of the step: behind images they are smaller than indices (`rope_positions`)."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxllm.rope_positions import rope_delta
from jaxllm.runner.step_feature import FeatureParts, StepFeature, StepRun
from jaxllm.scheduler_output import NewRequestData


@dataclass(frozen=True)
class RopeDelta(StepFeature):
    """A column of each row: position minus index of the tokens behind the last image of its prompt."""

    name = "rope_delta"
    num_columns = 1

    def row_columns(self, data: NewRequestData) -> Sequence[int]:
        return (rope_delta(data.items),)

    def before(self, run: StepRun) -> None:
        delta_T = run.own_columns[self.name][run.places.owner_T, 0]
        run.step.rope_positions_3T = (run.places.position_T + delta_T)[None]


def make(parts: FeatureParts) -> StepFeature | None:
    """For models that see images and have such ropes. In text, all positions are indices."""
    config = parts.model_config
    return RopeDelta() if config.vision is not None and config.has_rope_sections else None
