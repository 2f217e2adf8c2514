"""Lists everything that an engine's compiled programs depend on. Engines with equal fingerprints can share programs."""

import dataclasses
import functools
import hashlib
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

import jaxllm
import pallas_kernels
from jaxllm.config import EngineConfig
from jaxllm.engine.model_source import describe_source
from jaxllm.layers.decoder import CausalLM
from jaxllm.model_config import ModelConfig
from jaxllm.runner.kernels import Kernels
from jaxllm.runner.memory import MemoryPlan

OPTIONS = (
    "runner",
    "max_logprobs",
    "logprobs_mode",
    "block_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "tensor_parallel_size",
    "prefill_context_parallel_size",
    "enable_expert_parallel",
    "expert_load",
    "decode_buckets",
    "token_buckets",
)
"""The options that shapes or programs depend on."""
_JAX_SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl", "jax_threefry_partitionable")
_PACKAGES = ("jax", "jaxlib", "flax")
_PLUGIN = "jax-cuda"
_WITHOUT_PROGRAMS = ("cli", "expert_load", "metrics", "scheduler", "text")


def fingerprint(
    config: EngineConfig, model_config: ModelConfig, model: CausalLM, mesh: Mesh, plan: MemoryPlan, kernels: Kernels
) -> dict[str, Any]:
    """The fingerprint by name, as JSON values. Omits custom logits processors: programs that contain them are never stored.

    Raises ConfigError for a model whose source is unknown.
    """
    device = mesh.local_devices[0]
    options = config.flat()
    return {
        "jaxllm version": f"{jaxllm.__version__} ({_source_digest()})",
        "model class": describe_source(model),
        **surroundings(device),
        **{name: options[name] for name in OPTIONS},
        "attention_implementation": kernels.attention,
        **{f"{op} implementation": name for op, name in kernels.by_op().items() if op != "paged_attention"},
        "max_model_len": plan.max_model_len,
        "num_gpu_blocks": plan.num_blocks,
        "groups and arrays of layers in the cache": [dataclasses.astuple(place) for place in plan.cache.places],
        **{f"model's {name}": value for name, value in model_config.described().items()},
    }


def versions() -> dict[str, str]:
    """The versions of the project and of the packages that programs depend on, by name."""
    packages = {f"{name} version": importlib.metadata.version(name) for name in _PACKAGES}
    plugins = {f"{name} version": version for name, version in _plugins()}
    return {"jaxllm version": f"{jaxllm.__version__} ({_source_digest()})", **packages, **plugins}


def surroundings(device: jax.Device) -> dict[str, Any]:
    """The environment that every compiled program depends on: device, versions and settings, by name, as JSON values."""
    return {
        **{f"{name} version": importlib.metadata.version(name) for name in _PACKAGES},
        **({f"{name} version": version for name, version in _plugins()} if device.platform != "cpu" else {}),
        "platform": device.platform,
        "platform version": device.client.platform_version,
        "device": device.device_kind,
        **({"processor": _processor()} if device.platform == "cpu" else {}),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        **{name: getattr(jax.config, name) for name in _JAX_SETTINGS},
    }


@functools.cache
def _source_digest() -> str:
    """A digest of the project's Python files, except folders that no program depends on: any change may change a program."""
    digest = hashlib.sha256()
    for package in (jaxllm, pallas_kernels):
        root = Path(str(package.__file__)).parent
        for path in sorted(root.rglob("*.py")):
            if path.relative_to(root).parts[0] in _WITHOUT_PROGRAMS:
                continue
            digest.update(f"{root.name}/{path.relative_to(root)}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


@functools.cache
def _plugins() -> list[tuple[str, str]]:
    """Name and version of JAX's CUDA packages, as far as installed."""
    found = {(d.metadata["Name"] or "").lower(): d.version for d in importlib.metadata.distributions()}
    return sorted((name, version) for name, version in found.items() if name.startswith(_PLUGIN))


def _processor() -> str:
    """The CPU model: machine code for one may use instructions that another lacks."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return f"{platform.machine()} ({hashlib.sha256(flags.encode()).hexdigest()[:12]})"
