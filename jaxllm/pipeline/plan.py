"""The stages of an engine before they have weights: their layers, models and memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from jax.sharding import Mesh

from jaxllm.layers.build import build_model
from jaxllm.layers.decoder import CausalLM
from jaxllm.model_config import ModelConfig
from jaxllm.pipeline.crossing import Crossing, Sizes
from jaxllm.pipeline.earlier_host import EarlierHost
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
) -> PipelineRunner | EarlierHost:
    """What runs the stages of this process, each on its mesh; other hosts may have stages before and behind them.

    make: a stage's own runner, of this class.
    """
    kinds = [EarlierStage, *[MiddleStage] * (len(stages) - 2), LastStage]
    own = [number for number, mesh in enumerate(meshes) if mesh.local_devices]
    runners: list[Any] = [make(kinds[number], stages[number], meshes[number]) for number in own]  # type: ignore[arg-type]

    def crossing_to(number: int) -> Crossing:
        return Crossing(meshes[number - 1], meshes[number], Sizes.of(runners[0].shapes))

    entry = crossing_to(own[0]) if own[0] > 0 else None
    if own[-1] == len(stages) - 1:
        *earlier, last = runners
        return PipelineRunner(earlier, last, entry=entry, num_stages=len(stages))
    return EarlierHost(runners, entry=entry, leave=crossing_to(own[-1] + 1), num_stages=len(stages))
