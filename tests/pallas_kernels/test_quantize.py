"""Quantisation with norm or activation by every implementation, against NumPy in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.checking.quantize import TOLERANCE, Shapes, case, cases
from pallas_kernels.quantize import IMPLEMENTATIONS, Quantized, Sums, candidates, quantize, scaled, triton
from pallas_kernels.quantize.triton import LARGEST_WIDTH, Tiles
from tests.helpers.slow import slow_except

FUNCTIONS = ["add_norm_quantize", "silu_up_quantize", "quantize"]
SIZES = [(3, 40), (5, 300), (1, 2304), (258, 96)]
DTYPES = ["bfloat16", "float16", "float32"]
# Every size with every function and, over the functions, with every type.
ALL = [
    (name, f, size, DTYPES[(i + j) % 3])
    for name in IMPLEMENTATIONS
    for i, f in enumerate(FUNCTIONS)
    for j, size in enumerate(SIZES)
]
QUICK = [("triton", f, (5, 300), "bfloat16") for f in FUNCTIONS] + [("xla", f, (3, 40), "bfloat16") for f in FUNCTIONS]


def run(found) -> tuple:
    carry, constants = found.make()
    (variant,) = found.variants.values()
    return carry, constants, jax.jit(variant)(carry, *constants)


@pytest.mark.parametrize(("implementation", "function", "size", "dtype"), slow_except(QUICK, dict.fromkeys([*QUICK, *ALL])))
def test_values_and_scales(implementation, function, size, dtype):
    found = case(function, *size, implementations=(implementation,), dtype=dtype, interpret=True)
    carry, constants, got = run(found)
    assert found.error(carry, constants, got) < TOLERANCE


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_check_finds_faults(function):
    found = case(function, 5, 64, implementations=("xla",), dtype="bfloat16", interpret=True)
    carry, constants, got = run(found)
    before, quantized = (got[:1], got[1]) if function == "add_norm_quantize" else ((), got)
    values, scale = np.array(quantized.values_TN), np.array(quantized.scale_T)

    def error(values, scale):
        wrong = Quantized(values, scale)
        return found.error(carry, constants, (*before, wrong) if before else wrong)

    assert error(values, scale) < TOLERANCE
    other = values.copy()
    row, column = np.argwhere(np.abs(other.astype(np.float32)) == 448)[0]
    other[row, column] = 416  # the value below
    assert error(other, scale) > TOLERANCE
    assert error(values, scale * np.float32(1.001)) > TOLERANCE
    other = values.copy()
    other[0, 0] = np.nan
    assert not error(other, scale) < TOLERANCE


def test_subnormal_residuals_in_float16_may_be_zero_in_the_norm():
    found = case("add_norm_quantize", 37, 1152, implementations=("xla",), dtype="float16", interpret=True)
    carry, constants, (x, quantized) = run(found)
    assert found.error(carry, constants, (x, quantized)) < TOLERANCE
    is_subnormal = np.abs(np.asarray(x, np.float32)) < 2.0**-14
    values = np.array(quantized.values_TN)
    assert is_subnormal.any() and not values[is_subnormal].any()
    size = np.abs(values.astype(np.float32))
    values[np.unravel_index(np.argmin(np.where(size > 2.0**-5, size, np.inf)), size.shape)] = 0
    assert found.error(carry, constants, (x, Quantized(values, quantized.scale_T))) > TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_jax_passes_the_cases_at_the_start_in_every_type(dtype):
    for found in cases(Shapes(dtype, width=4096, of_heads=2048, of_mlp=1024, eps=1e-6), "xla", interpret=True):
        carry, constants, got = run(found)
        assert found.error(carry, constants, got) < TOLERANCE, found.name


def test_cases_at_the_start_have_each_width():
    shapes = Shapes("bfloat16", width=64, of_heads=128, of_mlp=192, eps=1e-6)
    names = [found.name for found in cases(shapes, "triton", interpret=True)]
    assert len(names) == 2 * 4 and all(any(f"{width} values" in name for name in names) for width in (64, 128, 192))


@pytest.mark.slow
def test_tiles_change_nothing():
    rng = np.random.default_rng(0)
    sums = Sums(jnp.asarray(rng.standard_normal((5, 2, 150)), jnp.bfloat16), jnp.ones(5), jnp.full((2, 150), 0.5))
    found = [
        jax.jit(functools.partial(triton.silu_up_quantize, interpret=True, tiles=tiles))(sums)
        for tiles in (None, Tiles(64, 4), Tiles(256, 4), Tiles(32, 8))
    ]
    for tiled in found[1:]:
        assert jax.tree.all(jax.tree.map(np.array_equal, found[0], tiled))


def test_what_the_kernels_take():
    options = {"platform": "gpu", "dtype": "bfloat16"}
    assert candidates(**options, widths=(4096, LARGEST_WIDTH)) == ("triton", "xla")
    assert candidates(**options, widths=(4096, LARGEST_WIDTH + 8)) == ("xla",)
    assert candidates(platform="cpu", dtype="bfloat16", widths=(64,)) == ("xla",)
    with pytest.raises(ValueError, match=r"does not take vectors of 32776 values in bfloat16; use 'xla'"):
        quantize(jnp.zeros((1, LARGEST_WIDTH + 8), jnp.bfloat16), implementation="triton")
    with pytest.raises(ValueError, match=r"no implementation 'cuda' of quantisation; there are triton, xla"):
        quantize(jnp.zeros((1, 8)), implementation="cuda")


def test_scaled_sums_and_some_of_their_rows():
    sums = Sums(jnp.arange(6.0).reshape(3, 2), jnp.array([1.0, 2.0, 3.0]), jnp.array([10.0, 100.0]))
    np.testing.assert_array_equal(scaled(sums), [[0, 100], [40, 600], [120, 1500]])
    np.testing.assert_array_equal(scaled(sums[1:]), [[40, 600], [120, 1500]])
    assert len(sums[jnp.array([2, 0])]) == 2 and scaled(sums.values) is sums.values
