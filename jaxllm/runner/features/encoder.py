"""Encoders as a feature of the step: its prompts, each whole, attend within themselves, and tokens have types."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp

from jaxllm.model_config import MAX_POSITION
from jaxllm.runner.paged_context import PagedContext
from jaxllm.runner.step_feature import FeatureParts, StepFeature, StepRun
from jaxllm.scheduler_output import NewRequestData


@dataclass(frozen=True)
class WholePrompts(StepFeature):
    """A column of each row: where the second text of its prompt starts."""

    name = "encoder"
    num_columns = 1

    def row_columns(self, data: NewRequestData) -> Sequence[int]:
        return (MAX_POSITION if data.second_text_start is None else data.second_text_start,)

    def before(self, run: StepRun) -> None:
        places, step = run.places, run.step
        assert isinstance(step.attend, PagedContext)
        step.attend.segment_T = jnp.where(places.is_real_T, places.owner_T, -1)
        second_T = run.own_columns[self.name][places.owner_T, 0]
        step.token_types_T = (places.position_T >= second_T).astype(jnp.int32)


def make(parts: FeatureParts) -> StepFeature | None:
    """For encoders."""
    return None if parts.model_config.encoder is None else WholePrompts()
