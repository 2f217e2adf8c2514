"""Paged attention with heads wider than the kernels of `paged_attention` take, decode and ragged, against the float32 reference."""

import functools
import importlib
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.checking.attention import TOLERANCE, Batch, call, make_arrays, worst_error
from pallas_kernels.checking.case import Case
from pallas_kernels.wide_attention import IMPLEMENTATIONS, decode, prompts, supports, triton

FP8 = "float8_e4m3fn"
_LARGE, _SMALL = {"num_kv_heads": 4, "num_groups": 8}, {"num_kv_heads": 2, "num_groups": 4}
"""Layers without a window of Gemma 4 31B and of E4B."""


def speed_cases(tiny: bool, tune: bool) -> list[Case]:
    """The shapes of Gemma 4's layers without a window."""
    if tiny:
        toy: dict[str, Any] = {"head_dim": 272, "num_kv_heads": 1, "num_groups": 2, "dtype": "float32"}
        return [_case(Batch("wide decode tiny", decodes=(40,), **toy), tune=tune)]
    batches = [
        Batch(f"{name} decode {rows}x{length}", decodes=(length,) * rows, head_dim=512, **heads)  # type: ignore[arg-type]
        for name, heads in (("31B", _LARGE), ("E4B", _SMALL))
        for rows, length in ((1, 8192), (16, 4096), (64, 1152), (256, 1152))
    ]
    batches += [
        Batch(f"{name} prefill {rows}x{length}", prompts=((length, 0),) * rows, head_dim=512, **heads)  # type: ignore[arg-type]
        for name, heads in (("31B", _LARGE), ("E4B", _SMALL))
        for rows, length in ((8, 1024), (1, 8192))
    ]
    batches.append(
        Batch("31B decode 64x1152 fp8 cache", (1152,) * 64, head_dim=512, cache_dtype=FP8, has_scales=True, **_LARGE)
    )  # type: ignore[arg-type]
    return [_case(batch, tune=tune) for batch in batches]


def check_cases(tiny: bool) -> list[Case]:
    """Edges: lengths around a page, long rows, many rows, groups, windows, caps, types, several queries a row."""
    if tiny:
        toy: dict[str, Any] = {"head_dim": 272, "num_kv_heads": 1, "num_groups": 2, "poison": True}
        return [
            _case(Batch("wide edges", decodes=(1, 16, 17, 0), **toy)),
            _case(Batch("wide mixed", decodes=(9,), prompts=((5, 12), (17, 0)), padding=3, **toy)),
            _case(Batch("wide, 3 queries", decodes=(3, 0, 20), num_queries=3, **toy)),
        ]
    edges = (1, 15, 16, 17, 0, 33, 127, 128, 129, 4097)
    prompts_ = ((16, 0), (17, 0), (2, 15), (130, 0), (33, 200), (0, 0), (700, 300))
    fields: list[dict[str, Any]] = [
        {},
        {"num_groups": 1},
        {"num_groups": 3, "head_dim": 384},
        {"num_groups": 16, "num_kv_heads": 1},
        {"num_groups": 32, "num_kv_heads": 1},
        {"window": 50},
        {"soft_cap": 30.0},
        {"cache_dtype": FP8, "has_scales": True},
        {"dtype": "float16", "page_size": 64},
        {"dtype": "float32", "num_groups": 2},
        {"page_size": 8},
        {"page_size": 128},
    ]
    batches = []
    for options in fields:
        said = "".join(f" {name} {value}" for name, value in options.items())
        common = {"head_dim": 512, **_LARGE, **options}
        batches += [
            Batch(f"wide decode{said}", decodes=edges, **common),
            Batch(f"wide mixed{said}", decodes=edges, prompts=prompts_, padding=13, **common),
        ]
    wide: dict[str, Any] = {"head_dim": 512, **_LARGE}
    batches += [
        Batch("wide, 64 rows", decodes=tuple(range(1, 1300, 20))[:64], **wide),
        Batch("wide, 300 rows", decodes=tuple(range(1, 601, 2)), **wide),
        Batch("wide, long rows", decodes=(32768, 5000), **wide),
        *(
            Batch(
                f"wide, {queries} queries{' window' if window else ''}",
                (queries, 0, queries + 1, 66, 1037),
                num_queries=queries,
                window=window,
                **wide,
            )
            for queries in (2, 5, 9)
            for window in (None, 20)
        ),
        Batch("wide prompt behind 30 k", prompts=((200, 30000),), **wide),
    ]
    return [_case(replace(batch, poison=True)) for batch in batches]


def _case(batch: Batch, *, tune: bool = False) -> Case:
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
    """Implementations that take the batch, and with `tune` other tiles."""
    on_gpu = jax.default_backend() == "gpu"
    options = {"interpret": not on_gpu}
    case: dict[str, Any] = {"dtype": batch.dtype, "num_groups": batch.num_groups, "head_dim": batch.head_dim, **options}
    found = {
        name: call(importlib.import_module(path), batch, **options)
        for name, path in IMPLEMENTATIONS.items()
        if name != "reference" and supports(name, cache_dtype=batch.cache_dtype or None, platform=jax.default_backend(), **case)
    }
    for tiles in _tiles(batch) if tune else []:
        label = "triton " + " ".join(f"{key}={value}" for key, value in asdict(tiles).items() if key != "piece")
        found[label] = call(triton, batch, tiles=tiles, **options)
    return found


def _tiles(batch: Batch) -> list[Any]:
    itemsize = jnp.dtype(batch.dtype).itemsize
    if batch.prompts:
        base = prompts.pick_tiles(batch.num_groups, itemsize, jnp.dtype(batch.cache_dtype or batch.dtype).itemsize)
        sizes = ((64, 32, 8, 2), (64, 32, 4, 2), (64, 32, 4, 3), (128, 32, 8, 1), (128, 32, 8, 2), (64, 16, 4, 3))
        return [replace(base, block_m=m, block_k=k, num_warps=warps, num_stages=stages) for m, k, warps, stages in sizes]
    slots = batch.width * batch.page_size
    own = decode.pick_tiles(len(batch.decodes), batch.num_kv_heads, batch.num_groups, itemsize, slots)
    sizes = ((16, 4, 3), (16, 4, 5), (16, 8, 4), (32, 4, 3), (32, 8, 3), (32, 8, 2))
    return [
        replace(own, block_k=k, num_warps=warps, num_stages=stages, num_splits=splits)
        for splits in sorted({own.num_splits, own.num_splits * 2, max(1, own.num_splits // 2)})
        for k, warps, stages in sizes
    ]
