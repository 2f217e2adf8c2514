"""Caches of float8_e4m3fn: attention over them is attention over what their values and scales stand for."""

import functools
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.cache_write import write_cache
from pallas_kernels.paged_attention import choose, paged_attention, paged_decode
from tests.helpers.lowering import a_gpu_to_lower_for
from tests.pallas_kernels.test_paged_attention import Batch, as_decode, assert_close, make_arrays, oracle

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")]

IMPLEMENTATIONS = ("reference", "xla", "triton")
FP8 = jnp.float8_e4m3fn
SCALES = {"k_scale": jnp.float32(0.75), "v_scale": jnp.float32(3.0)}
ROWS = ((1, 1), (7, 7), (1, 40), (0, 0), (20, 33))
CASES = {
    "plain": Batch(rows=ROWS),
    "bfloat16": Batch(rows=ROWS, dtype="bfloat16"),
    "window and soft cap": Batch(rows=ROWS, window=9, soft_cap=1.5, num_groups=3),
    "head width 128": Batch(rows=((1, 9), (5, 20)), head_dim=128, page_size=16, padded_width=3),
}


def narrowed(name: str, scales: dict[str, jax.Array]) -> tuple[Batch, dict[str, jax.Array]]:
    """A case whose keys and values were divided by the scales and rounded. Slots that no row owns stay NaN."""
    batch = CASES[name]
    arrays = dict(make_arrays(batch))
    for letter in "kv":
        arrays[letter] = (arrays[letter].astype(jnp.float32) / scales.get(f"{letter}_scale", 1.0)).astype(FP8)
    assert bool(jnp.isnan(arrays["k"].astype(jnp.float32)).any())
    return batch, arrays


def widened(name: str, scales: dict[str, jax.Array]) -> tuple[Batch, dict[str, jax.Array]]:
    """The case in numbers that need no scale: its oracle is exact."""
    batch, arrays = narrowed(name, scales)
    for letter in "kv":
        arrays[letter] = arrays[letter].astype(jnp.float32) * scales.get(f"{letter}_scale", 1.0)
    return batch, arrays


@functools.cache
def expected_ragged(name: str, scaled: bool) -> np.ndarray:
    batch, arrays = widened(name, SCALES if scaled else {})
    return np.asarray(jit(paged_attention, **batch.options, implementation="reference")(*arrays.values()), np.float64)


@functools.cache
def jit(function, **options):
    return jax.jit(functools.partial(function, **options), compiler_options={"xla_backend_optimization_level": 0})


def test_the_reference_over_dequantised_caches_is_near_the_oracle_of_the_exact_ones() -> None:
    """So the comparisons below are with something that is right, and the scales are put where they belong."""
    batch = CASES["plain"]
    for scaled in (False, True):
        error = np.abs(expected_ragged("plain", scaled) - oracle(batch))[: batch.num_tokens]
        assert 0 < error.max() < 0.3 and error.mean() < 0.04


@pytest.mark.parametrize(
    ("name", "scaled", "implementation"),
    [("plain", False, "triton"), *((name, True, "triton") for name in CASES)]
    + [("plain", True, "xla"), ("window and soft cap", True, "xla"), ("plain", True, "reference")],
)
def test_ragged_attention(name: str, scaled: bool, implementation: str) -> None:
    batch, arrays = narrowed(name, SCALES if scaled else {})
    call = jit(paged_attention, **batch.options, implementation=implementation, interpret=True)
    got = call(*arrays.values(), **(SCALES if scaled else {}))
    assert got.dtype == jnp.dtype(batch.dtype)
    assert_close(batch, got, expected_ragged(name, scaled))


@pytest.mark.parametrize(
    ("name", "implementation"), [*(("plain", name) for name in IMPLEMENTATIONS), ("head width 128", "triton")]
)
def test_decode(name: str, implementation: str) -> None:
    batch, arrays = narrowed(name, SCALES)
    (q, *_), _ = as_decode(batch)
    args = q, arrays["k"], arrays["v"], arrays["table"], arrays["kv_length"]
    _, wide = widened(name, SCALES)
    expected = jit(paged_decode, **batch.options, implementation="reference")(q, wide["k"], wide["v"], *args[3:])
    got = jit(paged_decode, **batch.options, implementation=implementation, interpret=True)(*args, **SCALES)
    assert_close(batch, got, np.asarray(expected, np.float64))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scaled", [False, True])
def test_written_keys_are_the_nearest_values(dtype: str, scaled: bool) -> None:
    rng = np.random.default_rng(0)
    caches = [jnp.zeros((3, 2, 8, 16), FP8)] * 2
    new = [jnp.asarray(rng.normal(size=(4, 2, 16)) * [[[1.0]], [[100]], [[1000]], [[1e-3]]], dtype) for _ in range(2)]
    slots = jnp.array([3, 9, 23, -1], jnp.int32)
    got = jit(write_cache)(*caches, *new, slots, **(SCALES if scaled else {}))
    for cache, x, name in zip(got, new, SCALES, strict=True):
        divided = np.asarray(x, np.float32) / (np.asarray(SCALES[name]) if scaled else 1)
        expected = np.zeros(cache.shape, np.float32)
        for token, slot in enumerate([3, 9, 23]):
            nearest = divided[token].clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
            expected[slot // 8, :, slot % 8] = nearest.astype(np.float32)
        np.testing.assert_array_equal(np.asarray(cache, np.float32), expected)


@pytest.mark.parametrize(("capability", "name"), [("8.0", "xla"), ("8.9", "triton"), ("10.0", "triton")])
def test_a_gpu_whose_triton_cannot_read_fp8_takes_another_implementation(monkeypatch, capability: str, name: str) -> None:
    device = types.SimpleNamespace(compute_capability=capability)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    case = {"platform": "gpu", "dtype": jnp.bfloat16, "num_groups": 4, "head_dim": 128}
    assert choose(**case, cache_dtype=FP8) == name
    assert choose(**case) == "triton"


def test_triton_kernels_lower_for_cuda_without_a_gpu() -> None:
    batch, arrays = narrowed("bfloat16", SCALES)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays.values()]

    def attend(q, k, v, table, query_start, kv_length):
        return paged_attention(q, k, v, table, query_start, kv_length, **batch.options, implementation="triton", **SCALES)

    with a_gpu_to_lower_for():
        text = jax.jit(attend).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("xla.gpu.triton") == 2
