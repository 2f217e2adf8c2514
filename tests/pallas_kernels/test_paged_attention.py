"""Every attention implementation against a float64 NumPy oracle, through the same ragged cases."""

import functools
import importlib
import inspect
import math
from dataclasses import dataclass
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._compat import has_mosaic
from pallas_kernels.paged_attention import (
    IMPLEMENTATIONS,
    TAKING_PARTS,
    candidates,
    choose,
    paged_attention,
    paged_decode,
    supports,
    triton_prefill,
)
from pallas_kernels.paged_attention.tiles import COUNT, POSITION, ROW, TOKEN, make_tiles, max_tiles
from pallas_kernels.paged_attention.triton_decode import DecodeTiles
from pallas_kernels.paged_attention.triton_decode import paged_decode as triton_paged_decode
from tests.helpers.lowering import a_gpu_to_lower_for
from tests.helpers.slow import slow_except

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")

GENERAL = [name for name in IMPLEMENTATIONS if name not in ("mosaic", "jax_triton")]
"""Implementations that take every case here. The others have their own tests."""

TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2, "float16": 2e-3}


@dataclass(frozen=True)
class Batch:
    """Rows of (new tokens, keys with the new ones), padded to shapes that batches share, so that they share a compilation."""

    rows: tuple[tuple[int, int], ...]
    num_kv_heads: int = 2
    num_groups: int = 2
    head_dim: int = 16
    page_size: int = 8
    dtype: str = "float32"
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    padded_rows: int = 6
    padded_tokens: int = 80
    padded_width: int = 14

    @property
    def num_tokens(self) -> int:
        return sum(new for new, _ in self.rows)

    @property
    def options(self) -> dict:
        return {"scale": 1.3 / math.sqrt(self.head_dim), "window": self.window, "soft_cap": self.soft_cap}

    @property
    def sinks(self) -> dict[str, jax.Array]:
        """From far below the scores to far above them."""
        if not self.has_sinks:
            return {}
        sinks = np.linspace(-4, 30, self.num_kv_heads * self.num_groups).reshape(self.num_kv_heads, self.num_groups)
        return {"sinks_KG": jnp.asarray(sinks, jnp.float32)}


MIXED = ((1, 1), (7, 7), (1, 40), (0, 0), (33, 33), (5, 29))
RAGGED = {
    "one token": Batch(rows=((1, 1),), padded_rows=1, padded_tokens=1, padded_width=1),
    "one row without any padding": Batch(rows=((19, 19),), padded_rows=1, padded_tokens=19, padded_width=3),
    "one row": Batch(rows=((19, 19),)),
    "mixed": Batch(rows=MIXED),
    "long prompt between decodes": Batch(rows=((1, 90), (70, 70), (1, 3))),
    "chunked continuations": Batch(rows=((3, 64), (17, 33), (8, 8), (2, 50))),
    "only padding": Batch(rows=((0, 0), (0, 0))),
    "empty rows at the ends": Batch(rows=((0, 0), (4, 4), (0, 0), (1, 9), (0, 0))),
    "window of one": Batch(rows=((9, 9), (1, 20)), window=1),
    "window longer than the keys": Batch(rows=((9, 9), (1, 20)), window=500),
    "sinks, window and soft cap": Batch(rows=MIXED, has_sinks=True, num_groups=3, soft_cap=1.5, window=11),
    "one head per group": Batch(rows=MIXED, num_groups=1),
    "sixteen heads per group": Batch(rows=((5, 5), (1, 20)), num_groups=16, num_kv_heads=1),
    **{f"head width {n}": Batch(rows=((5, 5), (1, 20)), head_dim=n, padded_tokens=7) for n in (80, 256)},
    "bfloat16": Batch(rows=MIXED, dtype="bfloat16"),
    "float16": Batch(rows=MIXED, dtype="float16"),
    "page size 128": Batch(rows=((5, 5), (1, 140)), page_size=128, num_kv_heads=1, padded_rows=2, padded_width=3),
}
OF_TILES = {"one token", "window longer than the keys", "one head per group", "head width 256", "float16", "page size 128"}
"""Ragged cases that differ in what a kernel makes its tiles of, and not for plain JAX."""
DECODE = {
    "one row": Batch(rows=((1, 21),), padded_rows=1, padded_width=3),
    "first token": Batch(rows=((1, 1), (1, 1))),
    "lengths around a page": Batch(rows=tuple((1, n) for n in (7, 8, 9, 63, 64, 65))),
    "padding rows": Batch(rows=((0, 0), (1, 30), (0, 0))),
    "only padding rows": Batch(rows=((0, 0), (0, 0))),
    "long and short": Batch(rows=((1, 2), (1, 110))),
    "window": Batch(rows=((1, 2), (1, 110), (1, 65)), window=10),
    "soft cap": Batch(rows=((1, 2), (1, 80)), soft_cap=2.0),
    "sinks": Batch(rows=((1, 2), (1, 80), (0, 0)), num_groups=3, has_sinks=True),
    "sinks and window": Batch(rows=((1, 2), (1, 110)), has_sinks=True, window=10),
    "head width 80": Batch(rows=((1, 2), (1, 80)), head_dim=80),
    "head width 256": Batch(rows=((1, 2), (1, 40)), head_dim=256),
    "bfloat16": Batch(rows=((1, 2), (1, 80)), dtype="bfloat16"),
    "float16": Batch(rows=((1, 2), (1, 80)), dtype="float16"),
    "page size 128": Batch(rows=((1, 2), (1, 130)), page_size=128, padded_width=2),
}


@functools.cache
def make_arrays(batch: Batch) -> dict[str, jax.Array]:
    """The arguments of paged_attention. Slots that no row owns are NaN, and so are the pages before a row's window."""
    rng = np.random.default_rng(len(batch.rows) + batch.head_dim)
    rows = batch.rows + ((0, 0),) * (batch.padded_rows - len(batch.rows))
    num_rows, size, width = batch.padded_rows, batch.page_size, batch.padded_width
    num_pages = num_rows * width + 3
    pages = rng.permutation(np.arange(1, num_pages))
    table = np.zeros((num_rows, width), np.int32)  # before and past a row's pages: page 0, which is unused
    shape = (num_pages, batch.num_kv_heads, size, batch.head_dim)
    k, v = np.full(shape, np.nan), np.full(shape, np.nan)
    for row, (new, length) in enumerate(rows):
        first = 0 if batch.window is None else max(0, length - new - batch.window + 1) // size
        used = -(-length // size) - first
        table[row, first : first + used], pages = pages[:used], pages[used:]
        for position in range(first * size, length):
            for cache in (k, v):
                cache[table[row, position // size], :, position % size] = rng.normal(size=(batch.num_kv_heads, batch.head_dim))
    start = np.concatenate([[0], np.cumsum([new for new, _ in rows])])
    q = rng.normal(size=(batch.padded_tokens, batch.num_kv_heads, batch.num_groups, batch.head_dim))
    return {
        "q": jnp.asarray(q, batch.dtype),
        "k": jnp.asarray(k, batch.dtype),
        "v": jnp.asarray(v, batch.dtype),
        "table": jnp.asarray(table),
        "query_start": jnp.asarray(start, jnp.int32),
        "kv_length": jnp.asarray([length for _, length in rows], jnp.int32),
    }


@functools.cache
def oracle(batch: Batch) -> np.ndarray:
    """One query, one head, one key list at a time, in float64."""
    arrays = {name: np.asarray(x) for name, x in make_arrays(batch).items()}
    q, k, v = (arrays[name].astype(np.float64) for name in ("q", "k", "v"))
    out = np.zeros(q.shape)
    token = 0
    for row, (new, length) in enumerate(batch.rows):
        for position in range(length - new, length):
            seen = np.arange(0 if batch.window is None else max(0, position + 1 - batch.window), position + 1)
            pages, slots = arrays["table"][row, seen // batch.page_size], seen % batch.page_size
            for head in range(batch.num_kv_heads):
                scores = q[token, head] @ k[pages, head, slots].T * batch.options["scale"]
                if batch.soft_cap is not None:
                    scores = batch.soft_cap * np.tanh(scores / batch.soft_cap)
                if batch.has_sinks:
                    scores = np.concatenate([scores, np.asarray(batch.sinks["sinks_KG"], np.float64)[head][:, None]], axis=1)
                weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
                weights = (weights / weights.sum(axis=-1, keepdims=True))[:, : len(seen)]
                out[token, head] = weights @ v[pages, head, slots]
            token += 1
    return out


def as_decode(batch: Batch) -> tuple[list[jax.Array], np.ndarray]:
    """The arguments of paged_decode, a query for every row, and the result that is expected."""
    arrays = make_arrays(batch)
    rows = [row for row, (new, _) in enumerate(batch.rows) if new]
    q = (
        jnp.ones((batch.padded_rows, *arrays["q"].shape[1:]), batch.dtype)
        .at[jnp.asarray(rows, int)]
        .set(arrays["q"][: len(rows)])
    )
    expected = np.zeros(q.shape)
    expected[rows] = oracle(batch)[: len(rows)]
    return [q, arrays["k"], arrays["v"], arrays["table"], arrays["kv_length"]], expected


@functools.cache
def jit(function, **options):
    """One compilation of the whole instead of one per operation, and in haste: these programs run once."""
    return jax.jit(functools.partial(function, **options), compiler_options={"xla_backend_optimization_level": 0})


def assert_close(batch: Batch, got: jax.Array, expected: np.ndarray) -> None:
    """Padding tokens have to be finite, whatever they are."""
    assert bool(jnp.isfinite(got).all())
    if got.shape[0] == batch.padded_tokens != batch.padded_rows:
        got, expected = got[: batch.num_tokens], expected[: batch.num_tokens]
    np.testing.assert_allclose(
        np.asarray(got, np.float64), expected, atol=TOLERANCE[batch.dtype] * 2, rtol=TOLERANCE[batch.dtype]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "implementation"),
    [(name, "triton") for name in RAGGED]
    + [(name, "xla") for name in RAGGED if name not in OF_TILES]
    # The reference computes rows without tiles, padding or pages of their own.
    + [(name, "reference") for name in ("mixed", "only padding", "sinks, window and soft cap", "bfloat16")],
)
def test_ragged_attention_matches_the_oracle(name: str, implementation: str) -> None:
    batch = RAGGED[name]
    arrays = make_arrays(batch)
    call = jit(paged_attention, **batch.options, implementation=implementation, interpret=True)
    got = call(*arrays.values(), **batch.sinks)
    assert got.dtype == jnp.dtype(batch.dtype)
    assert_close(batch, got, oracle(batch))


@pytest.mark.parametrize(
    ("name", "implementation"),
    slow_except(
        [*product(("lengths around a page", "soft cap", "sinks and window", "bfloat16"), ("xla", "triton"))]
        + [("padding rows", "triton"), ("padding rows", "reference"), ("sinks and window", "reference")],
        [(name, "triton") for name in DECODE]
        + [(name, "xla") for name in DECODE if name not in {"one row", "first token", "head width 80", "window", *OF_TILES}]
        # The reference computes decodes as it computes prompts.
        + [(name, "reference") for name in ("padding rows", "sinks and window", "soft cap", "bfloat16")],
    ),
)
def test_decode_matches_the_oracle(name: str, implementation: str) -> None:
    batch = DECODE[name]
    args, expected = as_decode(batch)
    got = jit(paged_decode, **batch.options, implementation=implementation, interpret=True)(*args, **batch.sinks)
    assert got.dtype == jnp.dtype(batch.dtype)
    assert_close(batch, got, expected)


@pytest.mark.parametrize(
    ("splits", "window", "has_sinks"), slow_except([(3, 20, True)], [(2, None, False), (3, 20, True), (7, 20, True)])
)
@pytest.mark.slow
def test_splits_of_the_triton_decode_combine_to_the_whole(splits: int, window: int | None, has_sinks: bool) -> None:
    batch = Batch(rows=((1, 1), (1, 110), (0, 0), (1, 17)), num_groups=3, window=window, has_sinks=has_sinks)
    args, expected = as_decode(batch)
    call = jit(triton_paged_decode, **batch.options, interpret=True, tiles=DecodeTiles(block_k=16, num_splits=splits))
    got = call(*args, **batch.sinks)
    assert_close(batch, got, expected)


@pytest.mark.slow
def test_triton_prefill_takes_groups_that_do_not_fill_its_tile() -> None:
    batch = Batch(rows=((9, 30), (4, 4)), num_groups=5, num_kv_heads=1)
    tiles = triton_prefill.PrefillTiles(block_m=16, block_k=16, num_warps=4, num_stages=2)
    got = jit(triton_prefill.paged_attention, **batch.options, interpret=True, tiles=tiles)(*make_arrays(batch).values())
    assert_close(batch, got, oracle(batch))


@pytest.mark.parametrize("implementation", slow_except(["triton"], ["xla", "triton"]))
def test_queries_and_cache_may_differ_in_type(implementation: str) -> None:
    batch = Batch(rows=((4, 20), (1, 9)))
    arrays = dict(make_arrays(batch))
    arrays |= {"k": arrays["k"].astype(jnp.bfloat16), "v": arrays["v"].astype(jnp.bfloat16)}
    got = jit(paged_attention, **batch.options, implementation=implementation, interpret=True)(*arrays.values())
    expected = jit(paged_attention, **batch.options, implementation="reference")(*arrays.values())
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, expected, atol=2e-6)


@pytest.mark.parametrize("implementation", GENERAL)
def test_garbage_in_the_table_past_a_rows_pages_is_harmless(implementation: str) -> None:
    batch = RAGGED["mixed"]
    arrays = dict(make_arrays(batch))
    used = -(-arrays["kv_length"] // batch.page_size)
    garbage = jnp.where(jnp.arange(arrays["table"].shape[1])[None] < used[:, None], arrays["table"], 1 << 20)
    got = jit(paged_attention, **batch.options, implementation=implementation, interpret=True)(
        *(arrays | {"table": garbage}).values()
    )
    assert_close(batch, got, oracle(batch))


def test_tiles_cover_every_token_once_and_never_cross_rows() -> None:
    query_start, kv_length, num_tokens = jnp.array([0, 0, 5, 6, 20]), jnp.array([0, 9, 1, 14]), 27
    tiles = np.asarray(
        jax.jit(make_tiles, static_argnums=(2, 3))(query_start.astype(jnp.int32), kv_length.astype(jnp.int32), num_tokens, 4)
    )
    assert len(tiles) == max_tiles(num_tokens, 4, 4)
    covered = []
    for tile in tiles[tiles[:, COUNT] > 0]:
        covered += range(tile[TOKEN], tile[TOKEN] + tile[COUNT])
        row = tile[ROW]
        if row < 4:
            assert query_start[row] <= tile[TOKEN] and tile[TOKEN] + tile[COUNT] <= query_start[row + 1]
            assert tile[POSITION] == kv_length[row] - query_start[row + 1] + tile[TOKEN]
        else:
            assert tile[POSITION] + tile[COUNT] <= 0
    assert covered == list(range(num_tokens))


@pytest.mark.slow
def test_two_layers_share_one_tile_table() -> None:
    """XLA removes the second of two equal tables: a model computes it once a step."""
    batch = RAGGED["mixed"]
    q, k, v, *rest = make_arrays(batch).values()
    call = functools.partial(paged_attention, **batch.options, implementation="xla")
    haste = {"xla_backend_optimization_level": 0}
    one = jax.jit(lambda q: call(q, k, v, *rest)).lower(q).compile(haste).as_text()
    two = jax.jit(lambda q: call(call(q, k, v, *rest), k, v, *rest)).lower(q).compile(haste).as_text()
    shape = f"s32[{max_tiles(q.shape[0], batch.padded_rows, 32)},4]"
    assert shape in one
    assert two.count(f"{shape}{{1,0}} concatenate(") == one.count(f"{shape}{{1,0}} concatenate(")


@pytest.mark.parametrize(("head_dim", "dtype"), slow_except([(64, jnp.bfloat16)], [(64, jnp.bfloat16), (80, jnp.float32)]))
def test_triton_kernels_lower_for_cuda_without_a_gpu(head_dim: int, dtype) -> None:
    batch = Batch(
        rows=((5, 5), (1, 20), (0, 0)), num_groups=3, head_dim=head_dim, window=9, soft_cap=3.0, has_sinks=head_dim == 64
    )
    arrays = [jax.ShapeDtypeStruct(x.shape, dtype if x.ndim == 4 else x.dtype) for x in make_arrays(batch).values()]
    q, k, v, table, query_start, kv_length = arrays
    decode_q = jax.ShapeDtypeStruct((batch.padded_rows, *q.shape[1:]), dtype)

    def both(q, decode_q, k, v, table, query_start, kv_length):
        options = batch.options | batch.sinks | {"implementation": "triton"}
        tiles = DecodeTiles(block_k=16, num_splits=2)
        return (
            paged_attention(q, k, v, table, query_start, kv_length, **options),
            paged_decode(decode_q, k, v, table, kv_length, **options),
            triton_paged_decode(decode_q, k, v, table, kv_length, **batch.options, **batch.sinks, tiles=tiles),
        )

    with a_gpu_to_lower_for():
        traced = jax.jit(both).trace(q, decode_q, k, v, table, query_start, kv_length)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("xla.gpu.triton") == 5  # ragged: tiles and single tokens; decode; split decode and its combination


def test_the_choice_follows_the_platform() -> None:
    case = {"dtype": jnp.bfloat16, "num_groups": 4, "head_dim": 128}
    assert choose(platform="cpu", **case) == "xla"
    assert choose(platform="gpu", **case) == ("mosaic" if has_mosaic() else "triton")
    assert choose(platform="gpu", **case | {"head_dim": 80}) == "triton"
    assert choose(platform="gpu", **case | {"head_dim": 512}) == "xla"


def test_unknown_implementation_is_refused_by_name() -> None:
    args, _ = as_decode(DECODE["one row"])
    with pytest.raises(ValueError, match="no attention implementation 'cudnn'; there are reference, xla, triton"):
        paged_decode(*args, scale=1.0, implementation="cudnn")


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_every_implementation_has_the_options_of_the_dispatcher(name: str) -> None:
    module = importlib.import_module(IMPLEMENTATIONS[name])
    for function, array_count in ((paged_attention, 6), (paged_decode, 5)):
        not_taken = {"implementation"} if name in TAKING_PARTS else {"implementation", "part"}
        options = {key: None for key in inspect.signature(function).parameters if key not in not_taken}
        arrays = list(options)[:array_count]
        inspect.signature(getattr(module, function.__name__)).bind(*arrays, **{k: None for k in options if k not in arrays})


def test_an_implementation_without_sinks_refuses_them() -> None:
    case = {"dtype": jnp.bfloat16, "num_groups": 4, "head_dim": 64}
    assert not supports("jax_triton", **case, has_sinks=True)
    assert candidates(platform="gpu", **case, has_sinks=True) == candidates(platform="gpu", **case)


def test_a_shape_that_a_kernel_cannot_take_is_refused() -> None:
    args, _ = as_decode(Batch(rows=((1, 3),), head_dim=512))
    with pytest.raises(
        ValueError,
        match="'triton' does not take 2 query heads .* of width 512 in float32 over a cache of float32 with pages of 8; use 'xla'",
    ):
        paged_decode(*args, scale=1.0, implementation="triton", interpret=True)
