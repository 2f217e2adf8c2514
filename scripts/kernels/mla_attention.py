"""Latent attention, decode and ragged, by every implementation that takes the case, against the float32 reference."""

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.checking.case import Case
from pallas_kernels.checking.mla_attention import TOLERANCE, Batch, Shapes, Sizes, call, make_arrays, worst_error, write_case
from pallas_kernels.mla_attention import IMPLEMENTATIONS, PLAIN, supports, triton, triton_decode, triton_local

FP8 = "float8_e4m3fn"


@dataclass(frozen=True)
class Model:
    """Its latent attention on one device."""

    num_heads: int
    sizes: Sizes = Sizes(latent_dim=512, rotated_dim=64, plain_dim=128, value_dim=128)

    def batch(self, name: str, **fields: Any) -> Batch:
        """Rows of this model; the scale is that of its heads' 192 values."""
        fields = {"scale": 192**-0.5, **fields}
        sizes = {"num_groups": self.num_heads, "head_dim": self.sizes.width}
        return Batch(f"{name} n{self.num_heads}", num_kv_heads=1, **sizes, **fields)


LITE, V3 = Model(16), Model(128)
TOY = Model(4, Sizes(latent_dim=32, rotated_dim=16, plain_dim=24, value_dim=20))


def speed_cases(tiny: bool, tune: bool) -> list[Case]:
    """The shapes of DeepSeek-V2-Lite, which are those of V3 on eight devices, and of V3 on one."""
    if tiny:
        batches = [
            (TOY, TOY.batch("decode tiny", decodes=(70, 33), dtype="float32")),
            (TOY, TOY.batch("mixed tiny", decodes=(9,), prompts=((21, 5),), padding=3, dtype="float32")),
        ]
    else:
        batches = [
            *(
                (LITE, LITE.batch(f"decode {r}x{n}", decodes=(n,) * r))
                for r, n in ((64, 4096), (1, 4096), (8, 4096), (256, 1152))
            ),
            *(
                (LITE, LITE.batch(f"decode of 5 queries {r}x{n}", decodes=(n,) * r, num_queries=5))
                for r, n in ((64, 4096), (1, 4096), (8, 4096))
            ),
            (V3, V3.batch("decode 64x4096", decodes=(4096,) * 64)),
            (LITE, LITE.batch("prefill 8x1024", prompts=((1024, 0),) * 8)),
            (LITE, LITE.batch("prefill 1x8192", prompts=((8192, 0),))),
            (V3, V3.batch("prefill 2x1024", prompts=((1024, 0),) * 2)),
            (LITE, LITE.batch("chunk 1x2048 at 6144", prompts=((2048, 6144),))),
            (LITE, LITE.batch("mixed 128 decodes of 600 + 2x256", decodes=(600,) * 128, prompts=((256, 0),) * 2)),
        ]
    return [_case(model, batch, tune=tune) for model, batch in batches]


def check_cases(tiny: bool) -> list[Case]:
    """Edges: lengths around a page, long contexts, many rows, numbers of heads, types, page sizes."""
    edges = (1, 15, 16, 17, 0, 33)
    mixed = ((16, 0), (17, 0), (2, 15), (130, 0), (33, 200), (64, 64))
    ragged: dict[str, Any] = {"decodes": (300, 1, 77), "prompts": ((130, 40), (7, 0))}
    rows_of: dict[str, dict[str, Any]] = {" decode": {"decodes": (300, 17, 1)}, "": ragged}
    if tiny:
        found = [
            (TOY, TOY.batch("edges", decodes=edges)),
            (TOY, TOY.batch("few queries", decodes=(3, 0, 40), num_queries=3)),
            (TOY, TOY.batch("mixed", decodes=edges, prompts=((5, 0), (17, 16)), padding=3)),
        ]
    else:
        found = [
            (
                LITE,
                LITE.batch("prompts that begin anywhere", prompts=((4, 0), (130, 0), (3, 0), (61, 5), (700, 300)), padding=5),
            ),
            (LITE, LITE.batch("edges", decodes=(*edges, 127, 128, 129, 4095, 4096, 4097))),
            (LITE, LITE.batch("mixed edges", decodes=edges, prompts=mixed, padding=13)),
            (LITE, LITE.batch("contexts 32 k and 128 k", decodes=(32768, 131072, 1, 5000))),
            (LITE, LITE.batch("chunk at 32 k", prompts=((200, 32568),))),
            (LITE, LITE.batch("512 rows", decodes=tuple(1 + (i * 37) % 700 for i in range(512)))),
            (LITE, LITE.batch("one row", decodes=(777,))),
            (LITE, LITE.batch("padding only", decodes=(0, 0, 0))),
            *(
                (Model(heads), Model(heads).batch(f"{n} queries", decodes=(n, 0, n + 1, 63 + n, 64, 1037), num_queries=n))
                for n, heads in ((2, 16), (5, 16), (5, 128), (17, 12))
            ),
            (LITE, LITE.batch("5 queries of 64 rows", decodes=tuple(5 + (i * 37) % 700 for i in range(64)), num_queries=5)),
            (LITE, LITE.batch("5 queries fp8 cache", decodes=(5, 300, 17), num_queries=5, cache_dtype=FP8)),
            *(
                (Model(heads), Model(heads).batch(kind.strip() or "ragged", **rows))
                for heads in (1, 8, 12, 32, 64, 128)
                for kind, rows in rows_of.items()
            ),
            *(
                (LITE, LITE.batch(f"{dtype} page {page}{kind}", **rows, dtype=dtype, page_size=page))
                for dtype, page in (("float32", 16), ("float16", 64), ("bfloat16", 8), ("bfloat16", 128))
                for kind, rows in rows_of.items()
            ),
            *((LITE, LITE.batch(f"fp8 cache{kind}", **rows, cache_dtype=FP8)) for kind, rows in rows_of.items()),
        ]
    writes = [] if tiny else [_write_case(dtype, cache, n) for dtype, cache, n in _WRITES]
    return [*(_case(model, replace(batch, poison=True)) for model, batch in found), *writes]


_WRITES = (("bfloat16", "", 24), ("bfloat16", "", 2000), ("bfloat16", FP8, 24), ("float32", "", 24), ("float16", "bfloat16", 9))
"""Tokens on their way into the cache: types of these and of the cache, and how many they are."""


def _write_case(dtype: str, cache_dtype: str, num_tokens: int) -> Case:
    heads, sizes = LITE.num_heads, asdict(LITE.sizes)
    shapes = Shapes(dtype, cache_dtype or dtype, heads, **sizes, page_size=16, table_width=1, scale=1.0)
    case = write_case(shapes, num_tokens, "triton", interpret=jax.default_backend() != "gpu")
    return replace(case, name=f"{case.name} {dtype} {cache_dtype}".strip())


def _case(model: Model, batch: Batch, *, tune: bool = False) -> Case:
    sizes = model.sizes
    pairs = batch.flops() / (4 * sizes.width)  # of all heads
    decode_flops = 2 * (sizes.width + sizes.latent_dim)
    expand = 2 * batch.num_tokens * model.num_heads * (sizes.plain_dim + sizes.value_dim) * sizes.latent_dim
    prefill_flops = 2 * (sizes.plain_dim + sizes.rotated_dim + sizes.value_dim)
    return Case(
        batch.name,
        functools.partial(make_arrays, batch, sizes),
        _variants(model, batch, tune),
        functools.partial(worst_error, batch, sizes),
        TOLERANCE[batch.dtype],
        batch.bytes() / 2,
        pairs * prefill_flops + expand if batch.prompts else pairs * decode_flops,
        _feed,
    )


def _feed(carry: Any, result: Any) -> Any:
    """Results are as wide as the first part of the queries, or not much narrower."""
    q, *others = carry
    return (result if result.shape == q.shape else q.at[..., : result.shape[-1]].set(result), *others)


def _variants(model: Model, batch: Batch, tune: bool) -> dict[str, Callable[..., jax.Array]]:
    """Every kernel that takes the case, as the engine calls it, and with `tune` other tile sizes of the Triton kernels."""
    interpret = jax.default_backend() != "gpu"
    case: dict[str, Any] = {"dtype": jnp.dtype(batch.dtype), "cache_dtype": jnp.dtype(batch.cache_dtype or batch.dtype)}
    case |= {"num_heads": model.num_heads, "page_size": batch.page_size, "interpret": interpret, **asdict(model.sizes)}
    found = {
        name: call(batch, implementation=name, interpret=interpret)
        for name in IMPLEMENTATIONS
        if name not in PLAIN and supports(name, **case)
    }
    for tiles in _tiles(model, batch) if tune else []:
        label = "triton " + " ".join(f"{key}={value}" for key, value in asdict(tiles).items())
        found[label] = functools.partial(_by_tiles, batch, tiles)
    return found


def _by_tiles(batch: Batch, tiles: Any, queries: Any, *constants: Any) -> jax.Array:
    options: dict[str, Any] = {"scale": batch.options["scale"], "interpret": jax.default_backend() != "gpu"}
    if batch.prompts:
        pages, table, start, length, latent, rotated, key, value = constants
        tokens = triton.Tokens(*queries, latent, rotated)
        rows = (table, start, length, key, value)
        return triton.ragged(triton_decode.latent_decode, tokens, pages, *rows, **options, local_tiles=tiles)
    pages, table, _, length = constants
    return triton_decode.latent_decode(*queries, pages, table, length, **options, tiles=tiles)


def _tiles(model: Model, batch: Batch) -> list[Any]:
    """Other sizes of the decode kernel, or of that of prompts over their own tokens."""
    if batch.prompts:
        return [
            triton_local.LocalTiles(block_m, block_k, num_warps, num_stages)
            for block_m, block_k, num_warps, num_stages in (
                *((64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (64, 32, 4, 3), (64, 16, 4, 3), (64, 32, 8, 2)),
                *((128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (128, 32, 8, 2)),
            )
        ]
    slots = batch.width * batch.page_size
    itemsize = jnp.dtype(batch.dtype).itemsize
    base = triton_decode.pick_tiles(len(batch.decodes), model.num_heads, model.sizes.latent_dim, itemsize, slots)
    splits = sorted({max(1, base.num_splits // 2), base.num_splits, base.num_splits * 2})
    return [
        replace(base, block_k=block_k, num_warps=num_warps, num_stages=num_stages, num_splits=num_splits)
        for block_k, num_warps, num_stages in (
            *((16, 4, 5), (16, 4, 7), (32, 4, 3), (32, 4, 4), (32, 4, 5), (32, 4, 6), (32, 8, 4), (32, 8, 5)),
            *((64, 4, 3), (64, 8, 3), (64, 8, 4), (64, 8, 5)),
        )
        for num_splits in splits
    ]
