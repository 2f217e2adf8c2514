"""Dense layers whose gate and up the op `gated_matmul` computes, against the same layers without it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm.kernel_policy import ALIKE, GATED_ROWS
from jaxllm.layers import mlp
from jaxllm.layers.build import build_model
from jaxllm.layers.dense_attention import dense_step
from jaxllm.loaders.load import load_weights
from jaxllm.models.load_config import load_model_config
from jaxllm.parallel.mesh import make_mesh
from tests.helpers import goldens

THRESHOLDS = "min_gated_tokens", "min_scaled_gated_tokens"
IDS = np.arange(GATED_ROWS, dtype=np.int32) % 50 + 3


def hidden_states(name: str, quantization: str | None, min_tokens: int) -> tuple[np.ndarray, list[tuple[str, tuple[int, ...]]]]:
    """Output of the last layer, and the calls of the op: activations and shapes of weights."""
    directory, calls = goldens.FOLDER / name, []

    def multiply(x_TD, *weight, activation):
        calls.append((activation, weight[0].shape))
        return mlp.multiply_gated(x_TD, *weight, activation=activation, implementation="xla")

    config = load_model_config(directory, dtype="bfloat16" if quantization else "float32", quantization=quantization)
    model = build_model(config)
    state = load_weights(config, model, directory, mesh=make_mesh(1), load_format="auto")
    graph, policy = nnx.graphdef(model), dataclasses.replace(ALIKE, **dict.fromkeys(THRESHOLDS, min_tokens))

    def run(state):
        step = dense_step(jnp.asarray(IDS), jnp.arange(len(IDS)))
        by_kernels = {"multiply_gated": multiply, "quantization": {"implementation": "xla"} if quantization == "fp8" else None}
        return nnx.merge(graph, state)(dataclasses.replace(step, policy=policy, **by_kernels))

    return np.asarray(jax.jit(run)(state), np.float32), calls


@pytest.mark.parametrize(
    ("name", "activation", "num_calls"),
    [("llama_gqa", "silu", 2), ("gpt2", None, 0), ("gemma3", "gelu_tanh", 4), ("deepseek_v2", "silu", 3)],
)
def test_layers_give_what_they_give_without_the_op(name, activation, num_calls):
    by_op, calls = hidden_states(name, None, len(IDS))
    apart, none = hidden_states(name, None, len(IDS) + 1)
    assert not none and [call[0] for call in calls] == [activation] * num_calls
    assert np.abs(by_op - apart).max() <= 2e-5 * np.abs(apart).max()


def test_layers_that_quantise_what_they_multiply_do_so_behind_the_op():
    by_op, calls = hidden_states("llama_gqa", "fp8", len(IDS))
    apart, _ = hidden_states("llama_gqa", "fp8", len(IDS) + 1)
    exact, _ = hidden_states("llama_gqa", None, len(IDS) + 1)
    assert calls == [("silu", (2, 96, 64))] * 2
    assert np.linalg.norm(by_op - exact) < 1.02 * np.linalg.norm(apart - exact)  # sums are not rounded before the activation


def test_quantised_weights_are_left_to_their_own_products():
    assert not hidden_states("llama_gqa", "int8", 1)[1]
