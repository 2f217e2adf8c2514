"""The Mosaic prefill kernel in the GPU interpreter against the reference op, and its work items against a plain loop."""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _compat
from pallas_kernels.paged_attention import mosaic_prefill, reference
from pallas_kernels.paged_attention.mosaic_prefill import HAS_TAIL, MosaicPrefillTiles, make_items, pick_tiles, supports
from pallas_kernels.paged_attention.tiles import COUNT, POSITION, ROW, TOKEN

needs_mosaic = pytest.mark.skipif(not _compat.has_mosaic(), reason="JAX 0.10 lacks parts of Mosaic GPU that the kernel uses")
SMALL = MosaicPrefillTiles(block_kv=64)


@dataclass(frozen=True)
class Batch:
    """Rows of (new tokens, keys with the new ones), then padding tokens."""

    rows: tuple[tuple[int, int], ...]
    num_groups: int = 2
    head_dim: int = 64
    page_size: int = 16
    dtype: str = "bfloat16"
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    padding: int = 3
    cache_dtype: str | None = None

    @property
    def num_tokens(self) -> int:
        return sum(new for new, _ in self.rows)

    @property
    def options(self) -> dict[str, Any]:
        sinks = jnp.linspace(-4, 6, self.num_groups)[None] if self.has_sinks else None
        scales = {} if self.cache_dtype is None else {"k_scale": 0.75, "v_scale": 1.5}
        options = {"scale": 1.3 / math.sqrt(self.head_dim), "window": self.window, "soft_cap": self.soft_cap}
        return {**options, **scales, "sinks_KG": sinks}


def make_arrays(batch: Batch) -> list[jax.Array]:
    """The arguments of paged_attention for one KV head. Slots that no row owns are NaN, and so are the pages before its window."""
    rng = np.random.default_rng(len(batch.rows))
    size = batch.page_size
    pages = [-(-length // size) for _, length in batch.rows]
    num_pages = sum(pages) + 2
    free = rng.permutation(np.arange(1, num_pages))
    table = np.zeros((len(batch.rows), max(pages) + 1), np.int32)  # after a row's pages: page 0, which is unused
    k, v = (np.full((num_pages, 1, size, batch.head_dim), np.nan) for _ in range(2))
    for row, (new, length) in enumerate(batch.rows):
        first = 0 if batch.window is None else max(0, length - new - batch.window + 1) // size
        table[row, first : pages[row]], free = free[: pages[row] - first], free[pages[row] - first :]
        position = np.arange(first * size, length)
        for cache in (k, v):
            cache[table[row, position // size], 0, position % size] = rng.normal(size=(len(position), batch.head_dim))
    start = np.concatenate([[0], np.cumsum([new for new, _ in batch.rows])])
    q = rng.normal(size=(batch.num_tokens + batch.padding, 1, batch.num_groups, batch.head_dim))
    caches = [jnp.asarray(x, jnp.float32).astype(batch.cache_dtype or batch.dtype) for x in (k, v)]
    return [
        jnp.asarray(q, batch.dtype),
        *caches,
        jnp.asarray(table),
        jnp.asarray(start, jnp.int32),
        jnp.asarray([n for _, n in batch.rows], jnp.int32),
    ]


def run(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Results of the kernel, in an interpreter that looks for races, and of the reference."""
    arrays = make_arrays(batch)
    params = _compat.mosaic().InterpretGPUParams(out_of_bounds_reads="uninitialized", detect_races=True)
    got = jax.jit(functools.partial(mosaic_prefill.paged_attention, **batch.options, tiles=SMALL, interpret=params))(*arrays)
    arrays = [x.astype(jnp.float32) if x.dtype == batch.dtype else x for x in arrays]
    want = jax.jit(functools.partial(reference.paged_attention, **batch.options))(*arrays)
    assert got.dtype == batch.dtype
    return np.asarray(got, np.float32), np.asarray(want)


@needs_mosaic
@pytest.mark.parametrize(
    "batch",
    [
        pytest.param(
            Batch(((4, 4), (130, 170), (0, 0), (3, 3), (5, 90), (61, 61)), has_sinks=True),
            id="prompts that begin anywhere, sinks",
        ),
        pytest.param(Batch(((66, 150),), window=40, soft_cap=1.5, num_groups=1), id="window and soft cap, odd number of heads"),
        pytest.param(Batch(((7, 170), (2, 2)), window=1, num_groups=1, padding=0), id="the window begins in the last page"),
        pytest.param(
            Batch(
                ((4, 4), (130, 170), (0, 0), (5, 90)), window=100, cache_dtype="float8_e4m3fn", dtype="float16", has_sinks=True
            ),
            id="8-bit cache, window, sinks",
        ),
        pytest.param(
            Batch(((3, 190), (2, 2)), page_size=128, padding=0, cache_dtype="float8_e4m3fn"),
            id="8-bit cache, a tile is part of a page",
        ),
    ],
)
def test_kernel_agrees_with_reference_and_barriers_order_every_access(batch):
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    got, want = run(batch)
    used = batch.num_tokens
    np.testing.assert_allclose(got[:used], want[:used], atol=2e-2)
    np.testing.assert_array_equal(got[used:], 0.0)
    assert not gpu_callbacks.get_races().races_found


@needs_mosaic
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_kernel_lowers_for_a_gpu(head_dim):
    def shape(*dims, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(dims, dtype)

    q, pages = shape(100, 2, 4, head_dim, dtype=jnp.bfloat16), shape(9, 2, 16, head_dim, dtype=jnp.bfloat16)
    attend = jax.jit(
        functools.partial(mosaic_prefill.paged_attention, scale=0.1, window=50, soft_cap=30.0, sinks_KG=jnp.ones((2, 4)))
    )
    text = attend.trace(q, pages, pages, shape(3, 4), shape(4), shape(3)).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


@pytest.mark.parametrize(("window", "min_tokens"), [(None, 1), (20, 1), (None, 2)])
def test_items_are_the_tiles_with_those_of_most_keys_first(window, min_tokens):
    rows, item_tokens, page_size, padding = ((40, 90), (1, 7), (0, 0), (16, 16), (33, 64)), 16, 8, 5
    start = np.concatenate([[0], np.cumsum([new for new, _ in rows])])
    num_tokens = int(start[-1]) + padding
    options = {"page_size": page_size, "window": window, "min_tokens": min_tokens, "heads": 6}
    make = jax.jit(lambda start, length: make_items(start, length, num_tokens, item_tokens, **options))
    table, num_items = make(start.astype(np.int32), np.array([length for _, length in rows], np.int32))
    expected = {(len(rows) - 1, int(start[-1]), padding, -padding, 0)}
    for row, (new, length) in enumerate(rows):
        begin, last = int(start[row]), int(start[row]) + new
        # Every tile but a row's first begins at a multiple of 8 tokens.
        for origin in range(begin // 8 * 8, last if new >= min_tokens else 0, item_tokens):
            token, stop = max(origin, begin), min(origin + item_tokens, last)
            end = length - last + stop
            has_tail = -(-end // page_size) * page_size > length
            expected.add((row, token, stop - token, end - (stop - token), int(has_tail)))
    used = int(num_items[0]) // 6
    table = np.asarray(table)
    assert {tuple(int(x) for x in line) for line in table[:used, [ROW, TOKEN, COUNT, POSITION, HAS_TAIL]]} == expected
    assert used == len(expected)
    assert not table[used:, COUNT].any()
    end = np.maximum(table[:used, POSITION] + table[:used, COUNT], 0)
    seen = end if window is None else np.minimum(end, window + table[:used, COUNT])
    assert (np.diff(seen) <= 0).all()


@needs_mosaic
def test_supports_what_tensor_cores_and_swizzle_take():
    case = {"platform": "gpu", "dtype": jnp.bfloat16, "num_groups": 4, "head_dim": 128}
    assert supports(**case)
    assert supports(**case, page_size=16)
    assert not supports(**case, page_size=24)
    assert not supports(**case | {"head_dim": 80})
    assert not supports(**case | {"dtype": jnp.float32})
    assert not supports(**case | {"platform": "cpu"})
    assert supports(**case | {"platform": "cpu"}, interpret=True)


@pytest.mark.parametrize(("head_dim", "is_narrow"), [(64, False), (128, False), (256, False), (64, True), (128, True)])
def test_default_tiles_fit_into_shared_memory(head_dim, is_narrow):
    assert pick_tiles(head_dim, is_narrow).smem_bytes(head_dim, is_narrow) <= mosaic_prefill.SMEM_BYTES


@pytest.mark.parametrize(
    ("change", "message"), [({"page_size": 24}, "page size 24"), ({"dtype": "float32"}, "queries in bfloat16, keys in float32")]
)
def test_refuses_what_it_cannot_copy(change, message):
    arrays = make_arrays(Batch(((3, 3),)))
    other = make_arrays(Batch(((3, 3),), **change))
    with pytest.raises(ValueError, match=message):
        mosaic_prefill.paged_attention(arrays[0], *other[1:], scale=1.0)
