"""Paged attention, decode and ragged, by every implementation that takes the case, against the float32 reference."""

import functools
import importlib
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import IMPLEMENTATIONS, reference, triton_decode, triton_prefill
from scripts.kernels import Case

TOLERANCE = {"float32": 2e-5, "float16": 3e-3, "bfloat16": 1.5e-2}
"""Of the worst query head's relative error: a few roundings of the result, its weights rounded to the type."""
REFERENCE_BYTES = 1 << 29


@dataclass(frozen=True)
class Batch:
    """Rows of one query by the number of their keys, and prompts as (new tokens, keys before them). Without prompts it is a decode.

    A decode row of 0 keys is padding; `padding` counts tokens after the last prompt. poison: every slot that no row owns is NaN.
    """

    name: str
    decodes: tuple[int, ...] = ()
    prompts: tuple[tuple[int, int], ...] = ()
    num_kv_heads: int = 8
    num_groups: int = 4
    head_dim: int = 128
    page_size: int = 16
    dtype: str = "bfloat16"
    window: int | None = None
    soft_cap: float | None = None
    padding: int = 0
    poison: bool = False

    @property
    def query_lengths(self) -> list[int]:
        singles = [1 if length or not self.prompts else 0 for length in self.decodes]
        return singles + [new for new, _ in self.prompts]

    @property
    def kv_lengths(self) -> list[int]:
        return list(self.decodes) + [new + before for new, before in self.prompts]

    @property
    def width(self) -> int:
        """Pages in a row of the table."""
        return max(1, *(-(-n // self.page_size) for n in self.kv_lengths))

    @property
    def options(self) -> dict[str, Any]:
        return {"scale": self.head_dim**-0.5, "window": self.window, "soft_cap": self.soft_cap}

    def flops(self) -> float:
        pairs = 0
        for new, length in zip(self.query_lengths, self.kv_lengths, strict=True):
            seen = np.arange(length - new, length) + 1
            pairs += int(np.minimum(seen, self.window or length).sum())
        return 4.0 * pairs * self.head_dim * self.num_kv_heads * self.num_groups

    def bytes(self) -> float:
        keys = sum(min(n, self.window or n) for n in self.kv_lengths)
        return 2.0 * keys * self.num_kv_heads * self.head_dim * jnp.dtype(self.dtype).itemsize


def speed_cases(tiny: bool, tune: bool) -> list[Case]:
    """The shapes of Llama-3.1-8B (head width 128) and Llama-3.2-1B (64)."""
    if tiny:
        toy = {"head_dim": 16, "num_kv_heads": 2, "num_groups": 2, "page_size": 8, "dtype": "float32"}
        batches = [
            Batch("decode tiny", decodes=(70, 33), **toy),  # type: ignore[arg-type]
            Batch("mixed tiny", decodes=(9,), prompts=((21, 5),), padding=3, **toy),  # type: ignore[arg-type]
        ]
    else:
        batches = [
            Batch(f"decode {rows}x{length} h{dim}", decodes=(length,) * rows, head_dim=dim)
            for dim in (128, 64)
            for rows, length in ((1, 8192), (64, 1152), (16, 4096), (256, 1152), (1, 1152))
        ]
        for dim in (128, 64):
            batches += [
                Batch(f"prefill 8x1024 h{dim}", prompts=((1024, 0),) * 8, head_dim=dim),
                Batch(f"prefill 1x8192 h{dim}", prompts=((8192, 0),), head_dim=dim),
                Batch(f"mixed 256 decodes of 600 + 2x256 h{dim}", decodes=(600,) * 256, prompts=((256, 0),) * 2, head_dim=dim),
            ]
    return [_case(batch, tiny=tiny, tune=tune) for batch in batches]


def check_cases(tiny: bool) -> list[Case]:
    """Edges: lengths around a page, long contexts, many rows, head widths, groups, windows, caps, types, page sizes."""
    toy = {"num_kv_heads": 2, "num_groups": 2, "poison": True}
    edges = (1, 15, 16, 17, 0, 33)
    if tiny:
        batches = [
            Batch("edges", decodes=edges, head_dim=64, **toy),  # type: ignore[arg-type]
            Batch("mixed", decodes=edges, prompts=((5, 0), (17, 16)), padding=3, head_dim=64, **toy),  # type: ignore[arg-type]
            Batch("window, cap", decodes=(40,), prompts=((9, 8),), window=7, soft_cap=30.0, head_dim=64, **toy),  # type: ignore[arg-type]
        ]
        return [_case(batch, tiny=True) for batch in batches]
    rng = np.random.default_rng(1)
    many = tuple(int(n) for n in rng.integers(1, 700, 512))
    ragged = {"decodes": (300, 1, 77), "prompts": ((130, 40), (7, 0))}
    batches = [
        Batch("edges", decodes=(*edges, 127, 128, 129, 4095, 4096, 4097)),
        Batch("mixed edges", decodes=edges, prompts=((16, 0), (17, 0), (2, 15), (130, 0), (33, 200), (64, 64)), padding=13),
        Batch("contexts 32 k and 128 k", decodes=(32768, 131072, 1, 5000)),
        Batch("chunk at 128 k", prompts=((200, 130872),)),
        Batch("512 rows", decodes=many),
        Batch("512 rows with a prompt", decodes=many[:500], prompts=((512, 0),)),
        Batch("one row", decodes=(777,)),
        Batch("padding only", decodes=(0, 0, 0)),
        Batch("window 1", window=1, **ragged),  # type: ignore[arg-type]
        Batch("window 50", decodes=(300, 49, 50, 51), prompts=((130, 40),), window=50),
        Batch("window decode", decodes=(300, 49, 50, 51, 9000), window=50),
        Batch("window 256", decodes=(1500,), prompts=((700, 600),), window=256),
        Batch("soft cap", soft_cap=30.0, **ragged),  # type: ignore[arg-type]
        Batch("soft cap decode", decodes=(300, 5), soft_cap=30.0, window=100),
        *(
            Batch(f"h{dim} g{groups}{kind}", **rows, head_dim=dim, num_groups=groups, num_kv_heads=heads)  # type: ignore[arg-type]
            for dim, groups, heads in (
                (64, 4, 8),
                (64, 8, 2),
                (80, 1, 4),
                (96, 3, 2),
                (128, 1, 8),
                (128, 8, 1),
                (256, 1, 2),
                (256, 8, 2),
            )
            for kind, rows in ((" decode", {"decodes": (300, 17)}), ("", ragged))
        ),
        *(
            Batch(f"{dtype} page {page}{kind}", **rows, dtype=dtype, page_size=page)  # type: ignore[arg-type]
            for dtype, page in (("float32", 16), ("float16", 64), ("bfloat16", 8), ("bfloat16", 128))
            for kind, rows in ((" decode", {"decodes": (300, 129, 1)}), ("", ragged))
        ),
    ]
    return [_case(replace(batch, poison=True), tiny=False) for batch in batches]


def _case(batch: Batch, *, tiny: bool, tune: bool = False) -> Case:
    return Case(
        batch.name,
        functools.partial(make_arrays, batch),
        _variants(batch, tune),
        functools.partial(worst_error, batch),
        TOLERANCE[batch.dtype],
        batch.bytes(),
        batch.flops(),
    )


def _variants(batch: Batch, tune: bool) -> dict[str, Callable[..., jax.Array]]:
    """What the dispatcher could choose, as the engine calls it, and with `tune` other tile sizes of the Triton kernels."""
    on_gpu = jax.default_backend() == "gpu"
    options = {"interpret": not on_gpu, **batch.options}
    found = {}
    for name, path in IMPLEMENTATIONS.items():
        module = importlib.import_module(path)
        takes = module.supports(
            platform=jax.default_backend(),
            dtype=jnp.dtype(batch.dtype),
            num_groups=batch.num_groups,
            head_dim=batch.head_dim,
            cache_dtype=jnp.dtype(batch.dtype),
            page_size=batch.page_size,
            interpret=not on_gpu,
        )
        if name != "reference" and takes:
            found[name] = _call(module, batch, options)
    for tiles in _tiles(batch) if tune else []:
        module = triton_prefill if batch.prompts else triton_decode
        label = "triton " + " ".join(f"{key}={value}" for key, value in asdict(tiles).items())
        found[label] = _call(module, batch, options | {"tiles": tiles})
    return found


def _call(module: Any, batch: Batch, options: dict[str, Any]) -> Callable[..., jax.Array]:
    def call(q, k, v, table, query_start, kv_length):
        if batch.prompts:
            return module.paged_attention(q, k, v, table, query_start, kv_length, **options)
        return module.paged_decode(q, k, v, table, kv_length, **options)

    return call


def _tiles(batch: Batch) -> list[Any]:
    dtype = jnp.dtype(batch.dtype)
    found: list[Any] = []
    if batch.prompts:
        num_tokens = sum(batch.query_lengths) + batch.padding
        base: Any = triton_prefill.pick_tiles(num_tokens, batch.num_groups, batch.head_dim, dtype.itemsize)
        sizes = ((128, 64, 8), (128, 64, 4), (64, 64, 4), (128, 128, 8), (64, 128, 4), (128, 32, 8), (256, 64, 8))
        for m, k, warps in sizes:
            found += [replace(base, block_m=m, block_k=k, num_warps=warps, num_stages=stages) for stages in (2, 3, 5)]
        return found
    slots = batch.width * batch.page_size
    base = triton_decode.pick_tiles(len(batch.decodes), batch.num_kv_heads, batch.head_dim, dtype.itemsize, slots, batch.window)
    splits = sorted({base.num_splits, max(1, base.num_splits // 2), base.num_splits * 2, base.num_splits * 4})
    for block_k, warps, stages in (
        *((32, 4, 7), (64, 4, 3), (64, 4, 5), (64, 4, 7), (128, 4, 3), (128, 4, 5)),
        *((64, 2, 5), (32, 2, 5), (32, 2, 7), (32, 1, 5), (64, 8, 5), (128, 8, 5)),
    ):
        found += [replace(base, block_k=block_k, num_warps=warps, num_stages=stages, num_splits=s) for s in splits]
    return found


def make_arrays(batch: Batch, seed: int = 0) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """(queries, (keys, values, table, query starts, lengths)): random, in permuted pages; page 0 is nobody's."""
    rng = np.random.default_rng(seed)
    num_rows = len(batch.kv_lengths)
    used = [-(-n // batch.page_size) for n in batch.kv_lengths]
    num_pages = sum(used) + 2
    pages = iter(rng.permutation(num_pages - 1) + 1)
    table = np.zeros((num_rows, batch.width), np.int32)
    owned = np.zeros((num_pages, batch.page_size), bool)
    for row, length in enumerate(batch.kv_lengths):
        table[row, : used[row]] = [next(pages) for _ in range(used[row])]
        slots = np.arange(length)
        owned[table[row, slots // batch.page_size], slots % batch.page_size] = True
    num_tokens = sum(batch.query_lengths) + batch.padding
    shape = (num_pages, batch.num_kv_heads, batch.page_size, batch.head_dim)
    q_shape = (num_tokens, batch.num_kv_heads, batch.num_groups, batch.head_dim)
    hole = ~owned[:, None, :, None] if batch.poison else np.zeros((1, 1, 1, 1), bool)
    k_key, v_key, q_key = jax.random.split(jax.random.key(seed), 3)
    query_start = np.concatenate([[0], np.cumsum(batch.query_lengths)]).astype(np.int32)
    return _random(q_key, q_shape, batch.dtype, np.zeros((1, 1, 1, 1), bool)), (
        _random(k_key, shape, batch.dtype, hole),
        _random(v_key, shape, batch.dtype, hole),
        jnp.asarray(table),
        jnp.asarray(query_start),
        jnp.asarray(np.array(batch.kv_lengths, np.int32)),
    )


@functools.partial(jax.jit, static_argnums=(1, 2))
def _random(key: jax.Array, shape: tuple[int, ...], dtype: str, hole: jax.Array) -> jax.Array:
    return jnp.where(hole, jnp.nan, jax.random.normal(key, shape, jnp.dtype(dtype))).astype(dtype)


def worst_error(batch: Batch, q: jax.Array, constants: tuple[jax.Array, ...], got: jax.Array, max_tokens: int = 600) -> float:
    """The worst relative error of a token's query head against the reference in float32; NaN if anything, padding too, is not finite.

    At most max_tokens tokens, spread evenly, are compared: one of a prompt is a decode at its position.
    """
    k, v, table, _, _ = constants
    rows = np.repeat(np.arange(len(batch.kv_lengths)), batch.query_lengths)
    start = np.concatenate([[0], np.cumsum(batch.query_lengths)])
    tokens = np.arange(len(rows))
    lengths = np.array(batch.kv_lengths)[rows] - start[rows + 1] + tokens + 1
    if not bool(jnp.isfinite(got).all()):
        return math.nan
    token_bytes = 8 * batch.width * batch.page_size * batch.num_kv_heads * batch.head_dim
    chunk = max(1, min(len(tokens), REFERENCE_BYTES // token_bytes))
    tokens = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), max_tokens, 32 * chunk)).astype(int))
    worst = 0.0
    expect = _reference(**batch.options)
    for first in range(0, len(tokens), chunk):
        # The last chunk begins earlier, so that all have one shape.
        some = tokens[max(0, min(first, len(tokens) - chunk)) :][:chunk]
        expected = expect(q[some].astype(jnp.float32), k, v, table[rows[some]], jnp.asarray(lengths[some], jnp.int32))
        off = jnp.linalg.norm(got[some].astype(jnp.float32) - expected, axis=-1)
        size = jnp.linalg.norm(expected, axis=-1)
        worst = max(worst, float(jnp.where(off == 0, 0.0, off / jnp.maximum(size, 1e-6)).max()))
    return worst


@functools.cache
def _reference(**options: Any) -> Callable[..., jax.Array]:
    """Compiled once for all variants of a case."""
    return jax.jit(functools.partial(reference.paged_decode, **options))
