"""The stages of an engine before they have weights: their layers, models and memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from jax.sharding import Mesh

from jaxllm.layers.build import build_model
from jaxllm.layers.decoder import CausalLM
from jaxllm.model_config import ModelConfig
from jaxllm.pipeline.runner import PipelineRunner
from jaxllm.pipeline.stages import EarlierStage, LastStage, MiddleStage
from jaxllm.runner.memory import MemoryPlan

T = TypeVar("T")


@dataclass(frozen=True)
class Stage:
    """One stage of an engine, or all of one without stages."""

    layers: range
    model: CausalLM
    plan: MemoryPlan


def tightest(stages: Sequence[Stage]) -> MemoryPlan:
    """The plan that leaves the least memory on a device."""

    def room(plan: MemoryPlan) -> int:
        return plan.limit_bytes - plan.weight_bytes - plan.state_bytes - plan.cache_bytes

    return min((stage.plan for stage in stages), key=room)


def plan_stages(
    model_config: ModelConfig, layers_of: Sequence[range], make_plan: Callable[[CausalLM, range], MemoryPlan]
) -> tuple[Stage, ...]:
    """The stages with these layers. All have the same number of blocks: what the one with the least room can hold.

    make_plan: for one stage alone, checked.
    """
    stages = []
    for number, layers in enumerate(layers_of, 1):
        model = build_model(model_config, layers)
        plan = make_plan(model, layers)
        named = f"stage {number} of {len(layers_of)} (layers {layers.start} to {layers.stop - 1}) on {plan.device}"
        stages.append(Stage(layers, model, replace(plan, device=named)))
    num_blocks = min(stage.plan.num_blocks for stage in stages)
    max_len = min(stage.plan.max_model_len for stage in stages)
    return tuple(replace(stage, plan=replace(stage.plan, num_blocks=num_blocks, max_model_len=max_len)) for stage in stages)


def pipeline_runner(
    stages: Sequence[Stage], meshes: Sequence[Mesh], make: Callable[[type[T], Stage, Mesh], T]
) -> PipelineRunner:
    """What runs the stages, each on its mesh. make: a stage's own runner, of this class."""
    first, *middle, last = zip(stages, meshes, strict=True)
    earlier = [make(EarlierStage, *first), *(make(MiddleStage, *each) for each in middle)]  # type: ignore[arg-type]
    return PipelineRunner(earlier, make(LastStage, *last))  # type: ignore[arg-type]
