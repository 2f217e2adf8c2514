"""Checkpoints with quantised weights, made of the goldens, and what engines and plain models make of them."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from jaxllm import LLM, SamplingParams
from jaxllm.layers.build import build_model
from jaxllm.layers.parameters import parameters
from jaxllm.loaders import safetensors
from jaxllm.loaders.load import load_weights
from jaxllm.models.load_config import load_model_config
from jaxllm.parallel.mesh import make_mesh
from scripts.saving import write_safetensors
from tests.helpers import engines, goldens

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LINEAR += ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "in_proj_qkvz", "in_proj_ba", "out_proj")
LINEAR += ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
PROMPT = list(range(3, 19))


def write(
    directory: Path,
    quantization_config: Any,
    quantize: Callable[[str, np.ndarray], Mapping[str, np.ndarray]],
    *,
    golden: str = "llama_gqa",
    more: Mapping[str, np.ndarray] | None = None,
    also: tuple[str, ...] = (),
) -> Path:
    """A copy of a golden in which `quantize(name, weight)` gives the tensors of each linear layer's weight, and of those in `also`."""
    directory.mkdir(parents=True, exist_ok=True)
    source = safetensors.Checkpoint(goldens.FOLDER / golden)
    tensors: dict[str, np.ndarray] = {}
    for name in source.entries:
        is_linear = name.endswith(".weight") and name.split(".")[-2] in (*LINEAR, *also)
        tensors |= quantize(name, np.asarray(source.tensor(name), np.float32)) if is_linear else {name: source.tensor(name)}
    write_safetensors(directory / "model.safetensors", tensors | dict(more or {}))
    config = json.loads((goldens.FOLDER / golden / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": quantization_config}))
    return directory


def words(codes: np.ndarray, bits: int) -> np.ndarray:
    """int32 [N, ceil(K · bits / 32)] of codes [N, K], the first in the lowest bits."""
    per_word = 32 // bits
    padded = np.pad(codes.astype(np.uint32), ((0, 0), (0, -codes.shape[1] % per_word)))
    shifted = padded.reshape(len(codes), -1, per_word) << np.arange(0, 32, bits, dtype=np.uint32)
    return shifted.sum(-1, dtype=np.uint32).view(np.int32)


def rounded(
    weight: np.ndarray, bits: int = 4, group: int | None = 32, symmetric: bool = True, scale_type: Any = ml_dtypes.bfloat16
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(codes, scale, zero) of a weight, by group."""
    values = weight.reshape(len(weight), -1, group or weight.shape[1])
    most = 2**bits - 1
    if symmetric:
        scale, zero = np.abs(values).max(-1, keepdims=True) / (most / 2), np.full((*values.shape[:2], 1), 2.0 ** (bits - 1))
    else:
        low, high = np.minimum(values.min(-1, keepdims=True), 0), np.maximum(values.max(-1, keepdims=True), 0)
        scale = (high - low) / most
        zero = np.round(-low / scale)
    scale = scale.astype(scale_type)
    codes = np.clip(np.round(values / scale.astype(np.float32)) + zero, 0, most)
    return codes.astype(np.uint8), scale, zero.astype(np.uint8)


def load(
    directory: Path, *, tensor_parallel_size: int = 1, load_format: str = "auto", in_lanes: bool = False, **options: Any
) -> Any:
    """(config, state) of a checkpoint in float32 on the first devices. in_lanes: as an engine on a CPU has it. options: of
    `load_model_config`."""
    config = load_model_config(directory, **options).for_tensor_parallel(tensor_parallel_size)
    config = config.in_lanes() if in_lanes else config
    mesh = make_mesh(tensor_parallel_size)
    return config, load_weights(config, build_model(config), directory, load_format=load_format, mesh=mesh)


def by_path(state: Any) -> dict[str, np.ndarray]:
    """The arrays of a state by name, as float32."""
    return {".".join(map(str, path)): np.asarray(variable[...], np.float32) for path, variable in parameters(state)}


def assert_equal(a: Any, b: Any) -> None:
    """Two states have the same arrays, but for the last bits."""
    a, b = by_path(a), by_path(b)
    assert a.keys() == b.keys()
    for name, array in a.items():
        np.testing.assert_allclose(array, b[name], rtol=1e-6, err_msg=name)


def assert_near(directory: Path, plain: Path, *, tensor_parallel_size: int = 1, limit: float = 1e-4, **options: Any) -> None:
    """A checkpoint's logits are those of a plain one with the widened weights, but for the order of sums."""
    found = goldens.logits(*load(directory, tensor_parallel_size=tensor_parallel_size, **options), PROMPT)
    wanted = goldens.logits(*load(plain), PROMPT)
    np.testing.assert_allclose(found[:, : wanted.shape[1]], wanted, atol=limit)


def assert_answers(directory: Path, plain: Path, **options: Any) -> None:
    """An engine's answer is that of a plain checkpoint with the widened weights, by dense attention. options: of the engine."""
    assert_answered(answer(directory, **options), load(plain))


def assert_answered(found: tuple[list[int], np.ndarray], model: Any) -> None:
    """Tokens and logprobs, as of `answer`, are those of (config, state) by dense attention."""
    tokens, logprobs = found
    logits = goldens.logits(*model, PROMPT + tokens)
    assert tokens == np.argmax(logits[len(PROMPT) - 1 : -1], -1).tolist()
    wanted = np.asarray(jax.nn.log_softmax(logits, -1))[np.arange(len(logits) - 1), [*PROMPT, *tokens][1:]]
    np.testing.assert_allclose(logprobs, wanted[: len(logprobs)], atol=1e-4)


def answer(directory: Path, *, num_tokens: int = 8, **options: Any) -> tuple[list[int], np.ndarray]:
    """An engine's answer to PROMPT: the tokens of greedy steps, and logprobs of the prompt's tokens and of these; of a single token
    none, so that kernels that draw are not compiled. options: of the engine."""
    llm = LLM(str(directory), **{**engines.SMALL, **options})
    logprobs = 0 if num_tokens > 1 else None
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, prompt_logprobs=0, logprobs=logprobs)
    [output] = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
    tokens = list(output.outputs[0].token_ids)
    entries = [*output.prompt_logprobs[1:], *(output.outputs[0].logprobs or ())]
    llm.shutdown()
    return tokens, np.array([entry[token].logprob for entry, token in zip(entries, PROMPT[1:] + tokens, strict=num_tokens > 1)])
