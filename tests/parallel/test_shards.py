"""Exchanges of several devices in a step give the values of one device, over forced CPU devices."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxllm.kernel_policy import CPU
from jaxllm.layers.build import build_model
from jaxllm.layers.dense_attention import dense_attend
from jaxllm.layers.norm import Normalization
from jaxllm.layers.step import Step
from jaxllm.model_parts import Norm
from jaxllm.parallel.mesh import TENSOR, make_mesh
from jaxllm.parallel.shards import ONE_DEVICE, TensorShards, make_shards
from tests.helpers import goldens
from tests.helpers.slow import slow_except

SIZE = 4
SHARDS = TensorShards(SIZE, CPU)
COLUMNS = P(None, TENSOR)


def on_devices(function, *arrays, specs):
    mapped = jax.shard_map(function, mesh=make_mesh(SIZE), in_specs=specs, out_specs=P(), check_vma=False)
    return jax.tree.map(np.asarray, jax.jit(mapped)(*arrays))


def test_one_device_has_nothing_to_exchange():
    assert make_shards(make_mesh(1), CPU) is ONE_DEVICE
    assert make_shards(make_mesh(SIZE), CPU) == SHARDS


@pytest.mark.parametrize("special", ["plain", "ties", "nan", "nothing"])
def test_the_likeliest_token_is_that_of_the_whole_row(special):
    logits_RV = np.random.default_rng(0).standard_normal((5, 32)).astype(np.float32)
    if special == "ties":
        logits_RV[:, [3, 9, 30]] = 10
    if special == "nan":
        logits_RV[:, [12, 20]] = np.nan
    if special == "nothing":
        logits_RV[:] = -np.inf

    def draw(logits_RV):
        own_R = jnp.argmax(logits_RV, axis=1).astype(jnp.int32)
        value_R = jnp.take_along_axis(logits_RV, own_R[:, None], axis=1)[:, 0]
        return SHARDS.likeliest(own_R, value_R, logits_RV.shape[1])

    ids, values = on_devices(draw, logits_RV, specs=COLUMNS)
    expected = np.argmax(np.where(np.isnan(logits_RV), np.inf, logits_RV), axis=1)
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_array_equal(values, logits_RV[np.arange(5), expected])


@pytest.mark.parametrize("num_rows", [1, 4, 7])
def test_rows_are_shared_out_and_come_back(num_rows):
    x_RV = np.arange(num_rows * 24, dtype=np.float32).reshape(num_rows, 24)
    factor_R = np.arange(num_rows, dtype=np.int32)

    def by_rows(x_RV, factor_R):
        whole_rV, factor_r = SHARDS.to_rows(x_RV), SHARDS.own_rows(factor_R)
        assert whole_rV.shape == (-(-num_rows // SIZE), 24)
        return SHARDS.from_rows((whole_rV.sum(axis=1) * factor_r, factor_r), num_rows), SHARDS.all_columns(x_RV)

    (sums, factors), whole = on_devices(by_rows, x_RV, factor_R, specs=(COLUMNS, P()))
    np.testing.assert_array_equal(sums, x_RV.sum(axis=1) * factor_R)
    np.testing.assert_array_equal(factors, factor_R)
    np.testing.assert_array_equal(whole, x_RV)


def test_parts_are_added_and_normed():
    rng = np.random.default_rng(0)
    parts, residual, weight = (rng.standard_normal(shape).astype(np.float32) for shape in ((SIZE, 3, 16), (3, 16), (16,)))

    def add(part, residual, weight):
        norm = Normalization(Norm("norm", 1e-5), 16, "embed", "float32")
        norm.weight = nnx.Param(weight)
        return SHARDS.add_and_norm(part[0], residual, norm), SHARDS.max(part[0])

    (x, normed), largest = on_devices(add, parts, residual, weight, specs=(P(TENSOR), P(), P()))
    expected = residual + parts.astype(np.float64).sum(axis=0)
    np.testing.assert_allclose(x, expected, rtol=1e-5, atol=1e-6)
    scaled = expected / np.sqrt((expected**2).mean(axis=-1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(normed, scaled, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(largest, parts.max(axis=0))


def test_without_peers_nothing_is_checked():
    assert SHARDS.check("x", 0) == "x"
    assert ONE_DEVICE.check("x", 0) == "x"
    assert SHARDS.through(None) == SHARDS
    assert ONE_DEVICE.through(None) is ONE_DEVICE


@pytest.mark.parametrize("min_tokens", [8, 10_000], ids=["two runs", "one run"])
@pytest.mark.parametrize("name", slow_except(["qwen2"], ["llama_gqa", "qwen2"]))
def test_a_model_over_several_devices_is_the_model(name, min_tokens):
    """Also if a step's tokens are computed in two runs; the vocabulary is padded and odd biases are there (qwen2).

    From what enters a layer, the rest of the model computes the same; what leaves the last layer is normed."""
    directory, length = goldens.FOLDER / name, 16
    token_ids = list(range(3, 3 + length))
    expected = goldens.logits(*goldens.load(directory), token_ids)
    config, state = goldens.load(directory, tensor_parallel_size=2)
    graph, mesh = nnx.graphdef(build_model(config)), make_mesh(2)
    shards = make_shards(mesh, replace(CPU, min_tokens_of_two_runs=min_tokens))
    assert shards.num_runs(length) == (2 if min_tokens == 8 else 1)

    def forward(state, token_ids_T, positions_T):
        model = nnx.merge(graph, state)
        last = len(model.blocks)
        step = Step(token_ids_T, positions_T, dense_attend(positions_T), shards, wanted_features=(1, last))
        hidden_TD = model(step)
        run = (step.features[1], model.blocks[1].attention_norm(step.features[1]))
        ((_, again_TD),) = model.run([run], step, range(1, last))
        return shards.all_columns(model.logits(hidden_TD, shards)), hidden_TD, again_TD, model.norm(step.features[last])

    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, state)
    mapped = jax.shard_map(forward, mesh=mesh, in_specs=(specs, P(), P()), out_specs=P(), check_vma=False)
    ids_T, positions_T = np.array(token_ids, np.int32), np.arange(length, dtype=np.int32)
    found, hidden, *others = map(np.asarray, jax.jit(mapped)(state, ids_T, positions_T))
    for other in others:
        np.testing.assert_allclose(other, hidden, atol=1e-5)
    np.testing.assert_allclose(found[:, : config.vocab_size], expected[:, : config.vocab_size], atol=2e-4)
    assert (found[:, config.vocab_size :] == -np.inf).all()
