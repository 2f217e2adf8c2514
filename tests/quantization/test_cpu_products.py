"""Products with weights of few bits as a CPU computes them, against float64 products with the widened weights."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxllm.quantization import lanes, numbers
from jaxllm.quantization.numbers import NUMBERS, Scheme
from jaxllm.quantization.packed import product
from tests.helpers.slow import slow_except

SCHEMES = {
    "int4": Scheme("int4", 32, scale_type="float16"),
    "zeros": Scheme("uint4", 128, zeros=True, scale_type="bfloat16"),
    "minimums": Scheme("uint4", 32, minimums=True),
    "int8": Scheme("int8", 16),
    "channel": Scheme("uint8b128"),
    "e4m3": Scheme("e4m3"),
    "nvfp4": Scheme("e2m1", 16, scale_type="float8_e4m3fn", factor=True),
    "mxfp4": Scheme("e2m1", 32, scale_type="uint8"),
    "short": Scheme("nf4", 4),
}


def weight(scheme: Scheme, outputs: tuple[int, ...], num_inputs: int) -> dict[str, np.ndarray]:
    """Any codes; every value of a byte that is no NaN is among them."""
    random, number = np.random.default_rng(0), NUMBERS[scheme.number]
    of_groups = (*outputs, num_inputs // (scheme.group or num_inputs))
    codes = random.integers(0, 256, (*outputs, num_inputs // number.per_value), np.uint8)
    if number.code_type == "float8_e4m3fn":
        codes = np.where(codes & 0x7F == 0x7F, 0, codes).astype(np.uint8)
    arrays = {
        "codes": codes.view(number.code_type),
        "scale": random.uniform(0.001, 0.01, of_groups).astype(scheme.scale_type),
    }
    if scheme.scale_type == "uint8":
        arrays["scale"] = random.integers(115, 125, of_groups, np.uint8)
    if scheme.zeros:
        arrays["zero"] = random.integers(0, 16, of_groups, np.uint8)
    if scheme.minimums:
        arrays["minimum"] = random.uniform(0, 0.1, of_groups).astype(np.float32)
    if scheme.factor:
        arrays["factor"] = random.uniform(0.5, 2, outputs).astype(np.float32)
    return arrays


@pytest.mark.parametrize("num_rows", [1, 3, 9])
@pytest.mark.parametrize("name", slow_except(["minimums", "short"], SCHEMES))
def test_products(name, num_rows):
    scheme = SCHEMES[name]
    arrays = weight(scheme, (2, 24), 384)
    x = np.random.default_rng(1).standard_normal((num_rows, 384)).astype(np.float32)
    exact = np.einsum("rk,abk->rab", x.astype(np.float64), numbers.widen(arrays, scheme, np).astype(np.float64))
    compute = jax.jit(lambda arrays, x: product(arrays, scheme, x))
    found = compute(arrays, x)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, exact, atol=2e-6 * np.abs(exact).max())
    narrow = compute(arrays, jnp.asarray(x, jnp.bfloat16)[None])
    assert narrow.shape == (1, num_rows, 2, 24) and narrow.dtype == ml_dtypes.bfloat16
    np.testing.assert_allclose(narrow[0].astype(np.float32), exact, atol=0.02 * np.abs(exact).max())


@pytest.mark.parametrize("num_rows", [1, 3, 40])
@pytest.mark.parametrize("name", slow_except(["factor"], ["int4", "zeros", "minimums", "int8", "channel", "factor"]))
def test_lanes(monkeypatch, name, num_rows):
    """Blocks of outputs too; the rows are those of the widened weight."""
    scheme = (SCHEMES | {"factor": Scheme("int4", 48, zeros=True, minimums=True, factor=True)})[name]
    monkeypatch.setattr(lanes, "_SUMS_BYTES", 1 << 14)
    arrays = weight(scheme, (2, 48), 384)
    assert lanes.takes(scheme, 96, 384)
    x = np.random.default_rng(1).standard_normal((num_rows, 384)).astype(np.float32)
    widened = numbers.widen(arrays, scheme, np).astype(np.float64)
    exact = np.einsum("rk,abk->rab", x.astype(np.float64), widened)
    found = jax.jit(lambda arrays, x: lanes.product(arrays, scheme, x, (2, 48)))(in_lanes(arrays), x)
    np.testing.assert_allclose(found, exact, atol=2e-6 * np.abs(exact).max())
    rows = lanes.rows(in_lanes(arrays), scheme, jnp.array([[0, 17], [95, 1000]]))
    np.testing.assert_allclose(rows, widened.reshape(96, 384)[[[0, 17], [95, 95]]], rtol=1e-5, atol=1e-6)


def in_lanes(arrays):
    """By definition: index [vector, number of an output, output of the vector]."""
    return {name: jnp.asarray(array.reshape(6, 16, -1).swapaxes(1, 2)) for name, array in arrays.items()}


@pytest.mark.parametrize("scheme", [SCHEMES["e4m3"], SCHEMES["mxfp4"], SCHEMES["short"], Scheme("int8", 4)])
def test_what_stays_out_of_lanes(scheme):
    assert not lanes.takes(scheme, 32, 384)


def test_outputs_that_are_no_whole_vectors_stay_out_of_lanes():
    assert not lanes.takes(SCHEMES["int8"], 40, 384)


@pytest.mark.parametrize("num_rows", [1, 4, 64])
def test_weights_are_never_widened_as_a_whole(num_rows):
    scheme, shape = Scheme("uint4", 32, minimums=True), (2048, 4096)
    arrays = {"codes": jax.ShapeDtypeStruct((shape[0], shape[1] // 2), jnp.uint8)}
    arrays |= {name: jax.ShapeDtypeStruct((shape[0], shape[1] // 32), jnp.float32) for name in ("scale", "minimum")}
    x = jax.ShapeDtypeStruct((num_rows, shape[1]), jnp.float32)
    compiled = jax.jit(lambda arrays, x: product(arrays, scheme, x)).lower(arrays, x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * shape[0] * shape[1] / 2
    arrays = {name: jax.ShapeDtypeStruct((128, array.shape[1], 16), array.dtype) for name, array in arrays.items()}
    compiled = jax.jit(lambda arrays, x: lanes.product(arrays, scheme, x, shape[:1])).lower(arrays, x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * shape[0] * shape[1] / 2


def test_outputs_without_divisors():
    """1031 is prime, and too many inputs to widen all of them in a cache."""
    scheme = Scheme("int8")
    arrays = {"codes": np.ones((1031, 2048), np.int8), "scale": np.ones((1031, 1), np.float32)}
    found = product(arrays, scheme, jnp.ones((8, 2048)))
    np.testing.assert_array_equal(found, np.full((8, 1031), 2048, np.float32))
