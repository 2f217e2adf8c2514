"""Experts whose weights stay in 4 or 8 bits, by every implementation that takes them, against what NumPy makes of the stored numbers."""

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _compat
from pallas_kernels.checking import grouped_matmul as checking
from pallas_kernels.checking import quantized_matmul as quantized
from pallas_kernels.checking.grouped_matmul import routing
from pallas_kernels.checking.quantized_matmul import Shapes
from pallas_kernels.grouped_matmul import candidates, experts, packed_mosaic, packed_product
from pallas_kernels.grouped_matmul.packed import PackedExperts, pack_experts, type_of
from pallas_kernels.grouped_matmul.triton_choices import tile_of_each_expert
from pallas_kernels.quantized_matmul import DECODERS, Packed
from tests.helpers.lowering import a_gpu_to_lower_for
from tests.helpers.slow import slow_except
from tests.pallas_kernels.test_grouped_matmul import quick

needs_mosaic = pytest.mark.skipif(not _compat.has_mosaic(), reason="JAX 0.10 lacks parts of Mosaic GPU that the kernels use")
TOLERANCE = 2e-2
"""Bound of the largest difference, relative to the largest value."""
STORED = {
    "int4 by 32": Shapes("int4", 1, 1, 32),
    "int4 by 64, zeros": Shapes("int4", 1, 1, 64, "float16", has_zeros=True),
    "nvfp4": Shapes("e2m1", 1, 1, 16, "float8_e4m3fn", has_factor=True),
    "mxfp4": Shapes("e2m1", 1, 1, 32, "uint8"),
    "fp8 by output": Shapes("e4m3", 1, 1, None, "float32"),
    "fp8 by 64": Shapes("e4m3", 1, 1, 64, "float32"),
    "int8 by output": Shapes("int8", 1, 1, None),
}


def weight_and_values(shapes: Shapes, *shape: int) -> tuple[PackedExperts, np.ndarray]:
    """A packed weight [..., N, K], and float32 what its numbers stand for."""
    *lead, N, K = shape
    shapes = replace(shapes, num_outputs=int(np.prod(lead)) * N, num_inputs=K)
    stored = quantized.stored(shapes)

    def by_expert(array: Any) -> Any:
        return None if array is None else jnp.asarray(array.reshape(*lead, N, *array.shape[1:]))

    weight = jax.jit(pack_experts, static_argnums=0)(
        shapes.number, *map(by_expert, (stored.codes, stored.scale, stored.zero, stored.factor))
    )
    return weight, stored.values(shapes.number, np.arange(shapes.num_outputs)).astype(np.float32).reshape(shape)


def make_case(
    shapes: Shapes, num_tokens: int, width: int = 128, hidden: int = 64, *, num_experts: int = 3
) -> tuple[dict, dict]:
    """Arguments by name, and the same with weights in float32; the last token is padding, one expert is another device's."""
    rng = np.random.default_rng(num_tokens)
    expert_Tk, weight_Tk = routing(num_tokens, 2, num_experts + 1)
    is_real_T = np.arange(num_tokens) < max(1, num_tokens - 1)
    x_TD = np.where(is_real_T[:, None], rng.standard_normal((num_tokens, width)), np.nan)
    gate_up, down = (
        weight_and_values(shapes, num_experts, 2, hidden, width),
        weight_and_values(shapes, num_experts, width, hidden),
    )
    case = {
        "x_TD": jnp.asarray(x_TD, jnp.bfloat16),
        "expert_Tk": jnp.asarray(expert_Tk),
        "weight_Tk": jnp.asarray(weight_Tk),
        "is_real_T": jnp.asarray(is_real_T),
        "gate_up_bias_E2F": jnp.asarray(rng.standard_normal((num_experts, 2, hidden)), jnp.bfloat16),
        "down_bias_ED": jnp.asarray(rng.standard_normal((num_experts, width)), jnp.bfloat16),
        "first_expert": 1,
    }
    return tuple(case | {"gate_up_E2FD": a, "down_EDF": b} for a, b in zip(gate_up, down, strict=True))


def error(plain: dict, got: jax.Array, activation: str) -> float:
    """Relative to the largest value; infinite where padding does not give 0."""
    names = (
        "expert_Tk",
        "weight_Tk",
        "is_real_T",
        "first_expert",
        "gate_up_E2FD",
        "down_EDF",
        "gate_up_bias_E2F",
        "down_bias_ED",
    )
    return checking.host_error(plain["x_TD"], [plain[name] for name in names], got, activation=activation)


@pytest.mark.parametrize("name", slow_except(["int4 by 64, zeros"], STORED))
@pytest.mark.slow
def test_packed_weights_have_the_values_that_are_stored(name):
    weight, values = weight_and_values(STORED[name], 3, 2, 40, 192)
    assert weight.shape == (3, 2, 64, 192) and len(weight) == 3 and weight.dtype == type_of(STORED[name].number)
    wide = np.asarray(jax.jit(lambda weight: weight.astype(jnp.float32))(weight))
    np.testing.assert_allclose(wide[:, :, :40], values, rtol=3e-7)
    assert not wide[:, :, 40:].any()
    np.testing.assert_array_equal(weight[1, 0].astype(jnp.float32), wide[1, 0])


@pytest.mark.parametrize(
    ("implementation", "sizes"), slow_except([("xla", (72, 40))], product(["xla", "reference"], [(128, 64), (72, 40)]))
)
def test_plain_implementations_take_packed_weights_whatever_pads_them(implementation, sizes):
    case, plain = make_case(Shapes("int8", 1, 1, None), 9, *sizes)
    got = quick(partial(experts, implementation=implementation, activation="swiglu_clamped"))(**case)
    assert got.shape == case["x_TD"].shape and error(plain, got, "swiglu_clamped") < TOLERANCE


@needs_mosaic
@pytest.mark.parametrize(
    ("name", "num_tokens", "tile_rows"),
    slow_except(
        [("int4 by 32", 3, None)],
        [
            *((name, num_tokens, tile_rows) for name in STORED for num_tokens, tile_rows in ((3, None), (40, 64))),
            *(("mxfp4", num_tokens, None) for num_tokens in (9, 16, 17, 60, 150)),
            *(("int4 by 64, zeros", 20, tile_rows) for tile_rows in packed_mosaic.TILE_ROWS),
        ],
    ),
)
def test_kernels_are_near_the_stored_numbers(name, num_tokens, tile_rows):
    case, plain = make_case(STORED[name], num_tokens, 192, 128)
    call = partial(packed_mosaic.experts, activation="swiglu_clamped", tile_rows=tile_rows, interpret=True)
    assert error(plain, call(**case), "swiglu_clamped") < TOLERANCE


@needs_mosaic
@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(72, 40), (200, 320)])
def test_the_op_pads_what_blocks_do_not_divide(sizes):
    case, plain = make_case(Shapes("int8", 1, 1, None), 9, *sizes)
    got = experts(**case, implementation="mosaic", interpret=True)
    assert got.shape == case["x_TD"].shape and error(plain, got, "silu") < TOLERANCE


@pytest.mark.parametrize("expert_Tk", [[[0, 3], [3, 1], [5, 0]], [[4, 4], [4, 4], [4, 4]], [[7, 9], [-1, 6], [8, 7]]])
def test_each_chosen_expert_has_a_tile_with_a_row_for_every_token(expert_Tk):
    expert_P = np.array(expert_Tk).reshape(-1)
    x_TD = jnp.arange(12.0).reshape(3, 4)
    rows = tile_of_each_expert(x_TD, jnp.asarray(expert_P), 6, 8, interpret=True)
    chosen = list(dict.fromkeys(expert for expert in expert_P if 0 <= expert < 6))
    assert int(rows.num_tiles) == len(chosen)
    np.testing.assert_array_equal(rows.expert_N[: len(chosen)], chosen)
    np.testing.assert_array_equal(rows.start_N, [8 * i if i < len(chosen) else 0 for i in range(6)])
    np.testing.assert_array_equal(rows.count_N, [8 if i < len(chosen) else 0 for i in range(6)])
    for pair, expert in enumerate(expert_P):
        if expert in chosen:
            assert rows.row_P[pair] == 8 * chosen.index(expert) + pair // 2
    np.testing.assert_array_equal(rows.x_SD, np.pad(x_TD, ((0, 5), (0, 0))))


def shapes_of_a_model(number: str) -> tuple[PackedExperts, PackedExperts]:
    """Gate and up, and down, of 8 experts 2880 wide, with scales and zeros in groups of 16."""
    words = jax.ShapeDtypeStruct((8, 2, 45, 45, 128 * DECODERS[number].bits), jnp.int32)
    scale = jax.ShapeDtypeStruct((8, 2, 180, 2880), jnp.bfloat16)
    both = PackedExperts(Packed(words, scale, scale, None, number))
    return both, jax.tree.map(lambda array: jax.ShapeDtypeStruct((8, *array.shape[2:]), array.dtype), both)


@needs_mosaic
@pytest.mark.parametrize(("number", "num_tokens"), [*product(DECODERS, [8]), ("int4", 60), ("e4m3", 600)])
def test_kernels_lower_for_a_gpu(number, num_tokens):
    """Where there is none: their code in registers, too."""
    shapes = {"x_TD": (num_tokens, 2880), "expert_Tk": (num_tokens, 2), "weight_Tk": (num_tokens, 2)}
    types = {"x_TD": jnp.bfloat16, "expert_Tk": jnp.int32, "weight_Tk": jnp.float32}
    case: dict = {name: jax.ShapeDtypeStruct(shape, types[name]) for name, shape in shapes.items()}
    case["gate_up_E2FD"], case["down_EDF"] = shapes_of_a_model(number)
    with a_gpu_to_lower_for():
        lowered = jax.jit(partial(experts, implementation="mosaic")).trace(**case).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("mosaic_gpu") >= 2, "a kernel for each product"


def test_every_tile_fits_into_shared_memory_with_stages_to_spare():
    for number in DECODERS:
        for weight in shapes_of_a_model(number):
            for tile_rows in (8, *packed_mosaic.TILE_ROWS):
                picked = []
                jax.eval_shape(
                    lambda weight, rows=tile_rows, picked=picked: picked.append(packed_product.pick_sizes(rows, weight)), weight
                )
                (sizes,) = picked
                assert sizes.num_stages >= 3
                assert sizes.step_tiles % sizes.num_shares == 0


def test_packed_weights_are_refused_where_they_do_not_fit():
    case, _ = make_case(STORED["int4 by 32"], 5)
    with pytest.raises(ValueError, match="must both be arrays or both be in 4 bits, or both packed"):
        experts(**{**case, "down_EDF": jnp.zeros((3, 128, 64), jnp.bfloat16)})
    with pytest.raises(ValueError, match=r"gate_up_E2FD is \[3, 2, 64, 128\], expected \[3, 2, 128, 128\]"):
        experts(**{**case, "down_EDF": weight_and_values(STORED["int4 by 32"], 3, 128, 128)[0]})
    with pytest.raises(
        ValueError, match="'triton' of experts does not take experts of width 64 .* weights in packed int4; use 'xla'"
    ):
        experts(**case, implementation="triton")


@needs_mosaic
def test_packed_weights_have_kernels_in_bfloat16_alone():
    case = {"platform": "gpu", "dtype": "bfloat16", "weight_dtype": type_of("int4"), "width": 2048, "hidden": 768}
    assert candidates(**case) == ("mosaic", "xla")
    for other in ({"dtype": "float16"}, {"weight_dtype": "packed uint4"}, {"platform": "cpu"}):
        assert candidates(**{**case, **other}) == ("xla",)


@pytest.mark.slow
@pytest.mark.parametrize("number", ["int4", "e4m3", "nf4"])
def test_cases_at_start_are_right_in_plain_jax(number):
    stored = checking.Stored(number, 32), checking.Stored(number, None)
    shapes = checking.Shapes("bfloat16", 4, 2, 72, 40, has_biases=True, stored=stored)
    for case in checking.cases(shapes, "xla", interpret=True):
        carry, constants = case.make()
        assert case.error(carry, constants, quick(case.variants["xla"])(carry, *constants)) <= case.tolerance
