"""Parts of an engine's runner: its stages, one without a pipeline, and what all of them share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from jaxllm.config import EngineConfig
from jaxllm.kernel_policy import KernelPolicy
from jaxllm.layers.decoder import CausalLM
from jaxllm.model_config import ModelConfig
from jaxllm.runner.adaptation import Adaptation
from jaxllm.runner.drafter import Drafter
from jaxllm.runner.kernels import Kernels
from jaxllm.runner.memory import MemoryPlan
from jaxllm.runner.program_store import ProgramStore
from jaxllm.runner.runner import ModelRunner
from jaxllm.runner.token_split import TokenSplit
from jaxllm.start_times import StartTimes


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


@dataclass(frozen=True, kw_only=True)
class RunnerParts:
    """The parts of a runner."""

    config: EngineConfig
    model_config: ModelConfig
    stages: tuple[Stage, ...]
    meshes: tuple[Mesh, ...]
    """The mesh of each stage; with data-parallel ranks one for all of them."""
    kernels: Kernels
    policy: KernelPolicy
    processors: tuple[Any, ...]
    times: StartTimes
    store_of: "Callable[[RunnerParts, Stage, Mesh], ProgramStore | None]"
    """Where the programs of a stage are stored."""
    drafter: Drafter | None
    adaptation: Adaptation | None
    """The adaptation of the whole model."""

    def make(self, stage: Stage, mesh: Mesh, token_split: TokenSplit | None = None) -> ModelRunner:
        """The runner of a stage. token_split: the devices of the mesh that split tokens."""
        return ModelRunner(
            self.config,
            self.model_config,
            stage.model,
            mesh,
            stage.plan,
            self.kernels,
            self.policy,
            self.processors,
            drafter=self.drafter,
            adaptation=None if self.adaptation is None else self.adaptation.of_stage(stage.model),
            store=self.store_of(self, stage, mesh),
            times=self.times,
            token_split=token_split,
        )
