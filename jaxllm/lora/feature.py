"""Adapters as the options of an engine ask for them."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from jax.sharding import Mesh

from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError
from jaxllm.layers.decoder import CausalLM
from jaxllm.lora.checkpoint import read_adapter
from jaxllm.lora.device import DeviceSlots
from jaxllm.lora.manager import Executor, LoRAManager, Ops
from jaxllm.lora.targets import last_name
from jaxllm.model_config import ModelConfig


@dataclass(frozen=True)
class LoRA:
    """See `jaxllm.engine.features.Adapters`."""

    config: EngineConfig
    adaptation: DeviceSlots

    @property
    def described(self) -> Mapping[str, Any]:
        """See Adapters."""
        slots = self.adaptation
        return {"slots": slots.num_slots, "rank": slots.rank, "dtype": slots.dtype, "modules": sorted(slots.names)}

    def new_manager(self, executor: Executor, ops: Ops) -> LoRAManager:
        """See Adapters."""
        slots, options = self.adaptation, self.config.lora
        reader = partial(
            read_adapter,
            targets=slots.targets,
            max_rank=options.max_lora_rank,
            rank=slots.rank,
            target_modules=options.lora_target_modules,
            left_out=slots.left_out,
            model=self.config.model.model,
        )
        return LoRAManager(slots, executor, ops, reader, max_host=options.max_cpu_loras)


def make_adapters(config: EngineConfig, model_config: ModelConfig, model: CausalLM, mesh: Mesh) -> LoRA:
    """For an engine with enable_lora. Raises ConfigError if adapters cannot change what the options name."""
    options = config.lora
    dtype = model_config.dtype if options.lora_dtype == "auto" else options.lora_dtype
    names = options.lora_target_modules
    slots = DeviceSlots(model, mesh, num_slots=options.max_loras, rank=options.padded_rank, dtype=dtype, names=names)
    if names is not None and (unknown := set(names) - {last_name(name) for name in slots.targets}):
        known = sorted({last_name(name) for name in (*slots.targets, *slots.left_out)})
        raise ConfigError(
            f"lora_target_modules has {sorted(unknown)[0]!r}, no module of {model_config.architecture} that adapters can change; "
            f"there are {', '.join(known)}"
        )
    return LoRA(config, slots)
