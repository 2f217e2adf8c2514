"""Attention within segments by the kernels and by plain JAX."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.checking.case import Case
from pallas_kernels.checking.segment_attention import LENGTHS, TOLERANCE, Shapes, host_arrays, host_error
from pallas_kernels.segment_attention import IMPLEMENTATIONS, cudnn, mosaic, segment_attention, triton
from pallas_kernels.segment_attention.mosaic import MosaicTiles
from pallas_kernels.segment_attention.triton import SegmentTiles

QWEN3_VL = Shapes("bfloat16", 16, 72)
"""The encoder of Qwen3-VL-8B."""
QWEN25_VL = Shapes("bfloat16", 16, 80)
WHISPER = Shapes("bfloat16", 20, 64)
"""The encoder of Whisper large-v3, of 1500 positions a clip."""
TINY = Shapes("float32", 2, 24)
MAX_REFERENCE = 2048
"""Patches up to which the reference is checked too: it keeps all scores of a head."""
TRITON_TILES = (
    SegmentTiles(128, 64, 4, 3),
    SegmentTiles(128, 64, 8, 2),
    SegmentTiles(128, 64, 8, 4),
    SegmentTiles(128, 128, 8, 2),
    SegmentTiles(128, 128, 8, 3),
    SegmentTiles(64, 64, 4, 3),
    SegmentTiles(64, 128, 4, 3),
)
MOSAIC_TILES = (
    MosaicTiles(64, 128, 3),
    MosaicTiles(64, 128, 2),
    MosaicTiles(64, 64, 4),
)
CUDNN_SEGMENTS = (2, 16, 256)


def speed_cases(tiny: bool, tune: bool) -> list[Case]:
    """An image of 1920 x 1080, the largest, 64 of 512 x 512, several of all sizes, images in windows, and a clip of audio."""
    if tiny:
        return [_case(TINY, "toy", (20, 30), is_timed=True, tune=tune)]
    return [
        _case(QWEN3_VL, "one image", (8160,), is_timed=True, tune=tune),
        _case(QWEN3_VL, "one image", (16384,), is_timed=True, tune=tune),
        _case(QWEN3_VL, "64 images", (1024,) * 64, is_timed=True, tune=tune),
        _case(QWEN3_VL, "8 images", (3500, 260, 1764, 64, 1024, 400, 880, 100), num_padding=200, is_timed=True, tune=tune),
        _case(QWEN25_VL, "windows", (64,) * 128, is_timed=True, tune=tune),
        _case(WHISPER, "one clip", (1500,), is_timed=True, tune=tune),
    ]


def check_cases(tiny: bool) -> list[Case]:
    """All types and widths of heads, segments from a patch to 16384, with padding and without."""
    if tiny:
        return [_case(TINY, name, LENGTHS[name], num_padding=5) for name in ("ragged", "single patches")]
    shapes = [Shapes(dtype, 3, head_dim) for dtype in TOLERANCE for head_dim in (16, 32, 64, 72, 80, 128)]
    shapes += [Shapes("bfloat16", 2, head_dim) for head_dim in (24, 88, 96, 112, 256)]
    found = [_case(each, "ragged", LENGTHS["ragged"], num_padding=45) for each in shapes]
    for each in (QWEN3_VL, Shapes("float32", 2, 72)):
        found += [
            _case(each, "one segment", LENGTHS["one segment"], num_padding=45),
            _case(each, "windows with edges", (64, 64, 32) * 11, num_padding=288),
            _case(each, "single patches", LENGTHS["single patches"], num_padding=64),
            _case(each, "one patch", (1,), num_padding=255),
            _case(each, "no patch", (), num_padding=256),
            _case(each, "tiles end in segments", (127, 129, 1, 255, 256, 130, 126), num_padding=1),
        ]
    found += [
        _case(QWEN3_VL, "one image", (8160,), num_padding=32),
        _case(QWEN3_VL, "one image", (16384,)),
        _case(QWEN3_VL, "images", (3500, 260, 1764, 64, 1024, 400, 880, 100), num_padding=200),
        _case(QWEN25_VL, "windows", (64,) * 256),
        _case(WHISPER, "one clip", (1500,)),
        _case(Shapes("bfloat16", 16, 128), "images", (3500, 260, 1764, 64), num_padding=77),
    ]
    return found


def _case(
    shapes: Shapes, what: str, lengths: tuple[int, ...], *, num_padding: int = 0, is_timed: bool = False, tune: bool = False
) -> Case:
    on_gpu, num_patches = jax.default_backend() == "gpu", sum(lengths) + num_padding
    options = {"scale": shapes.scale, "interpret": not on_gpu}
    variants = {
        name: functools.partial(segment_attention, implementation=name, **options)
        for name, path in IMPLEMENTATIONS.items()
        if _takes(path, shapes) and (name != "reference" or (num_patches <= MAX_REFERENCE and not is_timed))
    }
    if tune:
        variants |= {label: functools.partial(call, **options) for label, call in _tuned(tuple(variants))}

    def make() -> tuple[Any, tuple[Any, ...]]:
        return jax.device_put(host_arrays(shapes, lengths, num_padding))

    values = 4 * num_patches * shapes.num_heads * shapes.head_dim
    return Case(
        f"segments, {what} {num_patches} h{shapes.num_heads} d{shapes.head_dim} {shapes.dtype}",
        make,
        variants,
        functools.partial(host_error, scale=shapes.scale),
        TOLERANCE[shapes.dtype],
        bytes=float(jnp.dtype(shapes.dtype).itemsize * values),
        flops=4.0 * sum(length**2 for length in lengths) * shapes.num_heads * shapes.head_dim,
    )


def _tuned(names: tuple[str, ...]) -> list[tuple[str, Callable[..., Any]]]:
    """These implementations with other sizes, by the name that is shown."""
    found: list[tuple[str, Callable[..., Any]]] = []
    if "triton" in names:
        for t in TRITON_TILES:
            label = f"triton q{t.block_m} k{t.block_k} w{t.num_warps} s{t.num_stages}"
            found.append((label, functools.partial(triton.segment_attention, tiles=t)))
    if "mosaic" in names:
        for m in MOSAIC_TILES:
            label = f"mosaic q{m.block_q} k{m.block_kv} s{m.num_stages}"
            found.append((label, functools.partial(mosaic.segment_attention, tiles=m)))
    if "cudnn" in names:
        for number in CUDNN_SEGMENTS:
            found.append((f"cudnn {number} segments", functools.partial(cudnn.segment_attention, max_segments=number)))
    return found


def _takes(path: str, shapes: Shapes) -> bool:
    on_gpu = jax.default_backend() == "gpu"
    module = importlib.import_module(path)
    return module.supports(platform=jax.default_backend(), dtype=shapes.dtype, head_dim=shapes.head_dim, interpret=not on_gpu)
