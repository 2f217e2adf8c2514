"""Plans the memory of the stages of an engine, one without a pipeline."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from jaxllm.config import AUTO_MODEL_LEN, EngineConfig
from jaxllm.engine.features import NO_FEATURES, Features
from jaxllm.engine.parallel_backends import make_stages
from jaxllm.kernel_policy import KernelPolicy
from jaxllm.layers.build import Widened
from jaxllm.layers.decoder import CausalLM
from jaxllm.layers.parameters import axes_of, parameters
from jaxllm.model_config import ModelConfig
from jaxllm.parallel.axes import num_parts
from jaxllm.parallel.mesh import DATA, TENSOR
from jaxllm.parallel.topology import Topology
from jaxllm.runner.drafter import Drafter, kept_logits
from jaxllm.runner.features import memory_bytes
from jaxllm.runner.memory import (
    MemoryPlan,
    memory_plan,
)
from jaxllm.runner.program_store import read_manifest
from jaxllm.runner.stage import Stage


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


def checked_plan(
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


def weight_bytes(model: nnx.Module, num_devices: int, num_ranks: int = 1) -> int:
    """Bytes of the weights on each device of `num_ranks` data-parallel ranks with `num_devices` devices each."""
    sizes = {TENSOR: num_devices, DATA: num_ranks}
    return sum(
        math.prod(variable.shape) * jnp.dtype(variable.dtype).itemsize // num_parts(axes_of(variable), sizes)
        for _, variable in parameters(model)
    )
