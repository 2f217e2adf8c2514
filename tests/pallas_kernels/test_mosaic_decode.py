"""The Mosaic decode kernel, interpreted, against the reference; who computes what; what is refused."""

import functools
import importlib
import subprocess
import sys
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._compat import has_mosaic
from pallas_kernels.paged_attention import mosaic, paged_decode, reference

if not has_mosaic():
    pytest.skip("JAX 0.10 lacks parts of Mosaic GPU that the kernel uses", allow_module_level=True)

from pallas_kernels.paged_attention import mosaic_decode
from pallas_kernels.paged_attention.mosaic_decode import THREE_WORKERS, pick_tiles
from pallas_kernels.paged_attention.mosaic_plan import COUNT, DecodeTiles, Plan, make_plan

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]
    num_workers: int = 3
    num_kv_heads: int = 2
    num_groups: int = 2
    head_dim: int = 64
    page_size: int = 16
    dtype: str = "bfloat16"
    cache_dtype: str | None = None
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    tiles: DecodeTiles | None = None


RING = DecodeTiles(64, 2, 1)
"""A ring of two tiles, which a worker with more of them goes round several times."""
CASES = {
    "sinks, of whole rows and of rows in parts, padding between, an odd group": Case(
        (1, 150, 0, 65), num_workers=2, num_groups=3, has_sinks=True, tiles=RING
    ),
    "window and soft cap, more workers than tiles": Case((70, 5), num_workers=7, window=40, soft_cap=2.0, tiles=RING),
    "queries that do not fill tiles, pages of 8": Case((9, 20, 1, 64), num_kv_heads=3, num_groups=3, page_size=8),
    "pages larger than a tile, sixteen heads, width 128": Case(
        (150,), num_workers=2, num_kv_heads=1, num_groups=16, head_dim=128, page_size=128, dtype="float16"
    ),
    "tiles of 128 keys, width 256": Case((140,), num_kv_heads=1, head_dim=256, page_size=64, tiles=DecodeTiles(128, 2, 1)),
    "8-bit cache": Case((150, 0, 120), num_workers=1, num_kv_heads=1, cache_dtype="float8_e4m3fn", tiles=RING),
    "two workers of a CTA": Case((150, 0, 65), num_workers=4, tiles=DecodeTiles(64, 2, 1, workers_per_cta=2)),
    "three workers of a CTA, 8-bit cache": Case(
        (150, 9), num_workers=3, cache_dtype="float8_e4m3fn", tiles=DecodeTiles(64, 2, 1, workers_per_cta=3)
    ),
    "8-bit cache of width 128, window": Case((100,), num_kv_heads=1, head_dim=128, window=50, cache_dtype="float8_e4m3fn"),
}


def make_arrays(case: Case) -> list[jax.Array]:
    """The arguments of paged_decode. Slots that no query reads are NaN, page ids past a row's pages out of range."""
    rng = np.random.default_rng(len(case.lengths))
    num_rows, size = len(case.lengths), case.page_size
    width = max(1, -(-max(case.lengths) // size))
    num_pages = num_rows * width + 1
    pages = rng.permutation(num_rows * width).reshape(num_rows, width) + 1
    owned = np.arange(width)[None] < -(-np.array(case.lengths) // size)[:, None]
    seen = np.zeros((num_pages, size), bool)
    for row, length in enumerate(case.lengths):
        position = np.arange(max(0, length - (case.window or length)), length)
        seen[pages[row, position // size], position % size] = True
    shape = (num_pages, case.num_kv_heads, size, case.head_dim)
    k, v = (np.where(seen[:, None, :, None], rng.normal(size=shape), np.nan) for _ in range(2))
    q = rng.normal(size=(num_rows, case.num_kv_heads, case.num_groups, case.head_dim))
    cache_dtype = case.cache_dtype or case.dtype
    return [
        jnp.asarray(q, case.dtype),
        jnp.asarray(k, jnp.float32).astype(cache_dtype),
        jnp.asarray(v, jnp.float32).astype(cache_dtype),
        jnp.asarray(np.where(owned, pages, 1 << 20), jnp.int32),
        jnp.asarray(case.lengths, jnp.int32),
    ]


def sinks_of(case: Case) -> dict[str, jax.Array]:
    """From far below the scores to far above them."""
    shape = (case.num_kv_heads, case.num_groups)
    return {"sinks_KG": jnp.linspace(-4, 12, shape[0] * shape[1]).reshape(shape)} if case.has_sinks else {}


def expected_of(case: Case, arrays: list[jax.Array], scale: float, k_scale: float, v_scale: float) -> np.ndarray:
    options = {"scale": scale, "window": case.window, "soft_cap": case.soft_cap} | sinks_of(case)

    @jax.jit
    def decode(q, k, v, table, length):
        q, k, v = q.astype(jnp.float32), k.astype(jnp.float32) * k_scale, v.astype(jnp.float32) * v_scale
        return reference.paged_decode(q, k, v, jnp.minimum(table, k.shape[0] - 1), length, **options)

    return np.asarray(decode(*arrays))


@pytest.mark.parametrize("name", CASES)
def test_decode_matches_the_reference_and_producer_and_consumer_do_not_race(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
    from jax.experimental.pallas import mosaic_gpu as plgpu

    monkeypatch.setattr(mosaic_decode, "mosaic_interpret", lambda _: plgpu.InterpretGPUParams(detect_races=True))
    case = CASES[name]
    arrays = make_arrays(case)
    scale = 1.3 * case.head_dim**-0.5
    scales = {"k_scale": 0.5, "v_scale": jnp.float32(2.0)} if case.cache_dtype else {}
    call = functools.partial(
        mosaic_decode.paged_decode,
        scale=scale,
        window=case.window,
        soft_cap=case.soft_cap,
        tiles=case.tiles,
        num_workers=case.num_workers,
        interpret=True,
        **scales,
        **sinks_of(case),
    )
    got = jax.jit(call)(*arrays)
    assert got.dtype == jnp.dtype(case.dtype)
    expected = expected_of(case, arrays, scale, *((0.5, 2.0) if case.cache_dtype else (1.0, 1.0)))
    np.testing.assert_allclose(np.asarray(got, np.float32), expected, atol=2e-2, rtol=2e-2)
    assert not gpu_callbacks.get_races().races_found


def test_three_workers_share_a_cta_where_they_were_measured_faster(monkeypatch) -> None:
    monkeypatch.setattr(mosaic_decode, "device_kind", lambda: "NVIDIA H200")
    several = {"cache_itemsize": 1, "num_rows": 64}
    assert pick_tiles(4, 128, **several) == pick_tiles(4, 128, num_queries=2, **several) == THREE_WORKERS
    two_ctas = DecodeTiles(64, 3, 2)
    assert pick_tiles(4, 128, cache_itemsize=2, num_rows=64) == pick_tiles(4, 128, cache_itemsize=1, num_rows=8) == two_ctas
    for num_groups, head_dim in ((12, 128), (4, 256)):
        assert pick_tiles(num_groups, head_dim, **several).workers_per_cta == 1
    monkeypatch.setattr(mosaic_decode, "device_kind", lambda: "NVIDIA H100 80GB HBM3")
    assert pick_tiles(4, 128, **several) == two_ctas


@pytest.mark.parametrize("seed", range(8))
def test_plan_gives_every_tile_to_one_worker_in_even_shares(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_rows, num_heads, num_workers = rng.integers(1, 9), rng.integers(1, 4), int(rng.integers(1, 40))
    lengths = rng.integers(0, 1200, num_rows) * (rng.random(num_rows) < 0.6)
    window = None if seed % 2 else 300
    tiles = DecodeTiles(min_share=1 + seed % 3)
    planned = jax.jit(lambda lengths: make_plan(lengths, int(num_heads), tiles, window, num_workers))
    rows, work, workers = (np.asarray(x) for x in planned(lengths.astype(np.int32)))
    first = np.zeros_like(lengths) if window is None else np.maximum(lengths - window, 0) // 64
    num_tiles = -(-lengths // 64) - first
    owner: dict[tuple[int, int, int], int] = {}
    for worker, (place, row, length, head, tile, count) in enumerate(work):
        if count:
            assert (row, length) == tuple(rows[place])
        for _ in range(count):
            owner[rows[place, 0], head, tile] = worker
            tile += 1
            if tile == num_tiles[rows[place, 0]]:
                head, tile = head + 1, 0
            if head == num_heads:
                place, head = place + 1, 0
    wanted = [(r, h, t) for r in range(num_rows) for h in range(num_heads) for t in range(num_tiles[r])]
    assert sorted(owner) == wanted
    assert len(wanted) == work[:, COUNT].sum()
    shares = work[work[:, COUNT] > 0, COUNT]
    if len(wanted) >= tiles.min_share and len(shares):
        assert shares.max() - shares.min() <= 1 and shares.min() >= tiles.min_share
    for r in range(num_rows):
        for h in range(num_heads):
            of_pair = [owner[r, h, t] for t in range(num_tiles[r])]
            assert tuple(workers[r, h]) == ((of_pair[0], of_pair[-1]) if of_pair else (0, -1))


def test_parts_are_merged_by_their_softmax_sums() -> None:
    """Row 0: head 0 whole, head 1 in 20 parts, more than are read at once. Row 1 has no keys."""
    rng = np.random.default_rng(0)
    num_workers, num_groups, head_dim = 24, 3, 64
    whole = rng.normal(size=(2, 2, num_groups, head_dim)).astype(np.float32)
    partial = np.full((2 * num_workers, num_groups, head_dim), np.nan, np.float32)
    lse = np.full((2 * num_workers, 8), np.nan, np.float32)
    parts = [2 * 2 + 1] + [2 * worker for worker in range(3, 22)]
    partial[parts] = rng.normal(size=(len(parts), num_groups, head_dim))
    lse[parts] = rng.normal(size=(len(parts), 8)) * 4
    workers = jnp.asarray([[[0, 0], [2, 21]], [[0, -1], [0, -1]]], jnp.int32)
    plan = Plan(jnp.zeros((3, 2), jnp.int32), jnp.zeros((num_workers, 6), jnp.int32), workers)
    combine = functools.partial(mosaic_decode.combine_items, plan=plan, sinks_KG=None, interpret=True)
    got = jax.jit(combine)(jnp.asarray(whole), jnp.asarray(partial), jnp.asarray(lse))
    weights = 2.0 ** lse[parts, :num_groups, None].astype(np.float64)
    np.testing.assert_array_equal(got[0, 0], whole[0, 0])
    np.testing.assert_allclose(got[0, 1], (partial[parts] * weights).sum(0) / weights.sum(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got[1], 0)


@pytest.mark.parametrize(
    ("cache_dtype", "tiles"), [(jnp.bfloat16, None), (jnp.float8_e4m3fn, None), (jnp.float8_e4m3fn, THREE_WORKERS)]
)
def test_kernel_lowers_for_cuda_without_a_gpu(cache_dtype, tiles) -> None:
    from tests.helpers.lowering import a_gpu_to_lower_for

    def shape(*dims: int, dtype=jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype)

    cache = shape(9, 2, 16, 128, dtype=cache_dtype)
    args = (shape(3, 2, 4, 128, dtype=jnp.bfloat16), cache, cache, shape(3, 4), shape(3))
    paged_decode = mosaic.paged_decode if tiles is None else functools.partial(mosaic_decode.paged_decode, tiles=tiles)
    with a_gpu_to_lower_for():
        decode = functools.partial(paged_decode, scale=1.0, window=9, soft_cap=3.0, sinks_KG=jnp.ones((2, 4)))
        traced = jax.jit(decode).trace(*args)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == 1


def test_shapes_that_the_kernel_cannot_take_are_refused() -> None:
    case = {"platform": "gpu", "dtype": jnp.bfloat16, "num_groups": 4, "head_dim": 128}
    case |= {"cache_dtype": jnp.bfloat16, "page_size": 16}
    assert mosaic.supports(**case)
    assert mosaic.supports(**case | {"num_groups": 32})
    for change in (
        {"dtype": jnp.float32, "cache_dtype": jnp.float32},
        {"head_dim": 80},
        {"head_dim": 256, "num_groups": 32},
        {"platform": "cpu"},
        {"page_size": 4},
        {"cache_dtype": jnp.float16},
    ):
        assert not mosaic.supports(**case | change)


def test_caches_that_the_kernel_cannot_take_are_refused() -> None:
    q, k, v, table, length = make_arrays(Case((20,)))
    call = functools.partial(paged_decode, scale=1.0, implementation="mosaic")
    with pytest.raises(ValueError, match="over a cache of float16 with pages of 16"):
        call(q, k.astype(jnp.float16), v.astype(jnp.float16), table, length)
    with pytest.raises(ValueError, match="over a cache of bfloat16 with pages of 4"):
        call(q, k[:, :, :4], v[:, :, :4], table, length)


def test_few_rows_of_wide_heads_go_through_mosaic_and_others_through_triton(monkeypatch) -> None:
    taken = []
    for name in ("mosaic_decode", "triton_decode"):
        module = importlib.import_module(f"pallas_kernels.paged_attention.{name}")
        monkeypatch.setattr(module, "paged_decode", lambda q, *_, name=name, **__: taken.append(name) or q)
    fp8 = "float8_e4m3fn"

    def decode(rows: int, width: int, cache_dtype: str | None) -> str:
        q, k, v, table, length = make_arrays(Case((20,) * rows, head_dim=width, cache_dtype=cache_dtype))
        paged_decode(q, k, v, table, length, scale=1.0, implementation="mosaic")
        return taken.pop()

    of_two = ((8, 128, None), (9, 128, None), (8, 64, None), (128, 128, fp8), (129, 128, fp8))
    expected = ["mosaic_decode", "triton_decode", "triton_decode", "mosaic_decode", "triton_decode"]
    assert [decode(*case) for case in of_two] == expected
    monkeypatch.setattr(mosaic_decode, "device_kind", lambda: "NVIDIA H200")
    of_three = ((9, 128, None), (129, 128, fp8), (512, 128, fp8), (513, 128, fp8))
    expected = ["triton_decode", "mosaic_decode", "mosaic_decode", "triton_decode"]
    assert [decode(*case) for case in of_three] == expected


def test_a_machine_without_a_gpu_does_not_import_mosaic() -> None:
    code = "import sys, pallas_kernels.paged_attention as p; p.choose(platform='cpu', dtype='bfloat16', num_groups=4, head_dim=128)"
    code += "; assert 'jax.experimental.pallas.mosaic_gpu' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
