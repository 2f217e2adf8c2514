"""The stages of an engine before they have weights: their layers, models and memory."""

from collections.abc import Callable
from dataclasses import replace

from jaxllm.config import EngineConfig
from jaxllm.layers.build import build_model
from jaxllm.layers.decoder import CausalLM
from jaxllm.model_config import ModelConfig
from jaxllm.pipeline.earlier_host import EarlierHost
from jaxllm.pipeline.runner import PipelineRunner
from jaxllm.pipeline.split import layers_of_stages
from jaxllm.pipeline.transfer import Sizes, Transfer
from jaxllm.runner.memory import MemoryPlan
from jaxllm.runner.runner import ModelRunner
from jaxllm.runner.stage import RunnerParts, Stage


def plan_stages(
    config: EngineConfig, model_config: ModelConfig, plan_of: Callable[[CausalLM, range], MemoryPlan]
) -> tuple[Stage, ...]:
    """The stages of an engine. All have the same number of blocks: what the one with the least room can hold.

    plan_of: for one stage alone, checked.
    """
    stages, layers_of = [], layers_of_stages(config, model_config)
    for number, layers in enumerate(layers_of, 1):
        model = build_model(model_config, layers)
        plan = plan_of(model, layers)
        named = f"stage {number} of {len(layers_of)} (layers {layers.start} to {layers.stop - 1}) on {plan.device}"
        stages.append(Stage(layers, model, replace(plan, device=named)))
    num_blocks = min(stage.plan.num_blocks for stage in stages)
    max_len = min(stage.plan.max_model_len for stage in stages)
    return tuple(replace(stage, plan=replace(stage.plan, num_blocks=num_blocks, max_model_len=max_len)) for stage in stages)


def pipeline_runner(parts: RunnerParts) -> ModelRunner | PipelineRunner | EarlierHost:
    """Make the runner of the stages of this process, each on its mesh; other hosts may have stages before and behind them."""
    stages, meshes = parts.stages, parts.meshes
    if len(stages) == 1:
        return parts.make(stages[0], meshes[0])
    own = [number for number, mesh in enumerate(meshes) if mesh.local_devices]
    runners = [parts.make(stages[number], meshes[number]) for number in own]
    has_last = own[-1] == len(stages) - 1

    def transfer_to(number: int) -> Transfer:
        sizes = Sizes.of(parts.model_config, runners[0].buckets)
        return Transfer(meshes[number - 1], meshes[number], sizes)

    entry = transfer_to(own[0]) if own[0] else None
    if has_last:
        return PipelineRunner(runners[:-1], runners[-1], entry=entry, num_stages=len(stages))
    return EarlierHost(runners, entry=entry, leave=transfer_to(own[-1] + 1), num_stages=len(stages))
