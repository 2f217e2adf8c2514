"""Products of few rows against the plain reference: sizes that do not divide, splits, both ways of adding them, float8 weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import skinny_matmul
from pallas_kernels.skinny_matmul import reference, triton
from pallas_kernels.skinny_matmul.triton import Tiles, pick_tiles

EPS = 1e-5
LIMITS = {"float32": 1e-6, "bfloat16": 6e-3}


def normal(seed: int, *shape: int, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def check(name: str, *args: jax.Array, dtype: str, tiles: Tiles | None = None, **options) -> None:
    found = getattr(triton, name)(*args, **options, tiles=tiles, interpret=True)
    expected = np.asarray(jax.jit(functools.partial(getattr(reference, name), **options))(*args), np.float64)
    assert found.dtype == ("float32" if name == "norm_logits" else dtype) and found.shape == expected.shape
    error = np.linalg.norm(np.asarray(found, np.float64) - expected) / np.linalg.norm(expected)
    assert error < LIMITS[dtype]


@pytest.mark.parametrize(
    ("num_rows", "d", "n", "dtype", "num_splits"),
    [(1, 32, 32, "bfloat16", 1), (5, 100, 40, "float32", 1), (33, 72, 40, "bfloat16", 3)],
)
def test_norm_matmul_with_a_bias(num_rows: int, d: int, n: int, dtype: str, num_splits: int) -> None:
    x, w, g, b = (normal(i, *s, dtype=dtype) for i, s in enumerate([(num_rows, d), (d, n), (d,), (n,)]))
    check("norm_matmul", x, w, norm_weight_D=g, eps=EPS, bias_F=b, tiles=Tiles(32, 32, num_splits), dtype=dtype)


@pytest.mark.parametrize(("num_rows", "dtype", "num_splits"), [(3, "float32", 2), (64, "bfloat16", 1)])
def test_norm_gate_up(num_rows: int, dtype: str, num_splits: int) -> None:
    x, w, g, b = (normal(i, *s, dtype=dtype) for i, s in enumerate([(num_rows, 72), (72, 2, 56), (72,), (2, 56)]))
    check("norm_gate_up", x, w, norm_weight_D=g, eps=EPS, bias_2F=b, tiles=Tiles(32, 32, num_splits), dtype=dtype)


@pytest.mark.parametrize(("num_rows", "dtype", "num_splits"), [(17, "float32", 1), (2, "bfloat16", 4)])
def test_matmul_residual(num_rows: int, dtype: str, num_splits: int) -> None:
    x, w, r = (normal(i, *s, dtype=dtype) for i, s in enumerate([(num_rows, 136), (136, 48), (num_rows, 48)]))
    check("matmul_residual", x, w, r, tiles=Tiles(32, 32, num_splits), dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_norm_logits(dtype: str) -> None:
    x, w, g = (normal(i, *s, dtype=dtype) for i, s in enumerate([(4, 40), (67, 40), (40,)]))
    check("norm_logits", x, w, norm_weight_D=g, eps=EPS, tiles=Tiles(64, 32), dtype=dtype)


def test_counters_give_the_same_as_a_second_kernel_and_are_left_at_zero() -> None:
    x, w, r = normal(0, 5, 136), normal(1, 136, 48), normal(2, 5, 48)
    tiles = Tiles(32, 32, 3)
    counters = jnp.zeros((4,), jnp.int32)
    found, counters = triton.matmul_residual(x, w, r, tiles=tiles, counters=counters, interpret=True)
    np.testing.assert_array_equal(found, triton.matmul_residual(x, w, r, tiles=tiles, interpret=True))
    assert not counters.any()


def test_float8_weights_are_scaled_by_column() -> None:
    x, scale = normal(0, 4, 72, dtype="bfloat16"), jnp.linspace(0.5, 2, 48, dtype=jnp.float32)
    w = normal(1, 72, 48).astype(jnp.float8_e4m3fn)
    check("norm_matmul", x, w, weight_scale_F=scale, tiles=Tiles(32, 32), dtype="bfloat16")


def test_sizes_for_real_shapes_fill_the_chip_in_one_wave_and_fit_it() -> None:
    for d, n, parts in ((4096, 6144, 1), (4096, 4096, 1), (4096, 14336, 2), (14336, 4096, 1), (2048, 2048, 1), (2048, 8192, 2)):
        for num_rows in (8, 16, 32, 64, 128):
            tiles = pick_tiles(num_rows, d, n, num_parts=parts)
            programs = -(-n // tiles.block_n) * tiles.num_splits
            assert 90 <= programs <= 264
            step = tiles.block_k * (tiles.block_n * parts + max(16, num_rows)) * 2
            assert step * (tiles.num_stages - (num_rows < 64)) * -(-programs // 132) <= 227 << 10
            assert tiles.num_stages >= 4


def test_what_is_not_taken_is_refused_with_a_way_out() -> None:
    x, w = normal(0, 4, 64), normal(1, 64, 32)
    with pytest.raises(ValueError, match="no skinny matmul 'cuda'; there are reference, triton"):
        skinny_matmul.norm_matmul(x, w, implementation="cuda")
    with pytest.raises(ValueError, match="does not take 65 rows of float32 with a weight of float32; use 'reference'"):
        skinny_matmul.norm_matmul(normal(0, 65, 64), w, implementation="triton", interpret=True)
    with pytest.raises(ValueError, match="needs weight_scale"):
        skinny_matmul.norm_matmul(x, w.astype(jnp.float8_e4m3fn), implementation="triton", interpret=True)
    assert not skinny_matmul.supports("triton", dtype="float16", weight_dtype="float16", num_rows=8, interpret=True)
