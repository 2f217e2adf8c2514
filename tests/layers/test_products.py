"""The kernels for few rows give the model's layers what plain JAX gives them, biases included."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxllm.layers.dense_attention import dense_attend
from jaxllm.layers.products import PLAIN, Products, SkinnyProducts
from jaxllm.models.registry import build_model
from pallas_kernels.skinny_matmul.triton import MAX_ROWS
from tests.helpers import goldens

SKINNY = SkinnyProducts(implementation="triton", interpret=True)


def logits(name: str, num_tokens: int, products: Products) -> np.ndarray:
    """Of one sequence through a golden's model."""
    config, state = goldens.load(goldens.golden(name).directory)
    graph = nnx.graphdef(build_model(config))
    token_ids, positions = jnp.arange(num_tokens) % config.vocab_size, jnp.arange(num_tokens)

    @jax.jit
    def forward(state):
        model = nnx.merge(graph, state)
        return model.logits(model(token_ids, positions, dense_attend(positions), products), products)

    return np.asarray(forward(state))


def test_a_model_with_biases_agrees_in_float32() -> None:
    np.testing.assert_allclose(logits("llama_bias", 5, SKINNY), logits("llama_bias", 5, PLAIN), atol=2e-5)


def test_more_rows_than_the_kernels_take_are_computed_as_before() -> None:
    rows = MAX_ROWS + 1
    np.testing.assert_array_equal(logits("llama_gqa", rows, SKINNY), logits("llama_gqa", rows, PLAIN))
