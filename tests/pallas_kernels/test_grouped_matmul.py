"""The experts of a mixture, by every implementation, against loops over tokens in float64; the plan against a plain sort."""

import math
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _compat
from pallas_kernels.checking.grouped_matmul import packed
from pallas_kernels.grouped_matmul import (
    candidates,
    choose,
    experts,
    mosaic,
    mosaic_many,
    mxfp4,
    mxfp4_triton,
    triton,
    triton_few,
    triton_rows,
)
from pallas_kernels.grouped_matmul import tiles as tiles_module
from pallas_kernels.grouped_matmul.plan import local_experts, make_plan, max_tiles
from tests.helpers.slow import slow_except

needs_mosaic = pytest.mark.skipif(not _compat.has_mosaic(), reason="JAX 0.10 lacks parts of Mosaic GPU that the kernel uses")
TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 2e-2}
"""Bound of the largest difference, relative to the largest value."""


def make_case(
    num_tokens: int = 9,
    num_choices: int = 2,
    num_experts: int = 5,
    width: int = 32,
    hidden: int = 24,
    dtype: str = "float32",
    bias: bool = False,
    padding: int = 0,
    only: int | None = None,
    all_experts: int | None = None,
    four_bits: bool = False,
    **options,
):
    """Random arguments, by name. only: the expert of every token's first choice. all_experts: of all devices together."""
    rng = np.random.default_rng(num_tokens + num_experts)
    total = all_experts or num_experts
    expert_Tk = np.stack([rng.permutation(total)[:num_choices] for _ in range(num_tokens)]).astype(np.int32)
    if only is not None:
        expert_Tk[:, 0] = only

    def normal(*shape: int, dtype: str = dtype, scale: float = 1.0):
        return jnp.asarray(rng.normal(size=shape) * scale, dtype)

    case = {
        "x_TD": normal(num_tokens, width),
        "expert_Tk": jnp.asarray(expert_Tk),
        "weight_Tk": jnp.asarray(rng.uniform(0.1, 1, (num_tokens, num_choices)), jnp.float32),
        "gate_up_E2FD": normal(num_experts, 2, hidden, width, scale=3 / math.sqrt(width)),
        "down_EDF": normal(num_experts, width, hidden, scale=1 / math.sqrt(hidden)),
    }
    if four_bits:
        case |= {
            "gate_up_E2FD": packed(num_experts, 2, hidden, width),
            "down_EDF": packed(num_experts, width, hidden, seed=1),
        }
    if bias:
        case |= {"gate_up_bias_E2F": normal(num_experts, 2, hidden), "down_bias_ED": normal(num_experts, width)}
    if padding:
        case["is_real_T"] = jnp.arange(num_tokens) < num_tokens - padding
        case["x_TD"] = case["x_TD"].at[num_tokens - padding :].set(jnp.nan)
    return case | options


def naive(case: dict) -> np.ndarray:
    """One token and choice at a time, nothing rounded."""
    wide = {name: np.asarray(x.astype("float32"), np.float64) for name, x in case.items() if name.endswith(("D", "F", "k"))}
    out_TD = np.zeros_like(wide["x_TD"])
    is_real_T = np.asarray(case.get("is_real_T", np.ones(len(out_TD), bool)))
    for token, choice in np.argwhere(is_real_T[:, None] & np.ones_like(wide["expert_Tk"], bool)):
        expert = int(wide["expert_Tk"][token, choice]) - case.get("first_expert", 0)
        if not 0 <= expert < len(wide["down_EDF"]):
            continue
        gate, up = wide["gate_up_E2FD"][expert] @ wide["x_TD"][token]
        if "gate_up_bias_E2F" in wide:
            gate, up = (gate, up) + wide["gate_up_bias_E2F"][expert]
        match case.get("activation", "silu"):
            case "silu":
                middle = gate / (1 + np.exp(-gate)) * up
            case "gelu_tanh":
                middle = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
            case "swiglu_clamped":
                gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
                middle = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
        out = wide["down_EDF"][expert] @ middle
        if "down_bias_ED" in wide:
            out += wide["down_bias_ED"][expert]
        out_TD[token] += wide["weight_Tk"][token, choice] * out
    return out_TD


def error(case: dict, got: jax.Array) -> float:
    exact = naive(case)
    assert got.shape == exact.shape and got.dtype == case["x_TD"].dtype
    return float(np.abs(np.asarray(got, np.float64) - exact).max() / max(np.abs(exact).max(), 1e-30))


def run(implementation: str, case: dict, **options) -> jax.Array:
    static = {name: case[name] for name in ("activation",) if name in case}
    call = partial(experts, implementation=implementation, interpret=True, **static, **options)
    return quick(call)(**{name: x for name, x in case.items() if name not in static})


def quick(function):
    """Compiled in a hurry: what the tests run is small."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


CASES = {
    "one token": partial(make_case, 1),
    "few tokens": partial(make_case, 9),
    "bfloat16": partial(make_case, 9, dtype="bfloat16"),
    "float16": partial(make_case, 9, dtype="float16"),
    "many tokens": partial(make_case, 150, num_choices=3, num_experts=6),
    "one expert has all tokens": partial(make_case, 40, only=3),
    "one expert": partial(make_case, 7, num_choices=1, num_experts=1),
    "padding": partial(make_case, 13, padding=6),
    "all is padding": partial(make_case, 3, padding=3),
    "biases": partial(make_case, 9, bias=True),
    "gelu": partial(make_case, 9, activation="gelu_tanh"),
    "clamped swiglu with biases": partial(make_case, 9, bias=True, activation="swiglu_clamped"),
    "experts of another device": partial(
        make_case, 21, num_experts=3, all_experts=12, first_expert=6, num_choices=4, padding=2
    ),
    "widths that are no multiple of a tile": partial(make_case, 5, width=45, hidden=11, bias=True),
}


ALL_THERE_IS = {
    "num_choices": 4,
    "num_experts": 3,
    "all_experts": 6,
    "first_expert": 2,
    "width": 160,
    "hidden": 96,
    "dtype": "bfloat16",
    "bias": True,
    "padding": 2,
    "activation": "swiglu_clamped",
    "four_bits": True,
}
FOUR_BITS = {
    "one token": partial(make_case, 1, num_experts=4, width=96, hidden=64, dtype="bfloat16", bias=True, four_bits=True),
    "few tokens": partial(make_case, 11, **ALL_THERE_IS),
    "all there is": partial(make_case, 21, **ALL_THERE_IS),
}


@pytest.mark.parametrize(
    ("name", "implementation"),
    slow_except([("one token", "triton")], [*product(FOUR_BITS, ["xla", "triton"]), ("all there is", "reference")]),
)
def test_weights_in_four_bits_against_loops(name, implementation):
    case = FOUR_BITS[name]()
    assert error(case, run(implementation, case)) < TOLERANCE["bfloat16"]


@pytest.mark.parametrize("implementation", ["reference", "xla", "triton"])
@pytest.mark.parametrize(
    "options",
    [
        {"num_tokens": 9, "padding": 4},
        pytest.param(
            {"num_tokens": 3, "padding": 2, "dtype": "bfloat16", "hidden": 32, "four_bits": True}, marks=pytest.mark.slow
        ),
    ],
)
@pytest.mark.slow
def test_padding_may_have_chosen_no_expert(options, implementation):
    """In place of `is_real_T`: -1, as the choice writes for it."""
    case = make_case(**options)
    chosen = {name: x for name, x in case.items() if name != "is_real_T"}
    chosen["expert_Tk"] = jnp.where(case["is_real_T"][:, None], case["expert_Tk"], -1)
    assert error(case, run(implementation, chosen)) < TOLERANCE[str(case["x_TD"].dtype)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tiles", "max_few_pairs"), [(triton.Tiles(4, 16, 32, 2, 2), 1000), (triton.Tiles(16, 32, 64, 2, 2), 0)]
)
def test_four_bits_in_any_tiles(tiles, max_few_pairs):
    case = FOUR_BITS["all there is"]()
    activation = case.pop("activation")
    options = {"interpret": True, "activation": activation, "max_few_pairs": max_few_pairs}
    got = quick(partial(mxfp4_triton.experts, tiling=triton.Tiling(tiles, tiles), **options))(**case)
    assert error(case | {"activation": activation}, got) < TOLERANCE["bfloat16"]


@pytest.mark.slow
def test_many_pairs_are_computed_with_widened_weights(monkeypatch):
    monkeypatch.setattr(mxfp4, "MAX_PAIRS_OF_EXPERT", 1)
    case = FOUR_BITS["all there is"]()
    assert error(case, run("triton", case)) < TOLERANCE["bfloat16"]


@pytest.mark.slow
def test_four_bits_are_packed_and_unpacked():
    """Every byte at every place of a block."""
    blocks = np.stack([np.roll(np.arange(256, dtype=np.uint8), i) for i in range(16)], axis=1).reshape(4, 64, 16)
    words = jax.jit(mxfp4.pack)(blocks)
    np.testing.assert_array_equal(jax.jit(mxfp4.unpack)(words), blocks)
    exponents = np.arange(100, 100 + 256, dtype=np.uint32).reshape(4, 64).astype(np.uint8) % 60 + 100
    wide = np.asarray(jax.jit(lambda *stored: mxfp4.Mxfp4(*stored).astype("float32"))(words, exponents.T))
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(4, 64, 32)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7] * np.where(codes & 8, -1, 1)
    np.testing.assert_array_equal(wide, (values * 2.0 ** (exponents[..., None] - 127.0)).reshape(4, -1))


@pytest.mark.parametrize(
    ("name", "implementation"),
    slow_except(
        product(("few tokens", "padding", "clamped swiglu with biases", "experts of another device"), ("xla", "triton")),
        [(name, "triton") for name in CASES]
        + [(name, "xla") for name in CASES if name not in ("one token", "float16", "one expert", "gelu")]
        + [(name, "reference") for name in ("padding", "gelu", "clamped swiglu with biases", "experts of another device")],
    ),
)
def test_experts_against_loops(name, implementation):
    case = CASES[name]()
    assert error(case, run(implementation, case)) < TOLERANCE[str(case["x_TD"].dtype)]


@pytest.mark.parametrize("num_tokens", slow_except([11], [1, 11]))
@pytest.mark.slow
def test_triton_with_a_plan_computes_what_it_does_without(num_tokens, monkeypatch):
    """So do experts that fill more than one tile, and tiles that are narrower than the widths."""
    case = make_case(num_tokens, bias=True, padding=num_tokens // 3, only=2)
    tiles = triton.Tiles(4, 16, 16)
    options = {name: case.pop(name) for name in list(case) if name.endswith(("E2F", "_ED", "real_T"))}
    monkeypatch.setattr(triton, "_COMPARED", 16)  # pairs in several parts
    for max_few_pairs in (0, 1000):
        call = partial(triton.experts, interpret=True, tiling=triton.Tiling(tiles, tiles), max_few_pairs=max_few_pairs)
        assert error(case | options, quick(call)(**case, **options)) < TOLERANCE["float32"]


def test_tiles_fit_into_the_shared_memory_of_every_gpu(monkeypatch):
    monkeypatch.setattr(tiles_module, "_has_large_shared_memory", lambda: False)
    tilings = [triton.pick_tiling(num_pairs, 128, 768, itemsize=2) for num_pairs in (64, 1000, 8000, 60000)]
    for tiling in (triton_few.pick_few_tiling(itemsize=2), *tilings):
        for tiles, num_matrices in ((tiling.gate_up, 2), (tiling.down, 1)):
            size = 2 * tiles.num_stages * tiles.block_k * (tiles.block_m + num_matrices * tiles.block_n)
            assert size <= tiles_module.SMALL_SMEM_BYTES and tiles.num_stages >= 2


MOSAIC_CASES = {
    "several tiles of an expert": partial(
        make_case, 150, num_choices=2, num_experts=3, width=128, hidden=64, dtype="bfloat16", only=1
    ),
    "biases, padding, other devices": partial(
        make_case,
        70,
        num_experts=2,
        all_experts=3,
        first_expert=1,
        width=192,
        hidden=192,
        dtype="float16",
        bias=True,
        padding=9,
        activation="swiglu_clamped",
    ),
    "few rows": partial(make_case, 3, width=64, hidden=128, dtype="bfloat16"),
}


@needs_mosaic
@pytest.mark.parametrize("name", MOSAIC_CASES)
def test_mosaic_in_the_interpreter(name):
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    case = MOSAIC_CASES[name]()
    static = {"activation": case["activation"]} if "activation" in case else {}
    params = _compat.mosaic().InterpretGPUParams(out_of_bounds_reads="uninitialized", detect_races=True)
    call = partial(mosaic.experts, interpret=params, min_pairs_of_expert=0, **static)
    got = jax.jit(call)(**{name: x for name, x in case.items() if name not in static})
    assert error(case, got) < TOLERANCE[str(case["x_TD"].dtype)]
    assert not gpu_callbacks.get_races().races_found


@pytest.mark.parametrize("num_columns", [64, 192, 704, 768, 1408, 2048, 2880, 4096])
@pytest.mark.parametrize("num_matrices", [1, 2])
def test_mosaic_blocks_divide_the_columns_and_fit_into_shared_memory(num_columns, num_matrices):
    sizes = mosaic_many.pick_sizes(num_columns, num_matrices)
    assert num_columns % sizes.columns == 0 and num_matrices * sizes.columns <= 256
    assert sizes.smem_bytes(num_matrices) <= mosaic_many.SMEM_BYTES


def test_a_choice_made_twice_counts_twice():
    case = make_case(4, num_choices=2, only=1)
    case["expert_Tk"] = case["expert_Tk"].at[:, 1].set(1)
    assert error(case, run("xla", case)) < TOLERANCE["float32"]


@pytest.mark.parametrize(("num_pairs", "num_experts", "tile_rows"), [(1, 4, 8), (200, 7, 16), (64, 300, 8), (96, 1, 32)])
def test_plan_puts_every_pair_into_one_tile_of_its_expert(num_pairs, num_experts, tile_rows):
    rng = np.random.default_rng(0)
    expert_P = rng.integers(0, num_experts + 1, num_pairs)
    make = jax.jit(partial(make_plan, num_experts=num_experts, tile_rows=tile_rows))
    plan = jax.tree.map(np.asarray, vars(make(jnp.asarray(expert_P, jnp.int32))))
    found = {}
    for expert, start, count in zip(plan["expert_N"], plan["start_N"], plan["count_N"], strict=True):
        assert 0 <= count <= tile_rows and (expert == num_experts) == (count == 0)
        assert (start - plan["start_N"][plan["expert_N"] == expert][0]) % tile_rows == 0
        found |= {int(pair): int(expert) for pair in plan["pair_P"][start : start + count]}
    assert found == {pair: expert for pair, expert in enumerate(expert_P) if expert < num_experts}
    assert len(plan["expert_N"]) == max_tiles(num_pairs, num_experts, tile_rows)


@pytest.mark.parametrize(
    ("num_tokens", "num_choices", "num_experts", "alignment"), slow_except([(300, 2, 7, 8)], [(300, 2, 7, 8), (90, 3, 300, 1)])
)
def test_rows_are_sorted_by_expert_and_summed_back(num_tokens, num_choices, num_experts, alignment):
    rng = np.random.default_rng(0)
    expert_P = jnp.asarray(rng.integers(-1, num_experts + 1, num_tokens * num_choices), jnp.int32)
    x_TD = jnp.asarray(rng.normal(size=(num_tokens, 24)), jnp.float32)
    weight_Tk = jnp.asarray(rng.uniform(size=(num_tokens, num_choices)), jnp.float32)
    sizes = {"num_experts": num_experts, "tile_rows": 16, "alignment": alignment}
    rows = quick(partial(triton_rows.sort_rows, **sizes, interpret=True))(x_TD, expert_P)
    is_here_P = np.asarray((expert_P >= 0) & (expert_P < num_experts))
    tiles, row_P, next_row = [], np.zeros(len(expert_P), int), 0
    for expert in range(num_experts):
        (pairs,) = np.nonzero(np.asarray(expert_P) == expert)
        row_P[pairs] = next_row + np.arange(len(pairs))
        tiles += [(expert, next_row + i, min(16, len(pairs) - i)) for i in range(0, len(pairs), 16)]
        next_row += -(-len(pairs) // alignment) * alignment
    found = np.stack([rows.expert_N, rows.start_N, rows.count_N], axis=1)
    assert rows.num_tiles == len(tiles) and found[: len(tiles)].tolist() == [list(tile) for tile in tiles]
    assert (found[len(tiles) :] == (num_experts, 0, 0)).all() and next_row <= len(rows.x_SD)
    np.testing.assert_array_equal(np.asarray(rows.row_P)[is_here_P], row_P[is_here_P])
    np.testing.assert_array_equal(np.asarray(rows.x_SD)[row_P[is_here_P]], np.repeat(x_TD, num_choices, axis=0)[is_here_P])
    sum_rows = quick(partial(triton_rows.sum_rows, num_experts=num_experts, interpret=True))
    weight_T = np.where(is_here_P.reshape(weight_Tk.shape), weight_Tk, 0).sum(axis=1)
    got_TD = sum_rows(rows.x_SD, rows.row_P, expert_P, weight_Tk)
    np.testing.assert_allclose(got_TD, np.asarray(x_TD) * weight_T[:, None], rtol=1e-5)


def test_local_experts_leave_out_padding_and_other_devices():
    expert_Tk = jnp.array([[0, 5], [6, 4], [4, 5]])
    got = local_experts(expert_Tk, jnp.array([True, True, False]), first_expert=4, num_experts=2)
    assert np.where((got >= 0) & (got < 2), got, 2).tolist() == [2, 1, 2, 0, 2, 2]


def test_bad_input_is_named():
    case = make_case()
    with pytest.raises(ValueError, match="no activation 'relu' of experts; there are silu"):
        experts(**case, activation="relu")
    with pytest.raises(ValueError, match=r"down_bias_ED is \[5, 31\], expected \[5, 32\]"):
        experts(**case, down_bias_ED=jnp.zeros((5, 31)))
    with pytest.raises(ValueError, match="must both be arrays or both be in 4 bits"):
        experts(**{**case, "down_EDF": packed(5, 32, 24 + 8)})
    with pytest.raises(ValueError, match="no implementation 'cuda' of experts"):
        experts(**case, implementation="cuda")


def test_a_kernel_is_chosen_on_its_own_only_where_it_was_verified():
    case = {"dtype": jnp.bfloat16, "weight_dtype": jnp.bfloat16, "width": 2048, "hidden": 768}
    assert candidates(platform="cpu", **case) == ("xla",)
    four_bits = {**case, "weight_dtype": "float4_e2m1fn"}
    assert "triton" in candidates(platform="gpu", **four_bits)
    assert candidates(platform="gpu", **{**four_bits, "dtype": "float32"}) == ("xla",)
    assert choose(platform="gpu", **case) == "xla", "this machine's device has no record"
