"""Paged attention, decode and ragged, by every implementation that takes the case, against the float32 reference."""

import functools
import importlib
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.checking.attention import (
    TOLERANCE,
    Batch,
    attend_part,
    call,
    make_arrays,
    split_pages,
    worst_error,
)
from pallas_kernels.checking.case import Case
from pallas_kernels.paged_attention import IMPLEMENTATIONS, TAKING_PARTS, mosaic_decode, triton_decode, triton_prefill
from pallas_kernels.paged_attention.mosaic_decode import THREE_WORKERS, DecodeTiles
from pallas_kernels.paged_attention.parts import combine

FP8 = "float8_e4m3fn"
_LONG: dict[str, dict[str, Any]] = {
    "decode 1x128k": {"decodes": (131072,)},
    "decode 8x128k": {"decodes": (131072,) * 8},
    "chunk of 2048 at 120k": {"prompts": ((2048, 122880),)},
}
"""Long contexts: whole, and what four devices that split the keys compute, one after the other."""
_CHUNKS = ((8192, 8192), (8192, 24576), (8192, 122880), (3072, 29696))
"""New tokens of a long prompt and those before them."""
_FA3_TFLOPS = {
    64: {512: 197, 1024: 265, 2048: 371, 4096: 420, 8192: 460, 16384: 473},
    128: {512: 292, 1024: 423, 2048: 521, 4096: 579, 8192: 602, 16384: 616},
}
"""By head width and tokens: FlashAttention-3, causal forward in 16 bits on an H100 SXM5, 16384 tokens in all, contiguous keys
(arXiv 2407.08608, figure 5, as transcribed by others)."""


def speed_cases(tiny: bool, tune: bool) -> list[Case]:
    """The shapes of Llama-3.1-8B (head width 128) and Llama-3.2-1B (64)."""
    if tiny:
        toy = {"head_dim": 16, "num_kv_heads": 2, "num_groups": 2, "page_size": 8, "dtype": "float32"}
        batches = [
            Batch("decode tiny", decodes=(70, 33), **toy),  # type: ignore[arg-type]
            Batch("mixed tiny", decodes=(9,), prompts=((21, 5),), padding=3, **toy),  # type: ignore[arg-type]
            Batch("decode of 3 queries tiny", decodes=(70, 33), num_queries=3, **toy),  # type: ignore[arg-type]
            Batch("decode tiny in 2 parts", decodes=(70, 33), num_parts=2, **{**toy, "page_size": 16}),  # type: ignore[arg-type]
        ]
    else:
        batches = [
            Batch(f"decode {rows}x{length} h{dim}", decodes=(length,) * rows, head_dim=dim)
            for dim in (128, 64)
            for rows, length in ((1, 8192), (64, 1152), (16, 4096), (256, 1152), (1, 1152))
        ]
        # Beside those of one query, which read the same keys.
        batches += [
            Batch(f"decode of {queries} queries {rows}x{length} h128", decodes=(length,) * rows, num_queries=queries)
            for rows, length in ((1, 1024), (8, 1024), (64, 1024), (1, 4096), (8, 4096), (64, 4096))
            for queries in (1, 5, 8)
        ]
        for dim in (128, 64):
            batches += [
                Batch(f"prefill 8x1024 h{dim}", prompts=((1024, 0),) * 8, head_dim=dim),
                Batch(f"prefill 1x8192 h{dim}", prompts=((8192, 0),), head_dim=dim),
                Batch(f"mixed 256 decodes of 600 + 2x256 h{dim}", decodes=(600,) * 256, prompts=((256, 0),) * 2, head_dim=dim),
            ]
        fp8: dict[str, Any] = {"cache_dtype": FP8, "has_scales": True}
        batches += [
            Batch(f"decode {rows}x1152 h{dim} fp8 cache", (1152,) * rows, head_dim=dim, **fp8)
            for dim in (128, 64)
            for rows in (1, 8, 64, 256)
        ]
        batches += [
            Batch(f"prefill 8x1024 h{dim} fp8 cache", prompts=((1024, 0),) * 8, head_dim=dim, **fp8) for dim in (128, 64)
        ]
        batches += [Batch(f"chunk of {new} at {before // 1024}k h128", prompts=((new, before),)) for new, before in _CHUNKS]
        for name, rows in _LONG.items():
            batches += [Batch(f"{name} h128", **rows), Batch(f"{name} h128 in 4 parts", page_size=64, num_parts=4, **rows)]
    return [_in_split_caches(batch) if batch.num_parts > 1 else _case(batch, tiny=tiny, tune=tune) for batch in batches]


def check_cases(tiny: bool) -> list[Case]:
    """Edges: lengths around a page, long contexts, many rows, head widths, groups, windows, caps, types, page sizes."""
    toy = {"num_kv_heads": 2, "num_groups": 2, "poison": True}
    edges = (1, 15, 16, 17, 0, 33)
    if tiny:
        batches = [
            Batch("edges", decodes=edges, head_dim=64, **toy),  # type: ignore[arg-type]
            Batch("mixed", decodes=edges, prompts=((5, 0), (17, 16)), padding=3, head_dim=64, **toy),  # type: ignore[arg-type]
            Batch("sinks", decodes=(40,), prompts=((9, 8),), has_sinks=True, head_dim=64, **toy),  # type: ignore[arg-type]
            Batch("window, cap", decodes=(40,), prompts=((9, 8),), window=7, soft_cap=30.0, head_dim=64, **toy),  # type: ignore[arg-type]
            Batch("few queries", decodes=(3, 0, 4, 40), num_queries=3, has_sinks=True, window=20, head_dim=64, **toy),  # type: ignore[arg-type]
            Batch("2 parts", edges, ((5, 0), (70, 20)), head_dim=64, padding=3, page_size=32, num_parts=2, **toy),  # type: ignore[arg-type]
            Batch("h128 decode", decodes=(1, 17, 40), head_dim=128, num_kv_heads=1, num_groups=3, poison=True),
            Batch("h128", prompts=((4, 0), (70, 20), (3, 0)), head_dim=128, num_kv_heads=1, num_groups=2, poison=True),
        ]
        return [_case(batch, tiny=True) for batch in batches]
    rng = np.random.default_rng(1)
    many = tuple(int(n) for n in rng.integers(1, 700, 512))
    ragged = {"decodes": (300, 1, 77), "prompts": ((130, 40), (7, 0))}
    rows_of = {" decode": {"decodes": (300, 17, 1)}, "": ragged}
    batches = [
        Batch("prompts that begin anywhere", prompts=((4, 0), (130, 0), (3, 0), (61, 5), (513, 0), (700, 300)), padding=5),
        Batch("edges", decodes=(*edges, 127, 128, 129, 4095, 4096, 4097)),
        Batch("mixed edges", decodes=edges, prompts=((16, 0), (17, 0), (2, 15), (130, 0), (33, 200), (64, 64)), padding=13),
        Batch("contexts 32 k and 128 k", decodes=(32768, 131072, 1, 5000)),
        Batch("chunk at 128 k", prompts=((200, 130872),)),
        Batch("512 rows", decodes=many),
        Batch("512 rows with a prompt", decodes=many[:500], prompts=((512, 0),)),
        Batch("one row", decodes=(777,)),
        Batch("padding only", decodes=(0, 0, 0)),
        Batch("window 1", window=1, **ragged),  # type: ignore[arg-type]
        Batch("window 1 page 128", window=1, page_size=128, **ragged),  # type: ignore[arg-type]
        Batch("window 50", decodes=(300, 49, 50, 51), prompts=((130, 40),), window=50),
        Batch("window decode", decodes=(300, 49, 50, 51, 9000), window=50),
        Batch("window 256", decodes=(1500,), prompts=((700, 600),), window=256),
        Batch("soft cap", soft_cap=30.0, **ragged),  # type: ignore[arg-type]
        Batch("soft cap decode", decodes=(300, 5), soft_cap=30.0, window=100),
        *(
            Batch(f"sinks h{dim}{kind}{said}", **rows, head_dim=dim, num_groups=8, has_sinks=True, window=window)  # type: ignore[arg-type]
            for dim in (64, 128)
            for said, window in (("", None), (" window 128", 128))
            for kind, rows in rows_of.items()
        ),
        *_few_queries(),
        *_in_parts(),
        Batch("sinks of long rows", decodes=(4096, 32768, 0), num_groups=8, has_sinks=True),
        Batch("sinks of 512 rows", decodes=many, head_dim=64, num_groups=8, has_sinks=True),
        Batch("512 rows, fp8 cache", decodes=many, cache_dtype=FP8, has_scales=True),
        Batch("sinks fp8 cache", head_dim=64, num_groups=8, cache_dtype=FP8, has_scales=True, has_sinks=True, **ragged),  # type: ignore[arg-type]
        *(
            Batch(f"h{dim} g{groups}{kind}", **rows, head_dim=dim, num_groups=groups, num_kv_heads=heads)  # type: ignore[arg-type]
            for dim, groups, heads in (
                (64, 4, 8),
                (64, 8, 2),
                (80, 1, 4),
                (96, 3, 2),
                (128, 1, 8),
                (128, 3, 8),
                (128, 5, 2),
                (128, 7, 4),
                (128, 8, 1),
                (128, 12, 1),
                (256, 1, 2),
                (256, 8, 2),
            )
            for kind, rows in rows_of.items()
        ),
        *(
            Batch(
                f"fp8 cache h{dim} g{groups}{kind}", **rows, head_dim=dim, num_groups=groups, cache_dtype=FP8, has_scales=True
            )  # type: ignore[arg-type]
            for dim, groups in ((64, 4), (128, 4), (128, 3))
            for kind, rows in rows_of.items()
        ),
        *(
            Batch(f"{dtype} page {page}{kind}", **rows, dtype=dtype, page_size=page)  # type: ignore[arg-type]
            for dtype, page in (("float32", 16), ("float16", 64), ("bfloat16", 8), ("bfloat16", 128))
            for kind, rows in rows_of.items()
        ),
    ]
    return [_case(replace(batch, poison=True), tiny=False) for batch in batches] + _three_workers(many[:38])


def _three_workers(lengths: tuple[int, ...]) -> list[Case]:
    """Decodes over an 8-bit cache by three workers of a CTA, whichever kind of GPU it is."""
    options: dict[str, dict[str, Any]] = {
        "": {},
        ", pages of 128, groups of 8": {"page_size": 128, "num_groups": 8},
        ", window": {"window": 130, "soft_cap": 30.0},
        ", sinks": {"num_groups": 3, "has_sinks": True},
        " of 2 queries": {"num_queries": 2},
    }
    common: dict[str, Any] = {"cache_dtype": FP8, "has_scales": True, "poison": True}
    batches = [
        Batch(f"40 rows by three workers, fp8 cache{said}", (0, *lengths, 3000), **common, **own)
        for said, own in options.items()
    ]
    found = [(_case(batch, tiny=False), batch) for batch in batches]
    return [
        replace(case, variants={"mosaic": call(mosaic_decode, batch, interpret=False, tiles=THREE_WORKERS)})
        for case, batch in found
        if "mosaic" in case.variants
    ]


def _few_queries() -> list[Batch]:
    """Rows of a few queries each: lengths from their number on, and around tiles, pages and the window."""
    fields: list[tuple[int, int, dict[str, Any]]] = [
        (2, 4, {}),
        (5, 4, {}),
        (8, 8, {}),
        (17, 8, {}),
        (5, 1, {"window": 50}),
        (17, 4, {"window": 1}),
        (8, 4, {"soft_cap": 30.0, "window": 100}),
        (5, 8, {"has_sinks": True, "window": 128}),
        (17, 1, {"has_sinks": True}),
        (5, 4, {"cache_dtype": FP8, "has_scales": True}),
        (8, 8, {"cache_dtype": FP8, "has_scales": True, "has_sinks": True, "window": 50}),
        (5, 8, {"head_dim": 64, "has_sinks": True, "window": 128}),
        (5, 3, {"head_dim": 80, "num_kv_heads": 2}),
        (5, 4, {"head_dim": 256, "num_kv_heads": 2}),
        (5, 4, {"dtype": "float32"}),
        (2, 8, {"dtype": "float16", "page_size": 128}),
        (3, 3, {"page_size": 8}),
    ]
    batches = []
    for queries, groups, options in fields:
        said = "".join(f" {name} {value}" for name, value in options.items())
        lengths = (queries, 0, queries + 1, 63 + queries, 64, 66, 1037)
        batches.append(Batch(f"{queries} queries g{groups}{said}", lengths, num_queries=queries, num_groups=groups, **options))
    spread = tuple(int(n) for n in np.random.default_rng(2).integers(5, 700, 61))
    return [
        *batches,
        Batch("5 queries of long rows", decodes=(32768, 5000, 5), num_queries=5),
        Batch(
            "5 queries of long rows, window, sinks", decodes=(32768, 5), num_queries=5, num_groups=8, window=900, has_sinks=True
        ),
        Batch("5 queries of 64 rows", decodes=(0, *spread, 5, 1040), num_queries=5),
        Batch("8 queries of 64 rows fp8 cache", decodes=(0, *spread, 8, 1040), num_queries=8, cache_dtype=FP8, has_scales=True),
    ]


def _in_parts() -> list[Batch]:
    """Keys split over devices: each device's attention, one after the other, and their combination. Lengths around pages and blocks."""
    fields: list[tuple[int, int, dict[str, Any]]] = [
        (2, 16, {}),
        (4, 16, {}),
        (8, 16, {}),
        (4, 128, {}),
        (3, 64, {"soft_cap": 30.0}),
        (4, 16, {"window": 1}),
        (4, 16, {"window": 50}),
        (2, 16, {"window": 256, "head_dim": 64, "has_sinks": True, "num_groups": 8}),
        (4, 16, {"has_sinks": True}),
        (4, 16, {"cache_dtype": FP8, "has_scales": True}),
        (2, 16, {"head_dim": 80, "num_groups": 3}),
        (2, 16, {"head_dim": 256, "num_groups": 2}),
        (2, 8, {"dtype": "float32"}),
        (4, 64, {"dtype": "float16"}),
    ]
    batches = []
    for parts, page, options in fields:
        block = parts * page
        said = "".join(f" {name} {value}" for name, value in options.items())
        common = {"num_kv_heads": 2, **options, "page_size": block, "num_parts": parts}
        edges = (1, page - 1, page, page + 1, block - 1, block, block + 1, 0, 5 * block + page, 3000)
        prompts = ((5, 0), (block, 0), (1, page), (block + 3, page - 1), (200, 2 * block + 5), (513, 1100), (0, 0))
        batches += [
            Batch(f"{parts} parts page {page}{said} decode", decodes=edges, **common),
            Batch(f"{parts} parts page {page}{said}", decodes=edges, prompts=prompts, padding=5, **common),
        ]
    long: dict[str, Any] = {"num_kv_heads": 2, "page_size": 64, "num_parts": 4}
    return [
        *batches,
        Batch("4 parts, contexts 32 k and 128 k", decodes=(32768, 131072, 1, 5000), **long),
        Batch("4 parts, chunk at 128 k", prompts=((200, 130872),), **long),
    ]


def flash_attention_3(batch: Batch) -> str:
    """What FlashAttention-3 reaches for a prompt of as many tokens, or for the most published; empty where nothing compares."""
    published = {n: speed for n, speed in _FA3_TFLOPS.get(batch.head_dim, {}).items() if n <= max(batch.kv_lengths)}
    is_plain = batch.window is None and batch.soft_cap is None and not batch.has_sinks and not batch.cache_dtype
    if not batch.prompts or batch.decodes or not is_plain or not published or jnp.dtype(batch.dtype).itemsize != 2:
        return ""
    tokens = max(published)
    return f"FlashAttention-3 {published[tokens]} TFLOP/s (causal, {tokens} tokens, H100 SXM5)"


def _case(batch: Batch, *, tiny: bool, tune: bool = False) -> Case:
    return Case(
        batch.name,
        functools.partial(make_arrays, batch),
        _variants(batch, tune),
        functools.partial(worst_error, batch),
        TOLERANCE[batch.dtype],
        batch.bytes(),
        batch.flops(),
        note=flash_attention_3(batch),
    )


def _in_split_caches(batch: Batch) -> Case:
    """Attention of a batch in parts, one device after the other, each with its own keys and values."""
    whole = _case(batch, tiny=False)
    options = {"interpret": jax.default_backend() != "gpu"}

    def make() -> tuple[Any, tuple[Any, ...]]:
        q, (k, v, *others) = whole.make()
        return q, (split_pages(batch, k), split_pages(batch, v), *others)

    def error(q: Any, constants: tuple[Any, ...], got: Any) -> float:
        k, v = (jnp.concatenate(parts, axis=2) for parts in constants[:2])
        return whole.error(q, (k, v, *constants[2:]), got)

    def run(module: Any, q: Any, k_parts: list[Any], v_parts: list[Any], *others: Any) -> jax.Array:
        parts = [
            attend_part(module, batch, jnp.int32(rank), q, *pages, *others, **options)
            for rank, pages in enumerate(zip(k_parts, v_parts, strict=True))
        ]
        return combine(*(jnp.stack(arrays) for arrays in zip(*parts, strict=True)), None)

    variants = {name: functools.partial(run, importlib.import_module(IMPLEMENTATIONS[name])) for name in whole.variants}
    return replace(whole, make=make, error=error, variants=variants)


def _variants(batch: Batch, tune: bool) -> dict[str, Callable[..., jax.Array]]:
    """Implementations that the dispatcher could choose, as the engine calls it, and with `tune` other tile sizes of the decode kernels and
    of Triton's for prompts."""
    on_gpu = jax.default_backend() == "gpu"
    found = {}
    for name, path in IMPLEMENTATIONS.items():
        module = importlib.import_module(path)
        takes = module.supports(
            platform=jax.default_backend(),
            dtype=jnp.dtype(batch.dtype),
            num_groups=batch.num_groups,
            head_dim=batch.head_dim,
            cache_dtype=jnp.dtype(batch.cache_dtype or batch.dtype),
            page_size=batch.page_size // batch.num_parts,
            has_sinks=batch.has_sinks,
            interpret=not on_gpu,
        )
        if name != "reference" and takes and (batch.num_parts == 1 or name in TAKING_PARTS):
            found[name] = call(module, batch, interpret=not on_gpu)
    if not tune:
        return found
    modules = {"triton": triton_prefill if batch.prompts else triton_decode, "mosaic": mosaic_decode}
    tried = [("triton", tiles) for tiles in _tiles(batch)]
    if "mosaic" in found and not batch.prompts:
        tried += [("mosaic", tiles) for tiles in _mosaic_tiles(batch)]
    for name, tiles in tried:
        label = " ".join([name, *(f"{key}={value}" for key, value in asdict(tiles).items())])
        # Calls of a program share what is traced and compiled.
        found[label] = jax.jit(call(modules[name], batch, interpret=not on_gpu, tiles=tiles))
    return found


def _mosaic_tiles(batch: Batch) -> list[DecodeTiles]:
    itemsize = jnp.dtype(batch.cache_dtype or batch.dtype).itemsize
    base = mosaic_decode.pick_tiles(batch.num_groups, batch.head_dim, itemsize, batch.num_queries)
    found = [replace(base, num_stages=stages) for stages in (2, 3, 4)]
    if batch.head_dim == 64 and itemsize == 2:
        found += [replace(base, num_stages=4, ctas_per_core=3), replace(base, num_stages=3, block_k=128)]
    if itemsize == 1:
        found += [replace(THREE_WORKERS, num_stages=stages) for stages in (2, 3)]
    return found


def _tiles(batch: Batch) -> list[Any]:
    dtype = jnp.dtype(batch.dtype)
    found: list[Any] = []
    if batch.prompts:
        base: Any = triton_prefill.pick_tiles(batch.num_tokens, batch.num_groups, batch.head_dim, dtype.itemsize)
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
