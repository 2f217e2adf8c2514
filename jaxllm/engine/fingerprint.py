"""Lists everything that an engine's compiled programs depend on. Engines with equal fingerprints can share programs."""

import dataclasses
import hashlib
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

import jaxllm
from jaxllm.engine.features import Features
from jaxllm.engine.model_source import describe_source
from jaxllm.engine.versions import PACKAGES, plugins, source_digest
from jaxllm.runner.stage import RunnerParts, Stage

OPTIONS = (
    "runner",
    "max_logprobs",
    "logprobs_mode",
    "block_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_num_prefill_tokens",
    "tensor_parallel_size",
    "prefill_context_parallel_size",
    "enable_expert_parallel",
    "enable_eplb",
    "expert_load",
    "decode_buckets",
    "token_buckets",
    "share_layers",
)
"""The options that shapes or programs depend on."""
_JAX_SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl", "jax_threefry_partitionable")


def fingerprint(parts: RunnerParts, features: Features, stage: Stage, mesh: Mesh) -> dict[str, Any]:
    """The fingerprint by name, as JSON values. Omits custom logits processors: programs that contain them are never stored.

    Raises ConfigError for a model whose source is unknown.
    """
    model_config, kernels, plan = parts.model_config, parts.kernels, stage.plan
    options = parts.config.flat()
    found = {
        "jaxllm version": f"{jaxllm.__version__} ({source_digest()})",
        "model class": describe_source(stage.model),
        **surroundings(mesh.local_devices[0]),
        **{name: options[name] for name in OPTIONS},
        "attention_implementation": kernels.attention,
        **{f"{op} implementation": name for op, name in kernels.by_op().items() if op != "paged_attention"},
        **{f"kernel policy's {name}": value for name, value in dataclasses.asdict(parts.policy).items()},
        "max_model_len": plan.max_model_len,
        "num_gpu_blocks": plan.num_blocks,
        "groups and arrays of layers in the cache": [dataclasses.astuple(place) for place in plan.cache.places],
        **{f"model's {name}": value for name, value in model_config.described().items()},
        **features.described,
    }
    if parts.config.parallel.num_ranks > 1:
        found["ranks"] = parts.config.parallel.num_ranks
    if len(stage.layers) < model_config.num_layers:
        found["layers of the stage"] = [stage.layers.start, stage.layers.stop]
    return found


def surroundings(device: jax.Device) -> dict[str, Any]:
    """The environment that every compiled program depends on: device, versions and settings, by name, as JSON values."""
    return {
        **{f"{name} version": importlib.metadata.version(name) for name in PACKAGES},
        **({f"{name} version": version for name, version in plugins()} if device.platform != "cpu" else {}),
        "platform": device.platform,
        "platform version": device.client.platform_version,
        "device": device.device_kind,
        **({"processor": _processor()} if device.platform == "cpu" else {}),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        **{name: getattr(jax.config, name) for name in _JAX_SETTINGS},
    }


def _processor() -> str:
    """The CPU model: machine code for one may use instructions that another lacks."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return f"{platform.machine()} ({hashlib.sha256(flags.encode()).hexdigest()[:12]})"
