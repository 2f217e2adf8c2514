"""Layers with fp8 weights whose inputs the op `quantize` makes, against the same layers that quantise for each product."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from jaxllm.kernel_policy import ALIKE
from jaxllm.layers.build import build_model
from jaxllm.layers.dense_attention import dense_step
from jaxllm.layers.linear import Linear
from jaxllm.layers.source import Module
from jaxllm.layers.step import Step
from jaxllm.loaders.load import load_weights
from jaxllm.models.load_config import load_model_config
from jaxllm.parallel.mesh import TENSOR, make_mesh
from jaxllm.parallel.shards import TensorShards
from jaxllm.quantization.formats.fp8 import Fp8
from jaxllm.quantization.fp8 import quantize
from pallas_kernels.quantize import scaled
from tests.helpers import goldens
from tests.helpers.slow import slow_except

IDS = np.arange(3, 27, dtype=np.int32)
XLA = {"implementation": "xla", "interpret": False}
TRITON = {"implementation": "triton", "interpret": True}
# Biases of projections; a norm behind each part, offsets and gelu; parallel parts; experts with a shared MLP; latents; states by row.
FAMILIES = ["llama_gqa", "llama_bias", "qwen2", "gemma3", "cohere2", "mixtral", "deepseek_v2", "qwen3_next", "gpt2"]


def model_and_state(name: str, quantization: str | None):
    directory = goldens.FOLDER / name
    config = load_model_config(directory, dtype="bfloat16", quantization=quantization)
    model = build_model(config)
    return nnx.graphdef(model), load_weights(config, model, directory, mesh=make_mesh(1), load_format="auto")


def hidden(graph, state, **fields) -> np.ndarray:
    def run(state):
        step = dataclasses.replace(dense_step(jnp.asarray(IDS), jnp.arange(len(IDS))), **fields)
        return nnx.merge(graph, state)(step)

    return np.asarray(jax.jit(run)(state), np.float32)


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize(
    ("name", "options"),
    slow_except([("llama_gqa", XLA)], [*((name, XLA) for name in FAMILIES), ("llama_gqa", TRITON), ("qwen2", TRITON)]),
)
@pytest.mark.slow
def test_hidden_states_are_those_of_products_that_quantise_alone(name, options):
    exact = hidden(*model_and_state(name, None))
    fp8 = model_and_state(name, "fp8")
    alone, together = hidden(*fp8), hidden(*fp8, quantization=options)
    assert not np.array_equal(alone, together)
    # As near to 16 bits; what is apart is what rounding to fp8 makes of the last bits.
    assert distance(together, exact) < 1.25 * distance(alone, exact)
    assert distance(together, alone) < distance(alone, exact)


def test_few_rows_are_multiplied_as_they_are():
    exact, fp8 = hidden(*model_and_state("llama_gqa", None)), model_and_state("llama_gqa", "fp8")
    few, fewer = (dataclasses.replace(ALIKE, max_weight_only_rows=rows) for rows in (len(IDS), len(IDS) - 1))
    alone, weight_only = hidden(*fp8), hidden(*fp8, policy=few)
    assert distance(weight_only, exact) < distance(alone, exact)
    np.testing.assert_array_equal(hidden(*fp8, policy=fewer), alone)
    np.testing.assert_array_equal(hidden(*fp8, policy=few, quantization=XLA), weight_only)


def test_a_program_with_kernels_has_no_other_quantisation():
    """All vectors of a dense decoder are quantised by the op: for each product once, and in one call with norm and activation."""
    graph, state = model_and_state("llama_gqa", "fp8")
    step = dataclasses.replace(dense_step(jnp.asarray(IDS), jnp.arange(len(IDS))), quantization=TRITON)
    text = str(jax.make_jaxpr(lambda state: nnx.merge(graph, state)(dataclasses.replace(step)))(state))
    num_layers = len(nnx.merge(graph, state).blocks)
    calls = {
        name: text.count(f"name={name}\n") + text.count(f"name={name} ") for name in ("add_norm_quantize", "silu_up_quantize")
    }
    assert calls == {"add_norm_quantize": 2 * num_layers - 1, "silu_up_quantize": num_layers}, text[:2000]


def test_each_device_quantises_its_part_of_a_vector_and_one_adds_the_bias():
    rng, mesh = np.random.default_rng(0), make_mesh(2)
    linear = Linear("tf,fd->td", (64, 24), ("mlp", "embed"), "bfloat16", modules=[Module("down", (24,))], bias=True)
    linear.take_formats([Fp8(computes=True)])
    weight, bias = rng.normal(size=(24, 64)).astype(np.float32), 10 * rng.normal(size=24).astype(np.float32)
    x = rng.normal(size=(5, 64)) * np.repeat([1, 1e-3], 32)
    values, scale = quantize(weight)
    graph, state = nnx.split(linear)
    arrays = {"values": values, "scale": scale, "bias": jnp.asarray(bias, jnp.bfloat16)}
    specs = {"values": PartitionSpec(None, TENSOR), "scale": PartitionSpec(), "bias": PartitionSpec()}

    def product(arrays, x):
        own = nnx.from_flat_state([(path, variable.replace(arrays[path[-1]])) for path, variable in nnx.to_flat_state(state)])
        shards = TensorShards(2, ALIKE)
        step = Step(jnp.zeros(5, int), jnp.zeros(5, int), None, shards=shards, quantization=XLA)  # type: ignore[arg-type]
        sums = step.sums(nnx.merge(graph, own), x.astype(jnp.bfloat16))
        return shards.sum(scaled(sums).astype(jnp.float32))

    run = jax.shard_map(
        product, mesh=mesh, in_specs=(specs, PartitionSpec(None, TENSOR)), out_specs=PartitionSpec(), check_vma=False
    )
    found, exact = np.asarray(jax.jit(run)(arrays, x)), x @ weight.T + bias
    assert np.abs(found - exact).max() < 0.03 * np.abs(exact).max()
