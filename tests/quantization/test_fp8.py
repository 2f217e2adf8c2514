import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from jaxllm.layers.linear import Linear
from jaxllm.layers.source import Module
from jaxllm.quantization.formats.fp8 import Fp8
from jaxllm.quantization.fp8 import quantize


@pytest.fixture(scope="module")
def rng():
    return np.random.default_rng(0)


def numpy_quantize(x):
    """float64, one vector after the other."""
    values, scales = np.empty(x.shape, ml_dtypes.float8_e4m3fn), np.empty(x.shape[:-1])
    for at in np.ndindex(x.shape[:-1]):
        scales[at] = max(np.abs(x[at].astype(np.float64)).max(), 1e-20) / 448
        values[at] = (x[at] / scales[at]).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
    return values, scales


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_values_and_scales_are_those_of_the_oracle(rng, dtype):
    x = np.asarray(jnp.asarray(rng.standard_normal((7, 33)) * np.logspace(-3, 3, 7)[:, None], dtype))
    values, scale = jax.jit(quantize)(x)
    wanted_values, wanted_scale = numpy_quantize(x)
    np.testing.assert_allclose(scale, wanted_scale, rtol=1e-6)
    differing = np.asarray(values).view(np.uint8) != wanted_values.view(np.uint8)
    assert differing.mean() < 0.02  # ties, that the last bit of the scale decides


def test_zeros_stay_zeros_and_the_largest_value_stays_finite(rng):
    values, scale = quantize(jnp.zeros((2, 8)))
    assert (np.asarray(values, np.float32) == 0).all() and np.isfinite(scale).all()
    values, _ = quantize(jnp.full((2, 8), 3e38))
    assert (np.asarray(values, np.float32) == 448).all()


def test_one_scale_spans_all_contracted_dimensions(rng):
    x = rng.standard_normal((3, 4, 5)).astype(np.float32)
    values, scale = quantize(x, 2)
    flat_values, flat_scale = quantize(x.reshape(3, 20))
    np.testing.assert_array_equal(np.asarray(values, np.float32).reshape(3, 20), np.asarray(flat_values, np.float32))
    np.testing.assert_array_equal(scale, flat_scale)


@pytest.mark.parametrize(
    ("subscripts", "shape", "dtype"),
    [
        ("td,df->tf", (24, 10), jnp.float32),
        ("td,dkgh->tkgh", (24, 2, 3, 8), jnp.bfloat16),
        ("tkgh,kghd->td", (2, 3, 8, 24), jnp.float32),
        ("td,dcf->tcf", (24, 2, 10), jnp.bfloat16),
    ],
)
def test_a_quantised_linear_multiplies_the_quantised_numbers(rng, subscripts, shape, dtype):
    n = sum(letter not in subscripts.split("->")[1] for letter in subscripts.split("->")[0].split(",")[1])
    linear = Linear(
        subscripts, shape, tuple("embed" for _ in shape), "bfloat16", modules=[Module("linear", shape[n:])], bias=True
    )
    linear.take_formats([Fp8(computes=True)])
    weight = rng.standard_normal((*shape[n:], *shape[:n])).astype(np.float32)
    bias = rng.standard_normal(shape[n:]).astype(np.float32)
    values, scale = quantize(weight, n)
    graph, state = nnx.split(linear)
    state["weight"]["values"].set_value(values)
    state["weight"]["scale"].set_value(scale)
    state["bias"].set_value(jnp.asarray(bias))
    x = jnp.asarray(rng.standard_normal((5, *shape[:n])), dtype)
    y = jax.jit(lambda state, x: nnx.merge(graph, state)(x))(state, x)

    x_values, x_scale = numpy_quantize(np.asarray(x, np.float32).reshape(5, -1))
    w_values, w_scale = numpy_quantize(weight.reshape(-1, np.prod(shape[:n])))
    exact = (x_values.astype(np.float64) @ w_values.astype(np.float64).T) * x_scale[:, None] * w_scale
    exact = exact.reshape(5, *shape[n:]) + bias
    assert y.dtype == dtype and y.shape == exact.shape
    # A value that is rounded the other way moves a sum by 2^-4 of one of its terms.
    assert np.abs(np.asarray(y, np.float64) - exact).max() < (0.01 if dtype == jnp.float32 else 0.03) * np.abs(exact).max()
    plain = np.asarray(x, np.float64).reshape(5, -1) @ weight.reshape(-1, np.prod(shape[:n])).T
    assert np.abs(exact - bias - plain.reshape(exact.shape)).max() < 0.1 * np.abs(plain).max()
