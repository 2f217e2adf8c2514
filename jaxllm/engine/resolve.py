"""Resolves the options of an engine for a model and the devices of this machine."""

import os
from dataclasses import replace
from pathlib import Path

import jax
from jax.sharding import Mesh

from jaxllm.cache_spec import row_bytes
from jaxllm.config import AUTO_MODEL_LEN, EngineConfig, resolve_platform_defaults
from jaxllm.device_errors import is_out_of_memory
from jaxllm.engine import encoders
from jaxllm.engine import features as registered
from jaxllm.engine.failures import explain
from jaxllm.engine.kernel_choice import attention_implementation, wants_tiles
from jaxllm.engine.parallel_backends import check_backend
from jaxllm.engine.step_sizes import with_prefill_limit
from jaxllm.errors import ConfigError, OutOfMemoryError
from jaxllm.kernel_policy import platform_policy
from jaxllm.log import logger
from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import Layer, MoE
from jaxllm.models.load_config import load_model_config
from jaxllm.options.eplb import EplbConfig
from jaxllm.options.hosts import has_stages_on_hosts
from jaxllm.options.kv_events import KVEventsConfig
from jaxllm.parallel.mesh import meshes_of
from jaxllm.parallel.topology import Topology
from jaxllm.runner.memory import (
    device_limit,
    whole_cache,
)
from jaxllm.runner.shared_layers import shares_layers
from jaxllm.vllm_compat.kv_connectors import KVTransferConfig

_STATES_FRACTION = 0.25
"""Largest fraction of the device's memory for states by row with the default of max_num_seqs."""
_BY_ROW = "has layers with linear attention or other states by row, which sum up a whole prompt"
"""Description of models in messages, behind their names."""


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
        quantize_lm_head=config.model.quantize_lm_head,
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
    config = _with_fast_decodes(config, on_gpu=on_gpu)
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
    elif not on_gpu:
        model_config = model_config.in_lanes()
    elif config.model.dequantize is None:
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


def _with_fast_decodes(config: EngineConfig, *, on_gpu: bool) -> EngineConfig:
    """No decode sizes below the least that is fast."""
    sizes, least = config.compile.decode_buckets, platform_policy(on_gpu=on_gpu).least_rows
    if sizes is None or min(sizes) >= least:
        return config
    logger.warning(
        "decode_buckets has %d: steps of fewer than %d rows run as ones of %d, because XLA turns products of so few into sums, which are "
        "slower on this device",
        *(min(sizes), least, least),
    )
    return config.replace(decode_buckets=tuple(sorted({max(size, least) for size in sizes})))


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
        "kv_offloading_write": config.cache.kv_offloading_write != "cold",
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
