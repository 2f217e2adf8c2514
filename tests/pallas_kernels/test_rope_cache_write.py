"""Norm, rotation and cache write in one: against loops in float64, and the kernel against the plain steps."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.rope_cache_write import IMPLEMENTATIONS, choose, rope_and_write
from pallas_kernels.rope_cache_write.triton import Tiles, pick_tiles
from pallas_kernels.rope_cache_write.triton import rope_and_write as triton_rope_and_write
from tests.helpers.slow import slow_except

ULP = {"float32": 2.0**-21, "bfloat16": 2.0**-7, "float8_e4m3fn": 2.0**-3}
"""Relative to the largest mantissa, with a margin for the order of float32 sums."""


def make_case(
    num_tokens: int = 11,
    num_kv_heads: int = 3,
    num_groups: int = 3,
    head_dim: int = 16,
    page_size: int = 8,
    dtype: str = "float32",
    cache_dtype: str | None = None,
    norm: bool = False,
):
    """Random arguments, by name; several tokens share a page, two of them are written nowhere."""
    rng = np.random.default_rng(head_dim + num_tokens)

    def normal(*shape: int, dtype: str = dtype):
        return jnp.asarray(rng.normal(size=shape), dtype)

    num_pages = -(-num_tokens // page_size) + 2
    angles = rng.normal(size=(num_tokens, head_dim // 2)) * 10
    case = {
        "qkv_TKGH": normal(num_tokens, num_kv_heads, num_groups + 2, head_dim),
        "cos_TH": jnp.asarray(np.cos(angles), jnp.float32),
        "sin_TH": jnp.asarray(np.sin(angles), jnp.float32),
        "k_pages_PKSH": normal(num_pages, num_kv_heads, page_size, head_dim, dtype=cache_dtype or dtype),
        "v_pages_PKSH": normal(num_pages, num_kv_heads, page_size, head_dim, dtype=cache_dtype or dtype),
        "slot_T": jnp.asarray(rng.permutation(num_pages * page_size)[:num_tokens].astype(np.int32)),
    }
    if num_tokens > 5:
        case["slot_T"] = case["slot_T"].at[jnp.array([2, 5])].set(jnp.array([-1, -100]))
    if norm:
        case |= {"q_norm_H": normal(head_dim), "k_norm_H": normal(head_dim), "eps": 1e-5}
        case["norm_offset"] = float(page_size == 16)
    return case


def run(implementation: str, case: dict, **options):
    options |= {name: case[name] for name in ("eps", "norm_offset") if name in case}
    call = functools.partial(rope_and_write, implementation=implementation, interpret=True, **options)
    return jax.jit(call)(**{name: x for name, x in case.items() if name not in options})


def naive(case: dict, k_scale: float = 1.0, v_scale: float = 1.0):
    """In float64, rounded only where a type is reached; caches as float64."""
    dtype, cache_dtype = case["qkv_TKGH"].dtype, case["k_pages_PKSH"].dtype
    qkv, k_pages, v_pages = (np.asarray(case[name], np.float64) for name in ("qkv_TKGH", "k_pages_PKSH", "v_pages_PKSH"))
    k_pages, v_pages = k_pages.copy(), v_pages.copy()
    num_tokens, num_kv_heads, num_slices, head_dim = qkv.shape
    out = np.zeros((num_tokens, num_kv_heads, num_slices - 2, head_dim))
    for token, slot in enumerate(np.asarray(case["slot_T"])):
        turn = np.asarray(case["cos_TH"][token], np.float64) + 1j * np.asarray(case["sin_TH"][token], np.float64)
        page, offset = divmod(int(slot), k_pages.shape[2])
        for head in range(num_kv_heads):
            for place in range(num_slices - 1):
                x = qkv[token, head, place]
                weight = case.get("q_norm_H" if place < num_slices - 2 else "k_norm_H")
                if weight is not None:
                    x = x / np.sqrt(np.mean(x * x) + case["eps"]) * (np.asarray(weight, np.float64) + case["norm_offset"])
                    x = x.astype(dtype).astype(np.float64)
                turned = (x[: head_dim // 2] + 1j * x[head_dim // 2 :]) * turn
                x = np.concatenate([turned.real, turned.imag]).astype(dtype).astype(np.float64)
                if place < num_slices - 2:
                    out[token, head, place] = x
                elif slot >= 0:
                    k_pages[page, head, offset] = to_cache(x, k_scale, cache_dtype)
            if slot >= 0:
                v_pages[page, head, offset] = to_cache(qkv[token, head, -1], v_scale, cache_dtype)
    return out, k_pages, v_pages


def to_cache(x: np.ndarray, scale: float, dtype: np.dtype) -> np.ndarray:
    if dtype == ml_dtypes.float8_e4m3fn:
        x = np.clip(x / np.float64(np.float32(scale)), -448, 448)
    return x.astype(dtype).astype(np.float64)


def assert_close(got, expected, types) -> None:
    for one, right, dtype in zip(got, expected, types, strict=True):
        assert one.dtype == jnp.dtype(dtype)
        # Two products may cancel: a unit in the last place is that of what was added.
        np.testing.assert_allclose(np.asarray(one, np.float64), right, rtol=ULP[dtype], atol=2.0**-20)


CASES = {
    "float32": {},
    "float32 norm h80": {"norm": True, "head_dim": 80},
    "bfloat16 g4": {"dtype": "bfloat16", "num_groups": 4, "num_kv_heads": 4, "head_dim": 64},
    "bfloat16 norm h96 page16": {"dtype": "bfloat16", "norm": True, "head_dim": 96, "page_size": 16},
    "bfloat16 norm h10 page64": {"dtype": "bfloat16", "norm": True, "head_dim": 10, "page_size": 64, "num_groups": 1},
    "bfloat16 to float32, one token": {"dtype": "bfloat16", "cache_dtype": "float32", "num_tokens": 1, "page_size": 32},
    "one head": {"num_kv_heads": 1, "num_groups": 9, "head_dim": 8},
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", slow_except(["float32 norm h80", "bfloat16 g4"], CASES))
def test_matches_loops_in_float64(implementation: str, name: str) -> None:
    options = CASES[name]
    case = make_case(**options)
    dtype = options.get("dtype", "float32")
    cache_dtype = options.get("cache_dtype", dtype)
    assert_close(run(implementation, case), naive(case), (dtype, cache_dtype, cache_dtype))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("scales", [{}, {"k_scale": 0.01, "v_scale": jnp.float32(0.3)}], ids=["1", "a number and an array"])
@pytest.mark.slow
def test_values_of_a_float8_cache_are_scaled_and_limited(implementation: str, scales: dict) -> None:
    case = make_case(dtype="bfloat16", cache_dtype="float8_e4m3fn", norm=True)
    case["qkv_TKGH"] = case["qkv_TKGH"].at[0, 0, -1, 0].set(1e6)  # beyond the largest
    case["slot_T"] = case["slot_T"].at[0].set(3)
    case["slot_T"] = case["slot_T"].at[1:].set(jnp.where(case["slot_T"][1:] == 3, -1, case["slot_T"][1:]))
    got = run(implementation, case, **scales)
    expected = naive(case, **{name: float(scale) for name, scale in scales.items()})
    assert_close(got, expected, ("bfloat16", "float8_e4m3fn", "float8_e4m3fn"))
    assert got[2][0, 0, 3, 0] == 448


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padding_is_written_nowhere_and_its_queries_are_computed(implementation: str) -> None:
    case = make_case()
    expected = naive(case)[0]
    case["slot_T"] = jnp.full_like(case["slot_T"], -1)
    q, k_pages, v_pages = run(implementation, case)
    np.testing.assert_allclose(q, expected, atol=1e-6)
    np.testing.assert_array_equal(k_pages, case["k_pages_PKSH"])
    np.testing.assert_array_equal(v_pages, case["v_pages_PKSH"])


@pytest.mark.parametrize("tiles", slow_except([Tiles(2, 4)], [Tiles(1, 1), Tiles(2, 4), Tiles(8, 2)]), ids=str)
def test_every_tiling_gives_the_same(tiles: Tiles) -> None:
    case = make_case(norm=True, dtype="bfloat16", num_kv_heads=5)
    static = {name: case[name] for name in ("eps", "norm_offset")}
    arrays = {name: x for name, x in case.items() if name not in static}
    got = jax.jit(functools.partial(triton_rope_and_write, interpret=True, tiles=tiles, **static))(**arrays)
    assert_close(got, naive(case), ("bfloat16",) * 3)


def test_tiles_stay_within_registers() -> None:
    for num_tokens in (1, 64, 8192):
        for num_kv_heads, num_groups, head_dim in (
            (8, 4, 128),
            (8, 4, 64),
            (1, 71, 64),
            (8, 16, 256),
            (3, 3, 80),
            (32, 1, 128),
        ):
            tiles = pick_tiles(num_tokens, num_kv_heads, num_groups, head_dim)
            lanes = tiles.kv_heads * (1 << (num_groups - 1).bit_length()) * (1 << (head_dim - 1).bit_length())
            assert lanes // (32 * tiles.num_warps) <= 64


def test_donated_caches_are_written_in_place() -> None:
    case = make_case(num_tokens=4, page_size=64, num_kv_heads=8)
    program = jax.jit(rope_and_write, donate_argnums=(3, 4)).lower(*case.values()).compile()
    assert program.memory_analysis().alias_size_in_bytes == 2 * case["k_pages_PKSH"].nbytes


def test_a_machine_without_a_gpu_takes_the_plain_steps() -> None:
    options = {"dtype": "bfloat16", "cache_dtype": "bfloat16", "cache_size": 1 << 20, "head_dim": 128}
    assert choose(platform="cpu", **options) == "xla"
    assert choose(platform="gpu", **options) == "triton"
    assert choose(platform="gpu", **options | {"cache_dtype": "int8"}) == "xla"


@pytest.mark.parametrize(
    ("cache_dtype", "cache_bytes", "taken"),
    [("bfloat16", 2**32, True), ("bfloat16", 2**34, True), ("float8_e4m3fn", 2**31, True), ("float8_e4m3fn", 3 * 2**30, False)],
)
def test_pools_that_32_bits_cannot_count_are_left_to_xla(cache_dtype: str, cache_bytes: int, taken: bool) -> None:
    size = cache_bytes // jnp.dtype(cache_dtype).itemsize
    chosen = choose(platform="gpu", dtype="bfloat16", cache_dtype=cache_dtype, cache_size=size, head_dim=128)
    assert (chosen == "triton") == taken


def test_what_is_not_taken_is_refused_by_name() -> None:
    case = make_case(norm=True)
    with pytest.raises(ValueError, match="no implementation 'cuda' of rope_and_write; there are xla, triton"):
        rope_and_write(**case, implementation="cuda")
    with pytest.raises(ValueError, match="scale are for a cache of float8_e4m3fn, this one is float32; leave them out"):
        rope_and_write(**case, k_scale=1.0)
    with pytest.raises(ValueError, match="only one of q_norm_H and k_norm_H"):
        rope_and_write(**case | {"k_norm_H": None})
    with pytest.raises(
        ValueError,
        match="'triton' of rope_and_write does not take heads of width 16 in float32 with a cache of [0-9]* values of int8",
    ):
        rope_and_write(
            **case
            | {"k_pages_PKSH": case["k_pages_PKSH"].astype(jnp.int8), "v_pages_PKSH": case["v_pages_PKSH"].astype(jnp.int8)},
            implementation="triton",
        )
