"""Makes the runner of an engine with lanes."""

from jax.sharding import Mesh

from jaxllm.lanes.far_lane import FarLane
from jaxllm.lanes.lane import Lane
from jaxllm.lanes.programs import JointPrograms
from jaxllm.lanes.runner import LanesRunner
from jaxllm.parallel.mesh import lane_meshes
from jaxllm.runner.expert_placement import Tables
from jaxllm.runner.stage import RunnerParts
from jaxllm.runner.weights import Weights, WeightsSource


def lanes_runner(parts: RunnerParts) -> LanesRunner:
    """The lanes of a mesh of both axes, each with a cache as the plan of the one stage says. Other hosts may have some of them."""
    (stage,), (mesh,) = parts.stages, parts.meshes
    tables = Tables.of(parts.config.parallel, parts.model_config, stage.model.layers)
    source = WeightsSource(parts.config, parts.model_config, stage.model, mesh, {"drafter": parts.drafter, "tables": tables})
    joint = Weights(source.models, mesh)
    store = parts.store_of(stage, mesh)

    def new_lane(number: int, own: Mesh) -> Lane:
        # A stored program knows its devices, so no lane can load another's.
        part = None if store is None else store.part(f"lane-{number}", list(own.devices.flat))
        return parts.make(Lane, stage, own, store=part, joint=joint)

    found = [new_lane(number, own) if own.local_devices else None for number, own in enumerate(lane_meshes(mesh))]
    near = next(lane for lane in found if lane is not None)
    lanes = [lane or FarLane(near) for lane in found]
    shapes = JointPrograms.of(near.shapes, mesh, joint.shapes)
    threads = parts.config.compile.compile_threads
    assert threads is not None, "platform defaults are resolved before the runner is made"
    return LanesRunner(lanes, shapes, joint, source, threads=threads, store=store)
