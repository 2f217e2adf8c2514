"""Decodes of a few queries a row, by every implementation, against attention in NumPy."""

import functools
import importlib
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._compat import has_mosaic
from pallas_kernels.checking import mla_attention as latents
from pallas_kernels.checking.attention import TOLERANCE, Batch, call
from pallas_kernels.checking.attention_at_start import host_arrays, host_error
from pallas_kernels.mla_attention import latent_decode
from pallas_kernels.paged_attention import IMPLEMENTATIONS, paged_decode, triton_decode
from pallas_kernels.paged_attention.queries import in_parts
from tests.helpers.slow import slow_except

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")

SMALL = {"num_kv_heads": 2, "head_dim": 16, "page_size": 8, "dtype": "float32", "poison": True, "table_width": 12}
BATCHES = {
    "edges": Batch("", decodes=(5, 0, 8, 9, 64, 67, 90), num_queries=5, num_groups=2, **SMALL),
    "window, soft cap": Batch("", decodes=(3, 60, 0, 11), num_queries=3, num_groups=4, window=9, soft_cap=2.0, **SMALL),
    "window of one": Batch("", decodes=(2, 33), num_queries=2, num_groups=1, window=1, **SMALL),
    "sinks": Batch("", decodes=(4, 41), num_queries=4, num_groups=3, has_sinks=True, window=30, **SMALL),
    "many": Batch("", decodes=(17, 40, 0), num_queries=17, num_groups=8, **SMALL),
    "fp8 cache": Batch(
        "",
        decodes=(8, 70),
        num_queries=8,
        num_groups=4,
        **SMALL | {"dtype": "bfloat16", "cache_dtype": "float8_e4m3fn"},
        has_scales=True,
    ),
}


def in_haste(function):
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


@pytest.mark.parametrize("implementation", ["reference", "xla", "triton"])
@pytest.mark.parametrize("name", slow_except(["edges", "sinks"], BATCHES))
@pytest.mark.slow
def test_a_few_queries_a_row_equal_attention_in_numpy(name: str, implementation: str) -> None:
    batch = BATCHES[name]
    q, constants = host_arrays(batch)
    module = importlib.import_module(IMPLEMENTATIONS[implementation])
    got = in_haste(call(module, batch, interpret=True))(q, *constants)
    assert got.shape == q.shape and got.dtype == q.dtype
    assert host_error(batch, q, constants, got) <= TOLERANCE[batch.dtype]
    padding = np.repeat(np.array(batch.decodes) == 0, batch.num_queries)
    np.testing.assert_array_equal(np.asarray(got)[padding], 0)


@pytest.mark.parametrize(
    ("implementation", "num_heads"),
    slow_except([("triton", 20)], [("reference", 3), ("xla", 3), ("triton", 3), ("triton", 20)]),
)
def test_a_few_queries_of_latents_equal_attention_in_numpy(implementation: str, num_heads: int) -> None:
    sizes = latents.Sizes(latent_dim=24, rotated_dim=16, plain_dim=20, value_dim=12)
    fields = SMALL | {"num_kv_heads": 1, "head_dim": sizes.width, "scale": 0.3}
    batch = Batch("", decodes=(4, 0, 16, 70), num_groups=num_heads, num_queries=4, **fields)
    queries, constants = latents.host_arrays(batch, sizes)
    got = in_haste(latents.call(batch, implementation=implementation, interpret=True))(queries, *constants)
    assert got.shape == queries[0].shape
    assert latents.host_error(batch, sizes, queries, constants, got) <= TOLERANCE["float32"]


@pytest.mark.parametrize("num_splits", slow_except([2], [2, 7]))
def test_splits_of_a_few_queries_combine_to_the_whole(num_splits: int) -> None:
    batch = replace(BATCHES["sinks"], decodes=(4, 0, 41, 90))
    q, constants = host_arrays(batch)
    tiles = triton_decode.DecodeTiles(block_k=16, num_splits=num_splits)
    got = in_haste(call(triton_decode, batch, interpret=True, tiles=tiles))(q, *constants)
    assert host_error(batch, q, constants, got) <= TOLERANCE[batch.dtype]


WIDE = {"num_kv_heads": 2, "head_dim": 64, "page_size": 16, "poison": True}
MOSAIC = {
    "rows over several workers": (Batch("", decodes=(5, 64, 0, 69, 130), num_queries=5, num_groups=4, **WIDE), 5),
    "sinks, of whole rows and of rows in parts": (
        Batch("", decodes=(8, 150, 0, 66), num_queries=8, num_groups=1, has_sinks=True, **WIDE),
        4,
    ),
    "8-bit cache, window, soft cap, an odd group": (
        Batch(
            "",
            decodes=(100, 3),
            num_queries=3,
            num_groups=3,
            window=40,
            soft_cap=2.0,
            cache_dtype="float8_e4m3fn",
            has_scales=True,
            **WIDE,
        ),
        3,
    ),
    "more queries than registers hold": (
        Batch("", decodes=(70, 17), num_queries=17, num_groups=8, **WIDE | {"num_kv_heads": 1, "head_dim": 128}),
        2,
    ),
}


@pytest.mark.skipif(not has_mosaic(), reason="JAX 0.10 lacks parts of Mosaic GPU that the kernel uses")
@pytest.mark.parametrize("name", MOSAIC)
def test_mosaics_kernel_equals_attention_in_numpy(name: str) -> None:
    from pallas_kernels.paged_attention import mosaic_decode

    batch, num_workers = MOSAIC[name]
    q, constants = host_arrays(batch)
    got = jax.jit(call(mosaic_decode, batch, interpret=True, num_workers=num_workers))(q, *constants)
    assert host_error(batch, q, constants, got) <= TOLERANCE[batch.dtype]
    padding = np.repeat(np.array(batch.decodes) == 0, batch.num_queries)
    np.testing.assert_array_equal(np.asarray(got, np.float32)[padding], 0)


@pytest.mark.parametrize("most", slow_except([3], [1, 2, 3, 4, 7]))
def test_rows_cut_into_parts_have_every_query_once_at_its_position(most: int) -> None:
    table, length, num_queries = jnp.arange(6).reshape(3, 2), jnp.array([9, 0, 5], jnp.int32), 5

    def decode(q, page_table, kv_length, num_queries=1):
        assert num_queries <= most
        position = kv_length[:, None] - num_queries + jnp.arange(num_queries)
        rows = jnp.repeat(page_table[:, 0] // 2, num_queries)
        return jnp.stack([q, rows, jnp.maximum(position.reshape(-1), -1)], axis=1)

    got = in_parts(decode, most, (jnp.arange(15),), (), table, length, num_queries=num_queries)
    queries = np.arange(15)
    last = np.array([9, 0, 5])[queries // 5]
    position = np.where(last > 0, last - 5 + queries % 5, -1)
    np.testing.assert_array_equal(got, np.stack([queries, queries // 5, position], axis=1))


def test_one_query_a_row_is_the_same_program() -> None:
    batch = Batch("", decodes=(5, 0, 8), num_groups=2, **SMALL)
    q, constants = host_arrays(batch)
    k, v, table, _, length = constants
    options = {"scale": 0.3, "implementation": "xla"}
    one, same = (
        jax.jit(functools.partial(paged_decode, **options, **several)).lower(q, k, v, table, length).as_text()
        for several in ({}, {"num_queries": 1})
    )
    assert one == same


def test_queries_that_are_not_as_many_for_each_row_are_refused() -> None:
    q, constants = host_arrays(Batch("", decodes=(5, 0, 8), num_queries=2, num_groups=2, **SMALL))
    k, v, table, _, length = constants
    for num_queries in (1, 3, 0):
        with pytest.raises(ValueError, match=f"takes 3 x {num_queries} queries, row by row, and got 6"):
            paged_decode(q, k, v, table, length, scale=1.0, num_queries=num_queries)
    with pytest.raises(ValueError, match="takes 3 x 5 queries, row by row, and got 6"):
        latent_decode(q[:, 0], q[:, 0, :, :8], k, table, length, scale=1.0, num_queries=5)
