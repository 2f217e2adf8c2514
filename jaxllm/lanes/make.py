"""Makes the runner of an engine with lanes."""

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
    store: ProgramStore | None,
    times: StartTimes,
) -> LanesRunner:
    """The lanes of a mesh of both axes, each with a cache as `plan` says."""
    joint = Weights([model], mesh)

    def new_lane(number: int, own: Mesh) -> Lane:
        # A stored program knows its devices, so no lane can load another's.
        part = None if store is None else store.part(f"lane-{number}", list(own.devices.flat))
        return Lane(config, model_config, model, own, plan, kernels, processors, store=part, times=times, joint=joint)

    lanes = [new_lane(number, own) for number, own in enumerate(lane_meshes(mesh))]
    shapes = JointPrograms.of(lanes[0].shapes, mesh, joint.shapes)
    source = WeightsSource(config, model_config, model, mesh)
    threads = config.compile.compile_threads
    assert threads is not None, "platform defaults are resolved before the runner is made"
    return LanesRunner(lanes, shapes, joint, source, threads=threads, store=store)
