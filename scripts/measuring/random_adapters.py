"""Adapters of random values, in PEFT's format."""

import json
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jaxllm.lora.shapes import TargetShape


def write_adapter(directory: Path, targets: Mapping[str, TargetShape], rank: int, seed: int, *, scale: float = 0.02) -> Path:
    """Write an adapter of random values for all targets, in bfloat16, with this standard deviation. Returns the directory."""
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal(1 << 20, np.float32).astype(ml_dtypes.bfloat16)

    def random(*shape: int) -> np.ndarray:
        start = int(rng.integers(1 << 10))
        return np.resize(noise[start:], shape) * ml_dtypes.bfloat16(scale)

    tensors = {}
    for name, target in targets.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = random(rank, target.inputs)
        tensors[f"base_model.model.{name}.lora_B.weight"] = random(target.outputs, rank)
    directory.mkdir(parents=True)
    modules = sorted({name.rsplit(".", 1)[-1] for name in targets})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules, "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory
