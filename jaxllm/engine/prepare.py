"""Prepares an engine without weights from a config: resolves options, sizes the cache and determines the programs' shapes."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxllm import env
from jaxllm.cache_spec import row_bytes
from jaxllm.config import AUTO_MODEL_LEN, EngineConfig, resolve_platform_defaults
from jaxllm.engine import encoders
from jaxllm.engine import features as registered
from jaxllm.engine.early_programs import EarlyPrograms
from jaxllm.engine.executor import DeviceRunner
from jaxllm.engine.failures import explain, is_out_of_memory
from jaxllm.engine.features import NO_FEATURES, Features
from jaxllm.engine.fingerprint import fingerprint
from jaxllm.engine.kernel_choice import attention_implementation, may_quantize_by_kernels, wants_tiles
from jaxllm.engine.kernel_shapes import tiled_weights
from jaxllm.engine.parallel_backends import check_backend, make_runner, make_stages
from jaxllm.engine.step_sizes import with_prefill_limit
from jaxllm.eplb_options import EplbConfig
from jaxllm.errors import ConfigError, OutOfMemoryError
from jaxllm.hosts_options import has_stages_on_hosts
from jaxllm.kernel_policy import KernelPolicy, platform_policy
from jaxllm.kernel_verdicts import OpReport
from jaxllm.kv_connectors import KVTransferConfig
from jaxllm.kv_events_options import KVEventsConfig
from jaxllm.layers.build import Widened, build_model
from jaxllm.layers.decoder import CausalLM
from jaxllm.layers.parameters import axes_of, parameters, weights
from jaxllm.log import logger
from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import Layer, MoE
from jaxllm.models.load_config import load_model_config
from jaxllm.parallel.across_hosts import has_other_hosts
from jaxllm.parallel.axes import num_parts
from jaxllm.parallel.mesh import DATA, TENSOR, meshes_of
from jaxllm.parallel.topology import Topology
from jaxllm.runner.drafter import Drafter, kept_logits
from jaxllm.runner.features import check_machine, memory_bytes
from jaxllm.runner.kernels import Kernels
from jaxllm.runner.memory import (
    MemoryPlan,
    check_free_memory,
    check_pool,
    device_limit,
    memory_plan,
    reserve_device_memory,
    whole_cache,
)
from jaxllm.runner.program_pool import use_persistent_cache
from jaxllm.runner.program_store import Fingerprint, ProgramStore, local_store, open_artifact, read_manifest
from jaxllm.runner.quick_tracing import spare_lookups
from jaxllm.runner.shared_layers import shares_layers
from jaxllm.runner.stage import RunnerParts, Stage, tightest
from jaxllm.sampling.processors import Processor
from jaxllm.start_times import StartTimes

_STATES_FRACTION = 0.25
"""Largest fraction of the device's memory for states by row with the default of max_num_seqs."""
_BY_ROW = "has layers with linear attention or other states by row, which sum up a whole prompt"
"""Description of models in messages, behind their names."""


@dataclass(frozen=True)
class Prepared:
    """An engine without weights, enough to compile its programs."""

    config: EngineConfig
    model_config: ModelConfig
    meshes: tuple[Mesh, ...]
    """One for each stage; data-parallel ranks share one."""
    stages: tuple[Stage, ...]
    """One without a pipeline."""
    kernels: Kernels
    kernel_report: dict[str, OpReport]
    policy: KernelPolicy
    runner: DeviceRunner
    processors: tuple[Processor, ...]
    times: StartTimes
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
            stages = lay_out(config, model_config, partial(_plan, config, model_config, policy), features)
            for stage, mesh in zip(stages, meshes, strict=True):
                check_pool(stage.plan, mesh.local_devices)
        resolved = config
        if starts and model_config.quantizes_inputs and (most := policy.max_weight_only_rows):
            logger.info(
                "steps of up to %d tokens multiply fp8 weights with activations in %s, larger ones in fp8",
                most,
                model_config.dtype,
            )

        if starts and not on_cpu:
            tell_of_widened_experts([stage.model for stage in stages], model_config.dtype)

        def make(kernels: Kernels) -> DeviceRunner:
            of_kernels = resolved.replace(attention_implementation=kernels.attention)
            return _runner(of_kernels, model_config, meshes, stages, kernels, policy, processors, times, features)

        may_start = starts and topology.num_devices == 1 and config.compile.compiled_artifact is None
        early = EarlyPrograms(make, config.compile.warmup if may_start else None)
        with times.part("kernel check"):
            computed = model_config
            if drafter is not None:
                computed = replace(model_config, layers=(*model_config.layers, *drafter.layers))
            models: list[nnx.Module] = [stage.model for stage in stages]
            if drafter is not None and drafter.model is not None:
                models.append(drafter.model)
            tiles = tiled_weights(models, model_config.dtype)
            chosen = early.choose(wanted, config, computed, stages[0].plan, _own(meshes), adaptation, tiles)
        kernels = chosen.kernels
        with times.part("config and model"):
            runner = early.runner_of(kernels)
            config = config.replace(attention_implementation=kernels.attention)
        return cls(config, model_config, meshes, stages, kernels, chosen.report, policy, runner, processors, times, features)

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
        plan = partial(_plan, self.config, self.model_config, self.policy, work_bytes=work_bytes)
        stages = lay_out(self.config, self.model_config, plan, self.features)
        if stages[0].plan.num_blocks == self.plan.num_blocks:
            return replace(self, stages=stages)
        resized = replace(self, stages=stages)
        logger.info("the largest step needs more memory than estimated: %s", resized.plan.describe())
        self.runner.programs.shutdown()
        made_of = (self.config, self.model_config, self.meshes, stages, self.kernels, self.policy, self.processors)
        runner = _runner(*made_of, self.times, self.features)
        runner.take_weights(self.runner)
        runner.start_programs(rare_later=rare_later)
        return replace(resized, runner=runner)

    def fingerprint(self) -> dict[str, object]:
        """Everything that the programs of the last stage depend on, or of the only one, on a device of this process."""
        stage, mesh = self.stages[-1], _own(self.meshes)
        return _fingerprint(self.config, self.model_config, stage, mesh, self.kernels, self.policy, self.features)


def _own(meshes: tuple[Mesh, ...]) -> Mesh:
    """The first of these with devices of this process."""
    return next(mesh for mesh in meshes if mesh.local_devices)


def _fingerprint(
    config: EngineConfig,
    model_config: ModelConfig,
    stage: Stage,
    mesh: Mesh,
    kernels: Kernels,
    policy: KernelPolicy,
    features: Features,
) -> dict[str, object]:
    found = {**fingerprint(config, model_config, stage.model, mesh, stage.plan, kernels, policy), **features.described}
    if config.parallel.num_ranks > 1:
        found["ranks"] = config.parallel.num_ranks
    is_whole = len(stage.layers) == model_config.num_layers
    return found if is_whole else {**found, "layers of the stage": [stage.layers.start, stage.layers.stop]}


def _drafter_bytes(drafter: Drafter | None, config: EngineConfig, model: ModelConfig) -> int:
    """Bytes on each device of a drafter's weights, and of what it keeps of all rows."""
    if drafter is None:
        return 0
    assert config.scheduler.max_num_seqs is not None
    wanted = config.model.max_model_len
    max_len = model.max_position if wanted in (None, AUTO_MODEL_LEN) else wanted
    num_rows = config.scheduler.max_num_seqs + 1
    state = jax.eval_shape(partial(drafter.new_state, num_rows, max_len))
    kept = jax.tree.leaves((state, kept_logits(drafter, num_rows, model.padded_vocab_size)))
    num_kept_bytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in kept)
    topology = Topology.of(config.parallel)
    return num_kept_bytes + (0 if drafter.model is None else weight_bytes(drafter.model, topology.tensor, topology.data))


def _adapter_bytes(features: Features, stage: CausalLM, num_devices: int) -> int:
    """Bytes on each device of a stage's slots of adapters, and of its part of an adapter that is being copied to one."""
    adaptation = None if features.adaptation is None else features.adaptation.of_stage(stage)
    if adaptation is None:
        return 0
    return weight_bytes(adaptation.model, num_devices) + adaptation.packed_size * jnp.dtype(adaptation.dtype).itemsize


def lay_out(
    config: EngineConfig, model: ModelConfig, make_plan: Callable[..., MemoryPlan], features: Features = NO_FEATURES
) -> tuple[Stage, ...]:
    """The stages of an engine, one without a pipeline.

    make_plan: takes weight_bytes, widened, and drafter or layers as `memory_plan` does.
    Raises ConfigError for layers that cannot be divided so.
    """
    topology = Topology.of(config.parallel)
    size = topology.tensor

    def plan_of(part: CausalLM, layers: range) -> MemoryPlan:
        num_bytes = weight_bytes(part, size, topology.data) + _adapter_bytes(features, part, size)
        num_bytes += memory_bytes(config, model, part)
        widened = Widened.of(part)
        if len(layers) < model.num_layers:
            return make_plan(weight_bytes=num_bytes, widened=widened, layers=layers)
        num_bytes += _drafter_bytes(features.drafter, config, model)
        return make_plan(weight_bytes=num_bytes, widened=widened, drafter=features.drafter)

    return make_stages(config, model, plan_of)


def _plan(
    config: EngineConfig,
    model: ModelConfig,
    policy: KernelPolicy,
    *,
    weight_bytes: int,
    widened: Widened,
    work_bytes: int | None = None,
    drafter: Drafter | None = None,
    layers: range | None = None,
) -> MemoryPlan:
    """Make and check the memory plan. With a compiled artifact, the cache has the size that its programs expect, if it fits."""
    make = partial(
        memory_plan,
        model=model,
        weight_bytes=weight_bytes,
        widened=widened,
        work_bytes=work_bytes,
        drafter=drafter,
        layers=layers,
        policy=policy,
    )
    plan = make(config)
    artifact, options = config.compile.compiled_artifact, config.cache
    if artifact is not None and options.num_gpu_blocks_override is None and options.kv_cache_memory_bytes is None:
        num_blocks = read_manifest(Path(artifact)).get("num_gpu_blocks")
        if isinstance(num_blocks, int) and num_blocks <= plan.num_blocks:
            plan = make(config.replace(num_gpu_blocks_override=num_blocks))
    plan.check()
    return plan


def _runner(
    config: EngineConfig,
    model_config: ModelConfig,
    meshes: tuple[Mesh, ...],
    stages: tuple[Stage, ...],
    kernels: Kernels,
    policy: KernelPolicy,
    processors: tuple[Processor, ...],
    times: StartTimes,
    features: Features,
) -> DeviceRunner:
    def store_of(stage: Stage, mesh: Mesh) -> ProgramStore | None:
        return _store(config, partial(_fingerprint, config, model_config, stage, mesh, kernels, policy, features), mesh)

    made_of = (config, model_config, stages, meshes, kernels, policy, processors, times, store_of)
    return make_runner(RunnerParts(*made_of, features.drafter, features.adaptation))


def _store(config: EngineConfig, made_of: Callable[[], Fingerprint], mesh: Mesh) -> ProgramStore | None:
    options, devices = config.compile, list(mesh.devices.flat)
    if options.compiled_artifact is not None:
        return open_artifact(Path(options.compiled_artifact), made_of(), devices)
    if options.compilation_cache and not has_other_hosts():  # a program for devices of several processes cannot be stored
        try:
            return local_store(env.cache_dir() / "engines", made_of(), devices)
        except ConfigError as error:
            logger.warning("%s", error)
    return None


def tell_of_widened_experts(models: Sequence[nnx.Module], dtype: str) -> None:
    """Log if products on a GPU widen the weights of experts in each step: of those that tokens choose, or of all, which is a warning."""
    if any(weight.format.widens_each for model in models for weight in weights(model)):
        logger.info("no kernel multiplies experts without a gate as they are stored: a step widens each that a token chooses")
    if any(Widened.of(model).experts for model in models):
        logger.warning(
            "each step widens the weights of all experts, because no kernel is chosen that multiplies them as they are stored: start with "
            "--dequantize if they fit into memory in %s, or on a Hopper GPU with --attention-implementation mosaic, which checks kernels",
            dtype,
        )


def weight_bytes(model: nnx.Module, num_devices: int, num_ranks: int = 1) -> int:
    """Bytes of the weights on each device of `num_ranks` data-parallel ranks with `num_devices` devices each."""
    sizes = {TENSOR: num_devices, DATA: num_ranks}
    return sum(
        math.prod(variable.shape) * jnp.dtype(variable.dtype).itemsize // num_parts(axes_of(variable), sizes)
        for _, variable in parameters(model)
    )


def resolve(config: EngineConfig, model_dir: Path) -> tuple[EngineConfig, ModelConfig, tuple[Mesh, ...]]:
    """Resolve a config for a model and this machine's devices: a mesh for each stage. Raises ConfigError if there are too few."""
    config, model_config = resolve_sizes(config, model_dir)
    return config, model_config, meshes_of(Topology.of(config.parallel))


def resolve_sizes(
    config: EngineConfig, model_dir: Path, *, device_bytes: int | None = None
) -> tuple[EngineConfig, ModelConfig]:
    """Resolve a config for a model and this machine's kind of device, whatever their number. device_bytes: resolve for GPUs on
    which the engine may use this much memory instead, and for whose kind kernels were verified."""
    is_here = device_bytes is None
    on_gpu = not is_here or backend() != "cpu"
    asked, topology = config, Topology.of(config.parallel)
    if device_bytes is None:
        device_bytes = device_limit(topology.num_devices)[1]
    model_config = load_model_config(
        model_dir,
        overrides=config.model.hf_overrides,
        dtype=config.model.dtype,
        on_gpu=on_gpu,
        quantization=config.model.quantization,
        dequantize=config.model.dequantize,
        kv_cache_dtype=config.cache.kv_cache_dtype,
        runner=config.model.runner,
        pooler_config=config.model.pooler_config,
        expert_parallel=config.parallel.enable_expert_parallel,
        max_model_len=None if config.model.max_model_len == AUTO_MODEL_LEN else config.model.max_model_len,
        model_class=config.model.model_class,
        language_model_only=config.multimodal.language_model_only,
    )
    if model_config.pooling.prompt_names:
        logger.info("prompts of the checkpoint, for clients to write before their texts: %s", model_config.pooling.prompt_names)
    if model_config.chosen_max_position is not None and config.model.max_model_len in (None, AUTO_MODEL_LEN):
        logger.warning(
            "requests may have up to %d tokens, all of which layers attend to; --max-model-len, up to %d, makes them choose tokens or "
            "attend within chunks of longer ones, in programs that have not run on GPUs",
            *(model_config.max_position, model_config.chosen_max_position),
        )
    config = resolve_platform_defaults(config, on_gpu=on_gpu, device_bytes=device_bytes, is_mixture=bool(model_config.mixtures))
    for chunk in {part.chunk for part in model_config.attentions} - {None}:
        if chunk % config.cache.block_size:  # type: ignore[operator]
            raise ConfigError(
                f"block_size is {config.cache.block_size}, must divide the {chunk} tokens of a chunk, within which layers attend; give a "
                f"block_size that does, or --max-model-len {chunk} or less"
            )
    if model_config.encoder is not None:
        encoders.check_options(config, model_config)
        config = encoders.with_whole_prompts(config, model_config, asked=asked, on_gpu=on_gpu)
    check_backend(config, model_config)
    model_config = _split(_with_redundant_experts(config, model_config), topology.tensor)
    options = config.compile
    is_checked = options.kernel_check != "off"
    if wants_tiles(options.attention_implementation, model_config, on_gpu=on_gpu, is_checked=is_checked, is_here=is_here):
        if not is_here and config.model.dequantize is None and model_config.without_kernels() != model_config:
            logger.info("planned for GPUs with kernels for weights in 8 bits (Hopper); for others add --dequantize")
        model_config = model_config.in_tiles()
    elif on_gpu and config.model.dequantize is None:
        model_config = model_config.without_kernels()
    config = config.replace(
        attention_implementation=attention_implementation(
            config.compile.attention_implementation,
            model_config,
            config.cache.block_size,
            on_gpu=on_gpu,
            has_part=topology.context > 1 or model_config.attends_within_images,
        ),
        runner="generate" if model_config.generates else "pooling",
        enable_prefix_caching=_prefix_caching(config, model_config),
        expert_load=counts_experts(config, model_config),
        share_layers=shares_layers(config, model_config, on_gpu=on_gpu),
    )
    if asked.scheduler.max_num_seqs is None:
        config = _with_room_for_states(config, model_config, device_bytes)
    config = with_prefill_limit(config, model_config, asked=asked, device_bytes=device_bytes if on_gpu else 0)
    scheduler = config.scheduler
    assert scheduler.max_num_seqs is not None and scheduler.max_num_batched_tokens is not None
    if scheduler.max_num_batched_tokens < scheduler.max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens is {scheduler.max_num_batched_tokens}, less than max_num_seqs {scheduler.max_num_seqs}; "
            "each running request needs a token a step: raise --max-num-batched-tokens or lower --max-num-seqs"
        )
    return config, model_config


def _prefix_caching(config: EngineConfig, model: ModelConfig) -> bool:
    """Whether equal prompt beginnings are computed once. Raises ConfigError if it is asked for and the engine cannot."""
    asked = config.cache.enable_prefix_caching
    if model.encoder is not None:
        return False
    if not row_bytes(model):
        return asked is not False
    reason = _why_no_prefix_states(config, model)
    if config.kv_transfer.kv_role is not None and not model.attends_to_audio:
        _check_hand_over(config, f"{model.architecture} {_BY_ROW}")
        return True
    if asked and reason is not None:
        raise ConfigError(
            f"enable_prefix_caching is set, but {model.architecture} {reason}; leave the option out, or use --no-enable-prefix-caching"
        )
    if config.cache.kv_offloading_size:
        way_out = (
            "" if model.attends_to_audio else ", or set kv_role to pass whole prompts from a prefill engine to a decode engine"
        )
        raise ConfigError(
            f"kv_offloading_size is {config.cache.kv_offloading_size}, but {model.architecture} {reason or _BY_ROW}: no prefix of it is "
            f"kept in host memory; leave the option out{way_out}"
        )
    if asked is None and reason is not None:
        logger.info("prefix caching is off: %s %s", model.architecture, reason)
    return asked is not False and reason is None


def _why_no_prefix_states(config: EngineConfig, model: ModelConfig) -> str | None:
    """Why prefixes of a model with states by row cannot be continued, behind the name of the model; None: they can."""
    if model.attends_to_audio:
        return "attends to audio, which is encoded with each prompt"
    excluded = {
        "pipeline_parallel_size": config.parallel.pipeline_parallel_size > 1 and "its stages keep states apart from blocks",
        "data_parallel_size": config.parallel.num_ranks > 1 and "data-parallel ranks copy no states",
        "enable_chunked_prefill": not config.scheduler.enable_chunked_prefill and "states are kept between chunks of a prompt",
    }
    for name, told in excluded.items():
        if told:
            return f"{_BY_ROW}, and {told} ({name})"
    try:
        assert whole_cache(config, model).state_blocks
    except ConfigError as error:
        return f"{_BY_ROW}, and {error}"
    return None


def _check_hand_over(config: EngineConfig, reason: str) -> None:
    """Raise ConfigError for options of an engine with a role that states by row exclude: they come with whole prompts alone."""
    excluded = {
        "kv_offloading_disk": config.cache.kv_offloading_disk,
        "kv_transfer_config": KVTransferConfig.of(config.cache.kv_transfer_config).is_own,
        "kv_events_config": KVEventsConfig.of(config.observe.kv_events_config).publishes,
    }
    if names := [name for name, is_set in excluded.items() if is_set]:
        raise ConfigError(
            f"{' and '.join(names)} would keep or tell prefixes of prompts, but {reason}: prefill engines pass on whole prompts alone; "
            "leave it out"
        )
    if not config.scheduler.enable_chunked_prefill and config.kv_transfer.is_prefill:
        raise ConfigError(
            f"enable_chunked_prefill is off, but {reason}: a prefill engine takes its states between two chunks; leave it on"
        )


def _with_redundant_experts(config: EngineConfig, model: ModelConfig) -> ModelConfig:
    """The model with the copies of experts that eplb_config asks for. Raises ConfigError for more than the devices can use."""
    options = config.parallel
    if not options.enable_eplb:
        return model
    count, size = EplbConfig.of(options.eplb_config).num_redundant_experts, Topology.of(options).expert
    most = min(part.routing.num_experts for part in model.mixtures) * (size - 1)
    if count > most:
        raise ConfigError(
            f"eplb_config.num_redundant_experts is {count}, but {most} fill {size} devices with every expert of {model.architecture}; "
            "lower it"
        )

    def part(layer: Layer) -> Layer:
        return replace(layer, mlp=replace(layer.mlp, num_redundant=count)) if isinstance(layer.mlp, MoE) else layer

    return replace(model, layers=tuple(map(part, model.layers)))


def counts_experts(config: EngineConfig, model: ModelConfig) -> bool:
    """Whether the tokens of each expert are counted. Raises ConfigError if that is asked for and the model has none."""
    asked, options = config.observe.expert_load, config.parallel
    own_class = model.model_class == ModelConfig.model_class
    if asked and not model.mixtures:
        raise ConfigError(f"expert_load is set, but {model.architecture} has no experts; leave it out")
    if (asked or options.enable_eplb) and not own_class:
        name = "enable_eplb" if options.enable_eplb else "expert_load"
        raise ConfigError(
            f"{name} is set, but {model.architecture} is computed by {model.model_class}, and only jaxllm's own decoder counts tokens of "
            "experts; leave it out"
        )
    if asked is not None:
        return asked
    if options.enable_eplb:
        return True
    is_distributed = Topology.of(options).expert > 1 and not has_stages_on_hosts(options.nnodes, options.pipeline_parallel_size)
    return is_distributed and own_class and registered.EXPERT_LOAD is not None


def _with_room_for_states(config: EngineConfig, model: ModelConfig, device_bytes: int) -> EngineConfig:
    """The default of max_num_seqs, lowered so that the states of all rows take at most _STATES_FRACTION of the device's memory."""
    wanted, bytes_of_row = config.scheduler.max_num_seqs or 1, row_bytes(model) // Topology.of(config.parallel).tensor
    most = int(_STATES_FRACTION * device_bytes) // bytes_of_row - 1 if bytes_of_row else wanted
    if most >= wanted:
        return config
    most = max(1, most // 8 * 8 or most)
    logger.info(
        "max_num_seqs is %d instead of %d: each running request has %.1f MiB of states on a device; --max-num-seqs sets another number",
        *(most, wanted, bytes_of_row / 2**20),
    )
    return config.replace(max_num_seqs=most)


def _split(model_config: ModelConfig, num_devices: int) -> ModelConfig:
    """`for_tensor_parallel`; logs what cannot stay in its format."""
    split = model_config.for_tensor_parallel(num_devices)
    for format in model_config.formats:
        if told := format.indivisible(model_config, num_devices):
            logger.warning("%s", told)
    return split


def backend() -> str:
    """The kind of device that JAX found. Raises ConfigError if JAX cannot use the configured kind."""
    try:
        return jax.default_backend()
    except Exception as error:  # a missing plugin or a broken driver raises various types
        if is_out_of_memory(error):
            raise OutOfMemoryError(f"JAX cannot start: {explain(error)}") from error
        asked = os.environ.get("JAX_PLATFORMS")
        raise ConfigError(
            f"JAX finds no device{f' for JAX_PLATFORMS={asked}' if asked else ''} "
            f"({(str(error) or type(error).__name__).splitlines()[0]}); unset JAX_PLATFORMS, or install jaxllm[cuda12] or "
            "jaxllm[cuda13] for a GPU; `jaxllm env` tells what is there"
        ) from error
