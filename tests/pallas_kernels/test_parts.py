"""Attention over parts of the keys, and its combination, against attention over all keys in float64."""

import importlib
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _compat
from pallas_kernels.checking.attention import TOLERANCE, Batch, call
from pallas_kernels.checking.attention_at_start import host_arrays, host_error
from pallas_kernels.paged_attention import (
    IMPLEMENTATIONS,
    TAKING_PARTS,
    candidates,
    mosaic_prefill,
    paged_attention,
    paged_decode,
    supports,
)
from pallas_kernels.paged_attention.parts import NO_KEYS, Part, combine
from tests.helpers.slow import slow_except

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")

PAGE = 8


def batch(num_parts: int, *, is_decode: bool, **options) -> Batch:
    """Lengths around pages and blocks, rows without keys, and rows that have none in some parts."""
    block = num_parts * PAGE
    lengths = (1, PAGE - 1, PAGE, PAGE + 1, block - 1, block, block + 1, 0, 3 * block + PAGE + 1)
    prompts = ((5, 0), (block + 3, 0), (9, PAGE), (1, block), (40, 2 * block + 5), (0, 0))
    work = {"decodes": lengths} if is_decode else {"decodes": lengths, "prompts": prompts, "padding": 3}
    shapes = {"num_kv_heads": 2, "num_groups": 2, "head_dim": 16, "dtype": "float32", "poison": True}
    return Batch("parts", page_size=block, num_parts=num_parts, **{**work, **shapes, **options})


@pytest.mark.parametrize("is_decode", [True, False], ids=["decode", "ragged"])
@pytest.mark.parametrize("options", [{}, {"window": 6, "has_sinks": True, "soft_cap": 30.0}], ids=["full", "window, sinks"])
@pytest.mark.parametrize(("name", "num_parts"), slow_except([("triton", 3)], [("reference", 2), ("xla", 3), ("triton", 3)]))
@pytest.mark.slow
def test_parts_combine_to_the_whole(name, num_parts, options, is_decode):
    case = batch(num_parts, is_decode=is_decode, **options)
    q, constants = host_arrays(case)
    run = jax.jit(call(importlib.import_module(IMPLEMENTATIONS[name]), case, interpret=True))
    assert host_error(case, q, constants, run(q, *constants)) < 5e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", ["xla", "triton"])
def test_a_cache_of_8_bits(name):
    case = batch(2, is_decode=False, dtype="bfloat16", cache_dtype="float8_e4m3fn", has_scales=True)
    q, constants = host_arrays(case)
    run = jax.jit(call(importlib.import_module(IMPLEMENTATIONS[name]), case, interpret=True))
    assert host_error(case, q, constants, run(q, *constants)) < 2e-2


@pytest.mark.skipif(not _compat.has_mosaic(), reason="JAX 0.10 lacks parts of Mosaic GPU that the kernel uses")
@pytest.mark.parametrize(
    ("prompts", "window"),
    [
        pytest.param(((4, 0), (70, 40), (3, 0), (0, 0)), None, id="prompts that begin anywhere", marks=pytest.mark.slow),
        pytest.param(((70, 60), (4, 0)), 20, id="window"),
    ],
)
def test_the_mosaic_prefill(prompts, window):
    """In the GPU interpreter, with so few keys in a tile that there are several."""
    slots, options = 16, {"dtype": "bfloat16", "num_kv_heads": 1, "num_groups": 2, "head_dim": 64, "poison": True, "padding": 3}
    case = Batch("parts", prompts=prompts, window=window, page_size=2 * slots, num_parts=2, **options)
    q, (k, v, *rows) = jax.tree.map(jnp.asarray, host_arrays(case))

    @jax.jit
    def attend(rank, *pages):
        tiles = mosaic_prefill.MosaicPrefillTiles(block_kv=64)
        options = {**case.options, "tiles": tiles, "interpret": True, "part": Part(rank, 2)}
        return mosaic_prefill.paged_attention(q, *pages, *rows, **options)

    pages = [[x[:, :, rank * slots :][:, :, :slots] for x in (k, v)] for rank in range(2)]
    outs = [attend(jnp.int32(rank), *own) for rank, own in enumerate(pages)]
    out = combine(*(jnp.stack(x) for x in zip(*outs, strict=True)))
    assert host_error(case, *host_arrays(case), out) < TOLERANCE["bfloat16"]


@pytest.mark.parametrize("name", slow_except([], ["reference", "xla", "triton"]))
def test_the_logarithm_of_the_sum_of_a_part(name):
    """A row of 11 keys in two parts, with pages of 4: the second part has the keys 4 to 7."""
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((1, 1, 1, 16)), rng.standard_normal((11, 16))
    pages = np.zeros((3, 1, 4, 16), np.float32)
    pages[1, 0] = k[4:8]
    table = jnp.array([[1, 2]], jnp.int32)
    arrays = [jnp.asarray(x, jnp.float32) for x in (q, pages, pages)]
    options = {"scale": 0.5, "implementation": name, "interpret": name == "triton", "part": Part(jnp.int32(1), 2)}
    out, lse = paged_decode(*arrays, table, jnp.array([11], jnp.int32), **options)
    expected = math.log(np.exp(0.5 * k[4:8] @ q[0, 0, 0]).sum())
    assert abs(float(lse[0, 0, 0]) - expected) < 1e-5
    out, lse = paged_decode(*arrays, table, jnp.array([3], jnp.int32), **options)
    assert float(lse[0, 0, 0]) == np.float32(NO_KEYS) and not np.asarray(out).any()


@pytest.mark.parametrize("count", [1, 2, 5])
def test_keys_before_a_position(count):
    positions = np.arange(-3, 5 * count * 4)
    owner = np.arange(5 * count * 4) // 4 % count
    keys_before = jax.jit(lambda rank, position: Part(rank, count).keys_before(position, 4))
    for rank in range(count):
        expected = [int((owner[: max(p, 0)] == rank).sum()) for p in positions]
        np.testing.assert_array_equal(keys_before(rank, positions.astype(np.int32)), expected)


def test_what_parts_exclude_is_refused():
    case = {"dtype": jnp.bfloat16, "num_groups": 4, "head_dim": 128}
    assert "jax_triton" not in TAKING_PARTS and not supports("jax_triton", **case, has_part=True)
    assert candidates(platform="gpu", **case, has_part=True) == candidates(platform="gpu", **case)
    q, pages, table = jnp.zeros((2, 1, 1, 16)), jnp.zeros((2, 1, 8, 16)), jnp.zeros((1, 1), jnp.int32)
    length, part = jnp.ones(1, jnp.int32), Part(0, 2)
    with pytest.raises(ValueError, match=r"takes one query a row, num_queries is 2; use paged_attention"):
        paged_decode(q, pages, pages, table, length, scale=1.0, num_queries=2, part=part)
    with pytest.raises(ValueError, match=r"sinks count once .* parts.combine"):
        start = jnp.array([0, 2], jnp.int32)
        paged_attention(q, pages, pages, table, start, length, scale=1.0, part=part, sinks_KG=jnp.zeros((1, 1)))
