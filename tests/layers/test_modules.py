import dataclasses
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm.layers.build import build_model
from jaxllm.layers.dense_attention import dense_step
from jaxllm.layers.embedding import Embedding
from jaxllm.layers.linear import Linear
from jaxllm.layers.mlp import gelu
from jaxllm.layers.norm import Normalization
from jaxllm.layers.source import Module
from jaxllm.model_parts import Norm
from jaxllm.models.load_config import load_model_config
from scripts.demo_data.initial_weights import init_params
from tests.helpers import goldens


def with_values(module: nnx.Module, *values) -> nnx.Module:
    """Fill parameters in the order of their paths."""
    graph, state = nnx.split(module)
    return nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), [jnp.asarray(v) for v in values]))


def test_bias_has_the_dimensions_of_the_output():
    linear = Linear(
        "td,dcf->tcf", (3, 2, 5), ("embed", "gate_up", "mlp"), "float32", modules=[Module("linear", (2, 5))], bias=True
    )
    assert linear.bias.shape == (2, 5)
    assert linear.bias.get_metadata("axes") == ("gate_up", "mlp")
    filled = with_values(linear, jnp.full((2, 5), 7.0), jnp.ones((3, 2, 5)))
    np.testing.assert_array_equal(filled(jnp.ones((1, 3))), np.full((1, 2, 5), 10.0))


def test_a_bias_is_added_to_outputs_in_one_dimension_by_the_first_device():
    bias, weight = np.random.default_rng(0).normal(size=(2, 5)), np.random.default_rng(1).normal(size=(3, 2, 5))
    axes = ("embed", "gate_up", "mlp")
    linear = Linear("td,dcf->tcf", weight.shape, axes, "float32", modules=[Module("linear", (2, 5))], bias=True)
    linear = with_values(linear, bias, weight)
    x = np.arange(12.0).reshape(4, 3)
    product = np.einsum("td,dcf->tcf", x, weight)
    np.testing.assert_allclose(linear(jnp.asarray(x)), product + bias, rtol=1e-5)
    np.testing.assert_allclose(linear(jnp.asarray(x), SimpleNamespace(size=2, index=1)), product, rtol=1e-5)
    lowered = jax.jit(lambda x: linear(x)).lower(jnp.asarray(x)).as_text()
    assert [line.split(" : ")[1] for line in lowered.splitlines() if "stablehlo.add" in line] == ["tensor<4x10xf32>"]


def test_weights_of_a_wider_type_are_used_in_the_type_of_the_input():
    linear = with_values(
        Linear("td,df->tf", (3, 5), ("embed", "mlp"), "float32", modules=[Module("linear", (5,))]), jnp.ones((3, 5))
    )
    assert linear(jnp.ones((1, 3), jnp.bfloat16)).dtype == jnp.bfloat16


def test_norm_is_computed_in_float32():
    norm = with_values(Normalization(Norm("norm"), 4, "embed", "float16"), jnp.ones(4, jnp.float16))
    out = norm(jnp.full((1, 4), 60000.0, jnp.float16))  # its square overflows float16
    np.testing.assert_allclose(np.asarray(out, np.float32), np.ones((1, 4)), rtol=1e-3)


def test_logits_are_float32_and_padding_is_minus_infinity():
    config = dataclasses.replace(load_model_config(goldens.FOLDER / "qwen2", dtype="bfloat16"), padded_vocab_size=192)
    head = with_values(Embedding(config, "head"), jnp.ones((192, 64), jnp.bfloat16))
    logits = head.logits(jnp.ones((2, 64), jnp.bfloat16))
    assert logits.dtype == jnp.float32
    assert np.isfinite(logits[:, :131]).all() and (np.asarray(logits[:, 131:]) == -np.inf).all()


@pytest.mark.slow
def test_gradients_in_float32_flow_through_a_batch_of_sequences_computed_in_bfloat16():
    config = load_model_config(goldens.FOLDER / "qwen3", overrides={"num_hidden_layers": 1}, dtype="bfloat16")
    model = build_model(config)
    graph, state = nnx.graphdef(model), init_params(model, jax.random.key(0))
    token_ids_BT = jax.random.randint(jax.random.key(1), (2, 7), 0, config.vocab_size)

    @jax.jit
    def loss(state):
        model, positions = nnx.merge(graph, state), jnp.arange(7)
        logits = jax.vmap(lambda ids: model.logits(model(dense_step(ids, positions))))(token_ids_BT)
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), token_ids_BT[:, 1:, None], axis=-1))

    value, gradient = jax.value_and_grad(loss)(state)
    assert value == pytest.approx(np.log(config.vocab_size), rel=0.05)
    for (path, weight), (_, slope) in zip(nnx.to_flat_state(state), nnx.to_flat_state(gradient), strict=True):
        assert slope.dtype == weight.dtype == jnp.float32
        assert np.isfinite(slope[...]).all() and np.any(slope[...] != 0), path


def test_given_embeddings_stand_in_place_of_those_of_tokens():
    config, state = goldens.load(goldens.FOLDER / "gemma3")
    graph = nnx.graphdef(build_model(config))

    @jax.jit
    def logits(state, token_ids_T, given_ids_T=None, is_given_T=None):
        model, step = nnx.merge(graph, state), dense_step(token_ids_T, jnp.arange(len(token_ids_T)))
        if given_ids_T is not None:
            step.given_TD, step.is_given_T = model.embedding(given_ids_T) * config.embedding_scale, is_given_T
        return model.logits(model(step))

    ids, others = np.array([5, 9, 2, 7]), np.array([5, 1, 1, 7])
    right, other = logits(state, ids), logits(state, others)
    found = logits(state, others, ids, np.array([False, True, True, False]))
    np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-5)
    assert np.abs(np.asarray(right) - other)[1:].max() > 1e-2


def test_given_embeddings_of_a_run_are_those_of_its_tokens_and_added_by_one_device():
    given_TD, is_given_T = jnp.arange(8.0).reshape(4, 2), jnp.array([True, False, False, True])
    part_TD = jnp.full((2, 2), 9.0)
    step = dataclasses.replace(dense_step(jnp.zeros(4, int), jnp.arange(4)), given_TD=given_TD, is_given_T=is_given_T)
    np.testing.assert_array_equal(step.with_given(part_TD, 2), [[9, 9], [6, 7]])
    for index, row in ((0, [6, 7]), (1, [0, 0])):
        step.shards = SimpleNamespace(size=2, index=index)
        np.testing.assert_array_equal(step.with_given(part_TD, 2), [[9, 9], row])


@pytest.mark.parametrize("dtype, tolerance", [("float32", 3e-7), ("bfloat16", 2.0**-8)])
def test_gelu_is_that_of_float64(dtype, tolerance):
    x = jnp.concatenate([jnp.linspace(-12, 12, 4001), jnp.array([-1e4, 1e4])]).astype(dtype)
    wide = np.float64(x)
    expected = wide * 0.5 * np.array([math.erfc(-value / math.sqrt(2)) for value in wide])
    found = gelu(x)
    assert found.dtype == dtype
    np.testing.assert_allclose(np.float64(found), expected, rtol=tolerance, atol=1e-6)
