"""Prepares an engine without weights from a config: sizes the cache and determines the programs' shapes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from flax import nnx
from jax.sharding import Mesh

from jaxllm import env
from jaxllm.config import EngineConfig
from jaxllm.engine.early_programs import EarlyPrograms
from jaxllm.engine.executor import DeviceRunner
from jaxllm.engine.features import Features
from jaxllm.engine.fingerprint import fingerprint
from jaxllm.engine.kernel_choice import may_quantize_by_kernels
from jaxllm.engine.kernel_shapes import product_shapes
from jaxllm.engine.parallel_backends import make_runner
from jaxllm.engine.resolve import backend, resolve
from jaxllm.engine.stage_plans import checked_plan, lay_out
from jaxllm.errors import ConfigError
from jaxllm.kernel_policy import KernelPolicy, platform_policy
from jaxllm.kernel_verdicts import OpReport
from jaxllm.layers.build import Widened, build_model
from jaxllm.layers.parameters import weights
from jaxllm.log import logger
from jaxllm.parallel.across_hosts import has_other_hosts
from jaxllm.parallel.topology import Topology
from jaxllm.runner.features import check_machine
from jaxllm.runner.kernels import Kernels
from jaxllm.runner.memory import (
    MemoryPlan,
    check_free_memory,
    check_pool,
    reserve_device_memory,
)
from jaxllm.runner.program_pool import use_persistent_cache
from jaxllm.runner.program_store import ProgramStore, local_store, open_artifact
from jaxllm.runner.quick_tracing import spare_lookups
from jaxllm.runner.stage import RunnerParts, Stage, tightest
from jaxllm.sampling.processors import Processor
from jaxllm.start_times import StartTimes


@dataclass(frozen=True)
class Prepared(RunnerParts):
    """An engine without weights, enough to compile its programs."""

    kernel_report: dict[str, OpReport]
    runner: DeviceRunner
    features: Features

    @property
    def mesh(self) -> Mesh:
        """The mesh of an engine without a pipeline."""
        (mesh,) = self.meshes
        return mesh

    @property
    def plan(self) -> MemoryPlan:
        """The memory plan of the stage that leaves the least memory."""
        return tightest(self.stages)

    def describe(self) -> str:
        """The memory plan of each stage that this process has."""
        own = (stage for stage, mesh in zip(self.stages, self.meshes, strict=True) if mesh.local_devices)
        return "\n".join(stage.plan.describe() for stage in own)

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        model_dir: Path,
        processors: tuple[Processor, ...],
        times: StartTimes,
        *,
        starts: bool = False,
        policy: KernelPolicy | None = None,
    ) -> "Prepared":
        """Prepare a model. Programs are read from the artifact, or from this machine's cache, which stores new ones.

        starts: the engine's start follows, whose programs may be made while kernels are checked. policy: None for the platform's.
        Raises ConfigError, ModelLoadError, KernelCheckError or OutOfMemoryError.
        """
        if starts:
            check_machine(config)
        topology = Topology.of(config.parallel)
        reserve_device_memory(config.cache.gpu_memory_utilization, topology)
        check_free_memory(topology)
        with times.part("device"):
            on_cpu = backend() == "cpu"
        if policy is None:
            may_quantize = may_quantize_by_kernels(config.compile.attention_implementation, on_gpu=not on_cpu)
            policy = platform_policy(on_gpu=not on_cpu, has_weight_only=may_quantize)
        if not on_cpu:
            spare_lookups()
        if config.compile.compilation_cache and not on_cpu:
            # For programs other than those of the step. On a CPU, programs that XLA read from its own cache cannot be stored.
            use_persistent_cache(env.cache_dir() / "programs")
        wanted = config.compile.attention_implementation
        with times.part("config and model"):
            config, model_config, meshes = resolve(config, model_dir)
            features = Features.of(config, model_config, build_model(model_config), meshes[0])
            drafter, adaptation = features.drafter, features.adaptation
            stages = lay_out(config, model_config, partial(checked_plan, config, model_config, policy), features)
            for stage, mesh in zip(stages, meshes, strict=True):
                check_pool(stage.plan, mesh.local_devices)
        if starts and model_config.quantizes_inputs and (most := policy.max_weight_only_rows):
            logger.info(
                "steps of up to %d tokens multiply fp8 weights with activations in %s, larger ones in fp8",
                most,
                model_config.dtype,
            )

        if starts and not on_cpu:
            tell_of_widened_weights([stage.model for stage in stages], model_config.dtype)

        parts = RunnerParts(
            config=config,
            model_config=model_config,
            stages=stages,
            meshes=meshes,
            kernels=Kernels(),
            policy=policy,
            processors=processors,
            times=times,
            store_of=partial(_store_of, features),
            drafter=drafter,
            adaptation=adaptation,
        )
        may_start = starts and topology.num_devices == 1 and config.compile.compiled_artifact is None
        early = EarlyPrograms(
            lambda kernels: make_runner(_with_kernels(parts, kernels)), config.compile.warmup if may_start else None
        )
        with times.part("kernel check"):
            computed = model_config
            if drafter is not None:
                computed = replace(model_config, layers=(*model_config.layers, *drafter.layers))
            models: list[nnx.Module] = [stage.model for stage in stages]
            if drafter is not None and drafter.model is not None:
                models.append(drafter.model)
            products = product_shapes(models, model_config.dtype)
            chosen = early.choose(wanted, config, computed, stages[0].plan, _own(meshes), adaptation, products)
        with times.part("config and model"):
            runner = early.runner_of(chosen.kernels)
        made_of = vars(_with_kernels(parts, chosen.kernels))
        return cls(**made_of, kernel_report=chosen.report, runner=runner, features=features)

    def settled(self, *, rare_later: bool) -> "Prepared":
        """Return this, or a copy with a smaller cache if the largest program needs more memory than estimated.

        A smaller cache recompiles every program, because all depend on the number of blocks; so estimates are on the high side.
        """
        options = self.config.cache
        if options.num_gpu_blocks_override is not None or options.kv_cache_memory_bytes is not None:
            return self
        work_bytes = self.runner.work_bytes()
        if work_bytes <= self.plan.work_bytes:
            return self
        plan = partial(checked_plan, self.config, self.model_config, self.policy, work_bytes=work_bytes)
        stages = lay_out(self.config, self.model_config, plan, self.features)
        if stages[0].plan.num_blocks == self.plan.num_blocks:
            return replace(self, stages=stages)
        resized = replace(self, stages=stages)
        logger.info("the largest step needs more memory than estimated: %s", resized.plan.describe())
        self.runner.programs.shutdown()
        runner = make_runner(resized)
        runner.take_weights(self.runner)
        runner.start_programs(rare_later=rare_later)
        return replace(resized, runner=runner)

    def fingerprint(self) -> dict[str, object]:
        """Everything that the programs of the last stage depend on, or of the only one, on a device of this process."""
        return fingerprint(self, self.features, self.stages[-1], _own(self.meshes))


def _with_kernels(parts: RunnerParts, kernels: Kernels) -> RunnerParts:
    """The parts once kernels are chosen."""
    return replace(parts, config=parts.config.replace(attention_implementation=kernels.attention), kernels=kernels)


def _own(meshes: tuple[Mesh, ...]) -> Mesh:
    """The first of these with devices of this process."""
    return next(mesh for mesh in meshes if mesh.local_devices)


def _store_of(features: Features, parts: RunnerParts, stage: Stage, mesh: Mesh) -> ProgramStore | None:
    """See `RunnerParts.store_of`: the artifact, or this machine's cache."""
    options, devices = parts.config.compile, list(mesh.devices.flat)
    if options.compiled_artifact is not None:
        return open_artifact(Path(options.compiled_artifact), fingerprint(parts, features, stage, mesh), devices)
    if options.compilation_cache and not has_other_hosts():  # a program for devices of several processes cannot be stored
        try:
            return local_store(env.cache_dir() / "engines", fingerprint(parts, features, stage, mesh), devices)
        except ConfigError as error:
            logger.warning("%s", error)
    return None


def tell_of_widened_weights(models: Sequence[nnx.Module], dtype: str) -> None:
    """Log if products on a GPU widen the weights of experts in each step: of those that tokens choose, or of all, which is a warning, as
    the head is."""
    if any(Widened.of(model).head for model in models):
        logger.warning(
            "each step widens the head, because no kernel is chosen that multiplies its 8 bits, longer than one in %s takes: leave "
            "--quantize-lm-head out, or on a Hopper GPU start in bfloat16 with --attention-implementation mosaic, which checks kernels",
            dtype,
        )
    if any(weight.format.widens_each for model in models for weight in weights(model)):
        logger.info("no kernel multiplies experts without a gate as they are stored: a step widens each that a token chooses")
    if any(Widened.of(model).experts for model in models):
        logger.warning(
            "each step widens the weights of all experts, because no kernel is chosen that multiplies them as they are stored: start with "
            "--dequantize if they fit into memory in %s, or on a Hopper GPU with --attention-implementation mosaic, which checks kernels",
            dtype,
        )
