"""The batches of paged attention that an engine checks at its start, in its own shapes, against attention in NumPy.

What is in them went wrong once, or lies at an edge: prompts that begin off a multiple of 8 tokens, single tokens between them,
lengths around a page and the window, chunks behind other keys, more work than a GPU has cores, NaN in whatever is nobody's.
"""

import functools
import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_kernels import wide_attention
from pallas_kernels.checking.attention import SCALES, TOLERANCE, Batch, call, places
from pallas_kernels.checking.case import Case
from pallas_kernels.checking.host import Normals
from pallas_kernels.paged_attention import IMPLEMENTATIONS

MAX_WINDOW = 2048
"""A wider window is checked at this width: the kernels treat all alike, and more keys would take their time on the host."""
SMALL = "ragged batch of 16 tokens"
_MANY_ITEMS = 300
"""Query heads of prompts, more than twice the cores of any GPU: kernels that loop over work have each take several pieces."""
_LONG = 1037
"""Keys of a row whose work is split."""


class Layer(NamedTuple):
    """Static properties of the attention of some layers."""

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False


@dataclass(frozen=True)
class Shapes:
    """A model's attention on one device."""

    dtype: str
    cache_dtype: str
    num_kv_heads: int
    num_groups: int
    head_dim: int
    page_size: int
    table_width: int
    """Pages in a row of the table."""
    layers: tuple[Layer, ...]
    """The kinds of layers that there are."""
    has_scales: bool = False
    """Whether stored keys and values have scales."""
    num_queries: int = 1
    """Queries of each row in decodes of several; 1: there are none."""
    num_parts: int = 1
    """Devices that split the keys of a row, each with pages of `page_size`."""


def cases(shapes: Shapes, implementation: str, *, interpret: bool, modules: Mapping[str, str] = IMPLEMENTATIONS) -> list[Case]:
    """Each kind of layer in a ragged batch, a small one where other tiles are for it, and in decodes of few and of many rows, of
    one query a row and of several if there are such. modules: those of the op by implementation."""
    module = importlib.import_module(modules[implementation])
    has_small_tiles = implementation == "triton" or jnp.dtype(shapes.cache_dtype).itemsize == 1
    return [
        Case(
            batch.name,
            functools.partial(host_arrays, batch),
            {implementation: call(module, batch, interpret=interpret)},
            functools.partial(host_error, batch),
            max(TOLERANCE[batch.dtype], TOLERANCE.get(batch.cache_dtype, 0.0)),
        )
        for layer in shapes.layers
        for batch in batches(shapes, layer)
        if has_small_tiles or not batch.name.startswith(SMALL)
    ]


def cases_of_wide_heads(shapes: Shapes, implementation: str, *, interpret: bool) -> list[Case]:
    """As `cases`, for `wide_attention`."""
    return cases(shapes, implementation, interpret=interpret, modules=wide_attention.IMPLEMENTATIONS)


def batches(shapes: Shapes, layer: Layer) -> list[Batch]:
    page = shapes.page_size * shapes.num_parts
    window = None if layer.window is None else min(layer.window, MAX_WINDOW)
    around = () if window is None else (max(1, window - 1), window)
    num_short = max(8, -(-_MANY_ITEMS // (shapes.num_kv_heads * shapes.num_groups)))
    short = tuple((2 + (3 * i) % 8, (0, 3, page - 1)[i % 3]) for i in range(num_short))
    prompts: tuple[tuple[int, int], ...] = (
        (4, 0),
        (130, 0),
        (1, page),
        (page - 1, 0),
        (page, 0),
        (page + 1, 0),
        (1, 0),
        (33, 2 * page + 5),
        (2, page - 1),
    )
    if window is not None:
        prompts += ((6, max(0, window - 3)),)
    nobody = (0, 0)
    few = (1, page - 1, page, page + 1, 0, _LONG, 2 * page)
    tiny = ((4, 0), (1, 2 * page), (7, page - 3))
    said = "".join(f", {name} {value}" for name, value in (("window", window), ("soft cap", layer.soft_cap)) if value)
    said += ", sinks" * layer.has_sinks
    common: dict[str, Any] = {
        "num_kv_heads": shapes.num_kv_heads,
        "num_groups": shapes.num_groups,
        "head_dim": shapes.head_dim,
        "page_size": page,
        "dtype": shapes.dtype,
        "cache_dtype": shapes.cache_dtype,
        "scale": layer.scale,
        "window": window,
        "soft_cap": layer.soft_cap,
        "poison": True,
        "has_scales": shapes.has_scales,
        "has_sinks": layer.has_sinks,
        "table_width": shapes.table_width,
        "num_parts": shapes.num_parts,
    }
    decodes = {
        "8 rows": (*few, 3 * page - 1 if window is None else window + 1),
        "24 rows": (*few, *around, *range(5, 5 + 7 * (17 - len(around)), 7)),
    }
    queries = shapes.num_queries
    return [
        Batch(f"ragged batch{said}", decodes=(page + 1, 0, 3 * page), prompts=(*prompts, *short, nobody), padding=5, **common),
        Batch(SMALL + said, prompts=(*tiny, *(nobody,) * 13), padding=4, **common),
        *(Batch(f"decode of {rows}{said}", decodes=lengths, **common) for rows, lengths in decodes.items()),
        *(
            # A row has as many keys as queries, or none.
            Batch(
                f"decode of {rows} of {queries} queries{said}",
                decodes=tuple(length and max(length, queries) for length in lengths),
                num_queries=queries,
                **common,
            )
            for rows, lengths in decodes.items()
            if queries > 1
        ),
    ]


def host_arrays(batch: Batch) -> tuple[np.ndarray, tuple[Any, ...]]:
    """What `make_arrays` gives, on the host."""
    normals = Normals()
    found = places(batch, np.random.default_rng(0))
    caches = []
    for _ in "kv":
        pages = normals(len(found.is_free_PS), batch.num_kv_heads, batch.page_size, batch.head_dim)
        if batch.poison:
            pages.swapaxes(1, 2)[found.is_free_PS] = np.nan
        caches.append(pages.astype(jnp.dtype(batch.cache_dtype or batch.dtype)))
    return normals.of(jnp.dtype(batch.dtype), *batch.q_shape), (
        *caches,
        found.table_RB,
        found.query_start_R1,
        found.kv_length_R,
        *(np.float32(scale) for scale in SCALES if batch.has_scales),
        *([batch.sinks_KG] if batch.has_sinks else []),
    )


def host_error(
    batch: Batch,
    q: np.ndarray,
    constants: tuple[np.ndarray, ...],
    got: Any,
    finish: Callable[[np.ndarray], np.ndarray] = lambda out_TKGH: out_TKGH,
) -> float:
    """The worst relative error of a token's query head; NaN if anything, padding too, is not finite. finish: see `worst_error`."""
    result = np.asarray(got).astype(np.float32)
    if not np.isfinite(result).all():
        return math.nan
    expected = finish(attend(batch, q, constants))
    off = np.linalg.norm(result[: len(expected)] - expected, axis=-1)
    size = np.linalg.norm(expected, axis=-1)
    return float(np.where(off == 0, 0.0, off / np.maximum(size, 1e-6)).max(initial=0.0))


def attend(batch: Batch, q: np.ndarray, constants: tuple[np.ndarray, ...]) -> np.ndarray:
    """Attention of all tokens but padding, row by row, in float32, or in float64 for inputs of float32."""
    k, v, table_RB, query_start_R1, kv_length_R, *others = constants
    named = batch.named(others)
    wide = np.float64 if batch.dtype == "float32" else np.float32
    k_scale, v_scale = (wide(named.get(name, 1)) for name in ("k_scale", "v_scale"))
    out = np.zeros((int(query_start_R1[-1]), *batch.q_shape[1:]), wide)
    if not batch.prompts:
        out = np.zeros(batch.q_shape, wide)
    K, G, H, S = batch.num_kv_heads, batch.num_groups, batch.head_dim, batch.page_size
    for row, length in enumerate(map(int, kv_length_R)):
        begin, end = map(int, query_start_R1[row : row + 2])
        new = end - begin
        if new == 0 or length == 0:
            continue
        position_n = length - new + np.arange(new)
        lowest = 0 if batch.window is None else max(0, length - new - batch.window + 1)
        first_page = lowest // S
        pages = table_RB[row, first_page : -(-length // S)]

        def read(cache: np.ndarray, scale: Any, pages=pages, begin_slot=lowest - first_page * S, count=length - lowest):
            x_KLH = cache[pages].swapaxes(0, 1).reshape(K, -1, H)[:, begin_slot : begin_slot + count]
            return x_KLH.astype(wide) * scale

        q_KnH = q[begin:end].astype(wide).transpose(1, 0, 2, 3).reshape(K, new * G, H)
        scores = (q_KnH @ read(k, k_scale).swapaxes(1, 2) * wide(batch.options["scale"])).reshape(K, new, G, -1)
        if batch.soft_cap is not None:
            scores = batch.soft_cap * np.tanh(scores / batch.soft_cap)
        key_L = np.arange(lowest, length)
        is_seen_nL = key_L[None] <= position_n[:, None]
        if batch.window is not None:
            is_seen_nL &= key_L[None] > position_n[:, None] - batch.window
        scores = np.where(is_seen_nL[None, :, None], scores, -np.inf)
        highest = scores.max(-1, keepdims=True)
        weights = np.exp(scores - highest)
        sums = weights.sum(-1, keepdims=True)
        if batch.has_sinks:
            sums += np.exp(named["sinks_KG"].astype(wide)[:, None, :, None] - highest)
        weights /= sums
        out[begin:end] = (weights.reshape(K, new * G, -1) @ read(v, v_scale)).reshape(K, new, G, H).transpose(1, 0, 2, 3)
    return out
