"""Gate, up and the activation in one pass against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _compat, gated_matmul
from pallas_kernels.checking.gated_matmul import Shapes, case
from pallas_kernels.quantize import Quantized
from scripts.kernels import gated_matmul as gated_cases
from tests.helpers.lowering import a_gpu_to_lower_for

needs_mosaic = pytest.mark.skipif(not _compat.has_mosaic(), reason="JAX 0.10 lacks parts of Mosaic GPU that the kernels use")
CASES = {
    # More than a pair of tiles, whose second pair has a part of one; blocks that do not divide the outputs; two steps.
    "bfloat16": (Shapes("bfloat16", 128, 192), 261),
    "gelu_tanh": (Shapes("float16", 64, 128, "gelu_tanh"), 5),
    "fp8": (Shapes("bfloat16", 256, 256, is_scaled=True), 261),
}


@pytest.mark.parametrize("implementation", [pytest.param("mosaic", marks=needs_mosaic), "xla"])
@pytest.mark.parametrize("name", CASES)
def test_results_equal_the_definition_and_a_wrong_one_does_not_pass(name, implementation):
    shapes, num_tokens = CASES[name]
    made = case(shapes, num_tokens, (implementation,), interpret=True)
    x, constants = made.make()
    got = np.array(jax.jit(made.variants[implementation])(x, *constants))
    assert made.error(x, constants, got) <= made.tolerance
    for place, wrong in (((0, 0), 0.1), ((1, -1), 0.1), ((0, 1), np.nan)):
        changed = got.astype(np.float32)
        changed[place] += wrong * np.abs(changed[:-3]).max()
        assert not made.error(x, constants, changed) <= made.tolerance


@needs_mosaic
def test_the_kernel_is_lowered_for_a_gpu():
    shapes = gated_cases.LLAMA_8B_OF_FOUR
    x = jax.ShapeDtypeStruct((300, shapes.width), jnp.bfloat16)
    weight = jax.ShapeDtypeStruct((shapes.width, 2, shapes.hidden), jnp.bfloat16)
    with a_gpu_to_lower_for():
        lowered = jax.jit(lambda x, weight: gated_matmul.product(x, weight, implementation="mosaic")).trace(x, weight)
        assert "mosaic_gpu" in lowered.lower(lowering_platforms=("cuda",)).as_text()


def test_what_does_not_fit_is_refused():
    x, weight = jnp.ones((3, 64), jnp.bfloat16), jnp.ones((64, 2, 96), jnp.bfloat16)
    with pytest.raises(
        ValueError, match=r"the weight is \[32, 2, 96\] in bfloat16 for x \[3, 64\] in bfloat16; gate and up are"
    ):
        gated_matmul.product(x, weight[:32], implementation="xla")
    with pytest.raises(ValueError, match=r"in float32 for x \[3, 64\] in bfloat16"):
        gated_matmul.product(x, weight.astype(jnp.float32), implementation="xla")
    with pytest.raises(ValueError, match="no activation 'relu' of gated layers; there are silu"):
        gated_matmul.product(x, weight, activation="relu", implementation="xla")
    with pytest.raises(ValueError, match="no implementation 'cuda' of gated products; there are mosaic, xla"):
        gated_matmul.product(x, weight, implementation="cuda")
    with pytest.raises(
        ValueError, match="'mosaic' of gated products does not take 64 inputs and 96 outputs in bfloat16; use 'xla'"
    ):
        gated_matmul.product(x, weight, implementation="mosaic", interpret=True)


def test_scales_that_do_not_fit_are_refused():
    x, values = Quantized(jnp.ones((3, 64), "float8_e4m3fn"), jnp.ones(3)), jnp.ones((2, 96, 64), "float8_e4m3fn")
    with pytest.raises(ValueError, match=r"values are \[2, 96, 64\] and scales \[96\] for x \[3, 64\]; they are"):
        gated_matmul.scaled_product(x, values, jnp.ones(96), dtype="bfloat16", implementation="xla")


def test_plain_jax_is_the_only_candidate_for_what_the_kernel_does_not_take():
    assert gated_matmul.candidates(platform="cpu", dtype="bfloat16", width=64, hidden=64) == ("xla",)
    for dtype, hidden in (("float32", 128), ("bfloat16", 64), ("bfloat16", 160)):
        assert gated_matmul.candidates(platform="gpu", dtype=dtype, width=64, hidden=hidden) == ("xla",)
