"""The tiny checkpoints in tests/goldens with what transformers computed for them, and plain ways to run a model."""

import functools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from jaxllm.layers.build import build_model
from jaxllm.layers.dense_attention import dense_step
from jaxllm.loaders import safetensors
from jaxllm.loaders.load import load_weights
from jaxllm.model_config import ModelConfig
from jaxllm.models.load_config import load_model_config, read_config_json
from jaxllm.parallel.mesh import make_mesh
from scripts.saving import save_safetensors, write_safetensors

FOLDER = Path(os.environ.get("JAXLLM_GOLDENS") or Path(__file__).parent.parent / "goldens")
NAMES = tuple(sorted(path.parent.name for path in FOLDER.glob("*/golden.json")))


@dataclass(frozen=True)
class Result:
    """One prompt and what followed greedily."""

    prompt: list[int]
    prompt_logprobs: list[float]
    """Logprobs of prompt[1:]."""
    tokens: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Golden:
    directory: Path
    first_prompt_logits: np.ndarray
    results: list[Result]


@functools.cache
def golden(name: str) -> Golden:
    values = json.loads((FOLDER / name / "golden.json").read_text(encoding="utf-8"))
    return Golden(FOLDER / name, np.array(values["first_prompt_logits"], np.float32), [Result(**r) for r in values["results"]])


def of_one_layer(golden: str, directory: Path) -> Path:
    """The first layer of a golden as a checkpoint: engines of it compile half as much."""
    return of_layers(golden, directory, [0])


def of_layers(golden: str, directory: Path, layers: Sequence[int]) -> Path:
    """Some layers of a golden as a checkpoint."""
    source = safetensors.Checkpoint(FOLDER / golden)
    tensors = {}
    for name in source.entries:
        before, is_layer, after = name.partition(".layers.")
        number, _, rest = after.partition(".")
        if not is_layer:
            tensors[name] = source.tensor(name)
        elif int(number) in layers:
            tensors[f"{before}.layers.{layers.index(int(number))}.{rest}"] = source.tensor(name)
    directory.mkdir(parents=True, exist_ok=True)
    write_safetensors(directory / "model.safetensors", tensors)
    config = json.loads((FOLDER / golden / "config.json").read_text())
    kinds = {"layer_types": [config["layer_types"][layer] for layer in layers]} if "layer_types" in config else {}
    (directory / "config.json").write_text(json.dumps(config | kinds | {"num_hidden_layers": len(layers)}))
    return directory


def load(directory: Path, *, tensor_parallel_size: int = 1, load_format: str = "auto") -> tuple[ModelConfig, nnx.State]:
    """A checkpoint in float32 on the first devices."""
    config = load_model_config(directory, max_model_len=112).for_tensor_parallel(tensor_parallel_size)
    mesh = make_mesh(tensor_parallel_size)
    return config, load_weights(config, build_model(config), directory, load_format=load_format, mesh=mesh)


def save(config: ModelConfig, state: nnx.State, directory: Path, source: Path) -> None:
    """Save a checkpoint that was read from `source`."""
    save_safetensors(config, state, directory, read_config_json(source))


def logits(config: ModelConfig, state: nnx.State, token_ids: list[int], *, pad_to: int | None = None) -> np.ndarray:
    """[T, V] of one sequence by dense attention; padding after it saves compilations."""
    length = max(pad_to or 0, len(token_ids))
    padded = np.zeros(length, np.int32)
    padded[: len(token_ids)] = token_ids
    return np.asarray(_forward(config)(state, padded, np.arange(length, dtype=np.int32))[1])[: len(token_ids)]


def hidden(config: ModelConfig, state: nnx.State, token_ids: list[int], *, pad_to: int) -> np.ndarray:
    """[T, D] after the last norm, the same way."""
    padded = np.zeros(pad_to, np.int32)
    padded[: len(token_ids)] = token_ids
    return np.asarray(_forward(config)(state, padded, np.arange(pad_to, dtype=np.int32))[0])[: len(token_ids)]


@functools.cache
def _forward(config: ModelConfig):
    """Hidden states, and logits of a model that has them."""
    graph = nnx.graphdef(build_model(config))

    @jax.jit
    def forward(state, token_ids_T, positions_T):
        model = nnx.merge(graph, state)
        hidden_TD = model(dense_step(token_ids_T, positions_T))
        return hidden_TD, model.logits(hidden_TD) if config.generates else None

    return forward
