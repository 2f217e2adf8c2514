"""Copies blocks of the KV cache to host memory and back, as operations of plans, for tiers of the prefix cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError
from jaxllm.layers.decoder import CausalLM
from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import Attention, LatentAttention, Layer, StateMixer
from jaxllm.parallel.mesh import context_size, tensor_size
from jaxllm.parallel.topology import Topology
from jaxllm.runner.block_format import BlockFormat
from jaxllm.runner.features.block_copies.arena import Arena, check_memory, check_total, slot_bytes
from jaxllm.runner.features.block_copies.copier import LOAD_BUFFERS, BlockCopier
from jaxllm.runner.features.block_copies.programs import STAGING_BYTES, Gather, Scatter, staging_bytes
from jaxllm.runner.host_plan import HostPlan
from jaxllm.runner.memory import MemoryPlan, device_limit, whole_cache
from jaxllm.runner.programs.kind import ProgramKind
from jaxllm.runner.step_feature import FeatureParts, StepFeature

MIN_BUFFERS, MAX_BUFFERS = 4, 16
"""Fewest and most staging buffers."""
_SHARE = 0.02
"""Largest share of a device's memory, for more than the fewest."""
_BUFFERS_BESIDE = LOAD_BUFFERS + 1
"""Buffers in addition to those for the blocks of a step, for loads and for stores of blocks that leave unforeseen."""


@dataclass(frozen=True)
class BlockCopies(StepFeature):
    """The sizes of copies."""

    num_copies: int
    """See BlockFormat."""
    arena_bytes: int
    """Host memory for contents."""
    buffer_bytes: int
    """Memory on each device for all staging buffers."""
    is_shared: bool = False
    """See Arena."""

    def programs(self) -> Sequence[ProgramKind]:
        gather = Gather(self.num_copies)
        return [gather, Scatter(self.num_copies)] if jax.default_backend() == "cpu" else [gather]

    def op_runner(self, device: Any) -> BlockCopier:
        mesh = device.shapes.mesh
        format = BlockFormat.of(device.shapes.cache, tensor_size(mesh), self.num_copies, context_size(mesh))
        num_buffers = _num_buffers(format, self.buffer_bytes)
        return BlockCopier(device, format, self.arena_bytes, num_buffers, is_shared=self.is_shared)


def _num_buffers(format: BlockFormat, num_bytes: int) -> int:
    """Staging buffers in so much memory of a device."""
    return max(MIN_BUFFERS, min(MAX_BUFFERS, num_bytes // staging_bytes(format)))


def _num_copies(layers: Sequence[Layer]) -> int:
    """Devices that have the same heads of all these layers, or the same latents; 1 if layers differ."""
    copies = set()
    for layer in layers:
        match layer.attention:
            case Attention() as attention:
                copies.add(attention.kv_head_replicas)
            case LatentAttention() as attention:
                copies.add(attention.copies)
            case mixer if isinstance(mixer, StateMixer):  # blocks hold the states of all heads too
                copies.add(1)
    return copies.pop() if len(copies) == 1 else 1


def _buffer_bytes(config: EngineConfig, model_config: ModelConfig, limit: int) -> int:
    """Memory on each device for all staging buffers, where the engine may use `limit` bytes. Blocks are read between steps, and a step may
    evict as many as it fills: with fewer buffers, some would be lost where nothing comes back from the prefix cache."""
    cache, topology = whole_cache(config, model_config), Topology.of(config.parallel)
    num_blocks = len(cache.groups) * -(-config.scheduler.max_step_tokens // cache.block_size)
    of_step = num_blocks * cache.block_bytes // topology.stage_devices + _BUFFERS_BESIDE * STAGING_BYTES
    return max(MIN_BUFFERS * STAGING_BYTES, min(of_step, MAX_BUFFERS * STAGING_BYTES, int(_SHARE * limit)))


def _limit(config: EngineConfig) -> int:
    return device_limit(Topology.of(config.parallel).num_devices)[1]


def _engine_bytes(config: EngineConfig) -> int:
    """Host memory of one engine."""
    return int((config.cache.kv_offloading_size or 0) * 2**30) // config.parallel.num_replicas


def memory_bytes(config: EngineConfig, model_config: ModelConfig, model: CausalLM) -> int:
    """Bytes on each device of the staging buffers."""
    return _buffer_bytes(config, model_config, _limit(config)) if config.cache.kv_offloading_size else 0


def host_plan(config: EngineConfig, model_config: ModelConfig, plan: MemoryPlan) -> HostPlan | None:
    """Plan the host memory for blocks, given the plan of the devices' memory; None: host memory is off."""
    if not config.cache.kv_offloading_size:
        return None
    topology = Topology.of(config.parallel)
    format = BlockFormat.of(plan.cache, topology.tensor, _num_copies(model_config.layers), topology.context)
    num_bytes, fault = _engine_bytes(config), None
    try:
        Arena(num_bytes, format)
        check_machine(config)
    except ConfigError as error:
        fault = error
    num_blocks = num_bytes // slot_bytes(format)
    num_tokens = num_blocks * plan.block_size // len(plan.cache.groups)
    staging = _num_buffers(format, _buffer_bytes(config, model_config, plan.limit_bytes)) * staging_bytes(format)
    return HostPlan(num_bytes, num_blocks, num_tokens, format.block_bytes, staging, fault)


def check_machine(config: EngineConfig) -> None:
    """Raise ConfigError if there is too little host memory."""
    if not (size := config.cache.kv_offloading_size):
        return
    if (num_engines := config.parallel.num_replicas) > 1:
        check_total(int(size * 2**30), num_engines)
    check_memory(_engine_bytes(config))


def make(parts: FeatureParts) -> StepFeature | None:
    """For engines that keep blocks in host memory."""
    if not parts.config.cache.kv_offloading_size:
        return None
    drafter = parts.beside["drafter"]
    layers = (*parts.model_config.layers, *(() if drafter is None else drafter.layers))
    num_bytes = _buffer_bytes(parts.config, parts.model_config, _limit(parts.config))
    is_shared = parts.config.kv_transfer.is_prefill
    return BlockCopies(_num_copies(layers), _engine_bytes(parts.config), num_bytes, is_shared=is_shared)
