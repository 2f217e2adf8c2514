"""Makes the runner of an engine with lanes."""

from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from jaxllm.config import EngineConfig
from jaxllm.lanes.lane import Lane
from jaxllm.lanes.programs import JointPrograms
from jaxllm.lanes.runner import LanesRunner
from jaxllm.layers.decoder import CausalLM
from jaxllm.model_config import ModelConfig
from jaxllm.parallel.mesh import lane_meshes
from jaxllm.runner.kernels import Kernels
from jaxllm.runner.memory import MemoryPlan
from jaxllm.runner.program_store import ProgramStore
from jaxllm.runner.weights import Weights, WeightsSource
from jaxllm.start_times import StartTimes


def lanes_runner(
    config: EngineConfig,
    model_config: ModelConfig,
    model: CausalLM,
    mesh: Mesh,
    plan: MemoryPlan,
    kernels: Kernels,
    processors: tuple[Any, ...],
    *,
    stores: Callable[[Mesh], ProgramStore | None],
    times: StartTimes,
) -> LanesRunner:
    """The lanes of a mesh of both axes, each with a cache as `plan` says. stores: where the programs of a mesh are kept."""
    joint = Weights([model], mesh)
    lanes = [
        Lane(config, model_config, model, own, plan, kernels, processors, store=stores(own), times=times, joint=joint)
        for own in lane_meshes(mesh)
    ]
    shapes = JointPrograms.of(lanes[0].shapes, mesh, joint.shapes)
    source = WeightsSource(config, model_config, model, mesh)
    threads = config.compile.compile_threads
    assert threads is not None, "platform defaults are resolved before the runner is made"
    return LanesRunner(lanes, shapes, joint, source, threads=threads, store=stores(mesh))
