"""Every implementation of latent attention against attention in NumPy, in float64 for float32, through ragged batches and decodes."""

import functools
from dataclasses import asdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._compat import has_mosaic
from pallas_kernels.checking import mla_attention as checking
from pallas_kernels.checking.attention import Batch
from pallas_kernels.mla_attention import (
    IMPLEMENTATIONS,
    Tokens,
    absorb,
    candidates,
    latent_attention,
    latent_decode,
    triton_decode,
)
from tests.helpers.lowering import a_gpu_to_lower_for
from tests.helpers.slow import slow_except

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")

SIZES = checking.Sizes(latent_dim=24, rotated_dim=16, plain_dim=20, value_dim=12)
GENERAL = [name for name in IMPLEMENTATIONS if name != "mosaic"]
"""Implementations that take every case here."""
ROWS = {
    "ragged": {
        "decodes": (17, 0, 40, 1),
        "prompts": ((4, 0), (33, 0), (1, 16), (15, 0), (17, 37), (2, 15), (0, 0)),
        "padding": 5,
    },
    "decode": {"decodes": (1, 15, 16, 17, 0, 130)},
}
EXACT = {"float32": 5e-6, "bfloat16": 1.5e-2}


def batch_of(rows: str, num_heads: int = 3, dtype: str = "float32", **fields: object) -> Batch:
    sizes = {"num_kv_heads": 1, "num_groups": num_heads, "head_dim": SIZES.width, "dtype": dtype}
    return Batch(rows, **ROWS[rows], **sizes, scale=0.3, poison=True, **fields)  # type: ignore[arg-type]


FIELDS = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16", "num_heads": 16},
    "fp8 cache": {"dtype": "bfloat16", "cache_dtype": "float8_e4m3fn", "page_size": 8},
    "many heads": {"num_heads": 70, "table_width": 20},
}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("fields", "implementation"),
    slow_except(
        [("float32", name) for name in GENERAL],
        [("float32", name) for name in GENERAL] + [(fields, "triton") for fields in FIELDS][1:] + [("fp8 cache", "xla")],
    ),
)
def test_equals_attention_in_numpy(rows, implementation, fields):
    batch = batch_of(rows, **FIELDS[fields])
    queries, constants = checking.host_arrays(batch, SIZES)
    got = jax.jit(checking.call(batch, implementation=implementation, interpret=True))(queries, *constants)
    assert got.shape == (*queries[0].shape[:2], 12 if rows == "ragged" else 24) and got.dtype == queries[0].dtype
    assert checking.host_error(batch, SIZES, queries, constants, got) <= EXACT[batch.dtype]


@pytest.mark.parametrize("num_splits", slow_except([2], [1, 2, 5]))
def test_a_rows_keys_split_over_programs(num_splits):
    batch = batch_of("decode")
    queries, constants = checking.host_arrays(batch, SIZES)
    pages, table, _, length = constants
    tiles = triton_decode.DecodeTiles(block_m=16, block_k=16, num_splits=num_splits)
    got = triton_decode.latent_decode(*queries, pages, table, length, scale=0.3, interpret=True, tiles=tiles)
    assert checking.host_error(batch, SIZES, queries, constants, got) <= EXACT["float32"]


@pytest.mark.slow
def test_errors_are_seen_on_the_device_as_on_the_host():
    batch = batch_of("ragged", dtype="bfloat16")
    queries, constants = checking.make_arrays(batch, SIZES)
    got = jax.jit(checking.call(batch, implementation="xla"))(queries, *constants)
    assert checking.worst_error(batch, SIZES, queries, constants, got) <= EXACT["bfloat16"] * checking.ROUNDED_KEYS
    wrong = got.at[3, 1].multiply(1.1)
    assert checking.worst_error(batch, SIZES, queries, constants, wrong) > 0.05
    host = jax.tree.map(np.asarray, (queries, constants))
    assert checking.host_error(batch, SIZES, *host, wrong) > 0.05


@pytest.mark.parametrize("implementation", ["xla", "triton"])
@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    slow_except(
        [("bfloat16", "float8_e4m3fn")], [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float8_e4m3fn")]
    ),
)
def test_norms_rotates_and_writes_each_token_into_its_slot_and_padding_nowhere(implementation, dtype, cache_dtype):
    shapes = checking.Shapes(dtype, cache_dtype, 5, **asdict(SIZES), page_size=8, table_width=1, scale=1.0)
    case = checking.write_case(shapes, 13, implementation, interpret=True)
    projected, constants = case.make()
    got = jax.jit(case.variants[implementation])(projected, *constants)
    assert case.error(projected, constants, got) <= case.tolerance
    *_, pages, slots = constants
    unwritten = np.setdiff1d(np.arange(pages.size // SIZES.width), slots)
    before, after = (np.asarray(x).astype(np.float32).reshape(-1, SIZES.width)[unwritten] for x in (pages, got[1]))
    np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize(("stored", "dtype"), [("uint16", "bfloat16"), ("uint8", "float8_e4m3fn")])
@pytest.mark.slow
def test_plain_jax_writes_the_bits_of_narrow_floats(stored, dtype):
    shapes = checking.Shapes("float32", dtype, 2, **asdict(SIZES), page_size=8, table_width=1, scale=1.0)
    case = checking.write_case(shapes, 13, "xla", interpret=False)
    projected, (*others, pages, slots) = case.make()
    (_, expected), (_, got) = (
        jax.jit(case.variants["xla"])(projected, *others, x, slots) for x in (pages, np.asarray(pages).view(stored))
    )
    np.testing.assert_array_equal(np.asarray(got), np.asarray(expected).view(stored))


@pytest.mark.parametrize("num_heads", slow_except([16], [16, 128]))
def test_triton_kernels_lower_for_a_gpu_in_the_shapes_of_deepseek(num_heads):
    ints = functools.partial(jax.ShapeDtypeStruct, dtype="int32")
    floats = functools.partial(jax.ShapeDtypeStruct, dtype="bfloat16")
    tokens = Tokens(floats((64, num_heads, 128)), floats((64, num_heads, 64)), floats((64, 512)), floats((64, 64)))
    weights = (floats((num_heads, 128, 512)),) * 2
    options = {"scale": 0.1, "implementation": "triton"}

    def both(tokens, pages, table, query_start, kv_length, *weights):
        rows = (pages, table, query_start, kv_length)
        queries = absorb(tokens.q_TNP, weights[0])[:5], tokens.q_TNE[:5]
        decoded = latent_decode(*queries, pages, table, kv_length, **options)
        return latent_attention(tokens, *rows, *weights, **options), decoded

    with a_gpu_to_lower_for():
        shapes = (floats((100, 1, 16, 576)), ints((5, 300)), ints((6,)), ints((5,)), *weights)
        text = jax.jit(both).trace(tokens, *shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("xla.gpu.triton") == 6, (
        "a prompt's own tokens, its context, and two times a split decode and its combination"
    )


MOSAIC = pytest.mark.skipif(not has_mosaic(), reason="JAX 0.10 lacks parts of Mosaic GPU that the kernel uses")


@MOSAIC
@pytest.mark.parametrize(
    ("lengths", "num_workers", "fields"),
    [
        ((1, 64, 0, 65, 200, 9), 3, {"page_size": 8}),
        ((150, 5), 7, {"num_groups": 5, "page_size": 128, "dtype": "float16"}),
    ],
    ids=["rows over several workers, small pages", "more workers than tiles, a page of two tiles"],
)
def test_mosaics_decode_equals_attention_in_numpy(lengths, num_workers, fields):
    sizes = {"num_kv_heads": 1, "num_groups": 16, "head_dim": 192, "scale": 0.1, "poison": True, **fields}
    batch = Batch("decode", decodes=lengths, **sizes)
    queries, constants = checking.host_arrays(batch, TILED)
    pages, table, _, length = constants
    got = _mosaic(num_workers)(*queries, pages, table, length)
    assert checking.host_error(batch, TILED, queries, constants, got) <= EXACT["bfloat16"]


@MOSAIC
def test_mosaics_producer_and_consumer_do_not_race(monkeypatch):
    """A ring that is traversed several times, queries too."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from pallas_kernels.mla_attention import mosaic_decode

    monkeypatch.setattr(mosaic_decode, "mosaic_interpret", lambda _: plgpu.InterpretGPUParams(detect_races=True))
    monkeypatch.setattr(mosaic_decode, "num_stages", lambda *_: 2)
    batch = Batch("decode", decodes=(330, 0, 20, 70), num_kv_heads=1, num_groups=8, head_dim=192, scale=0.1, poison=True)
    queries, constants = checking.host_arrays(batch, TILED)
    pages, table, _, length = constants
    got = _mosaic(1)(*queries, pages, table, length)
    assert checking.host_error(batch, TILED, queries, constants, got) <= EXACT["bfloat16"]
    assert not gpu_callbacks.get_races().races_found


@MOSAIC
def test_mosaics_kernel_lowers_for_a_gpu_in_the_shapes_of_deepseek():
    shapes = (jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in MOSAIC_SHAPES)
    call = functools.partial(latent_decode, scale=0.1, implementation="mosaic")
    with a_gpu_to_lower_for():
        text = jax.jit(call).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text and text.count("xla.gpu.triton") == 1


MOSAIC_SHAPES = (
    *(((64, 16, width), "bfloat16") for width in (512, 64)),
    ((100, 1, 16, 576), "bfloat16"),
    ((64, 256), "int32"),
    ((64,), "int32"),
)
TILED = checking.Sizes(latent_dim=128, rotated_dim=64, plain_dim=64, value_dim=64)


def _mosaic(num_workers):
    from pallas_kernels.mla_attention import mosaic_decode

    options = {"scale": 0.1, "interpret": True, "num_workers": num_workers}
    return jax.jit(functools.partial(mosaic_decode.latent_decode, **options))


def test_unverified_kernels_are_no_candidates():
    case = {"dtype": "bfloat16", "cache_dtype": "bfloat16", "num_heads": 16, "page_size": 16}
    case |= {"latent_dim": 512, "rotated_dim": 64, "plain_dim": 128, "value_dim": 128}
    assert candidates(platform="cpu", **case) == ("xla",)
    assert candidates(platform="gpu", **case) == ("xla",), "this machine's device is not a verified one"


def test_what_does_not_fit_is_refused():
    q_RNL, q_RNE, pages = jnp.zeros((2, 3, 24)), jnp.zeros((2, 3, 16)), jnp.zeros((4, 1, 8, 40))
    table, length = jnp.zeros((2, 2), jnp.int32), jnp.zeros(2, jnp.int32)
    with pytest.raises(
        ValueError, match="no implementation 'cudnn' of latent attention; there are reference, xla, triton, mosaic"
    ):
        latent_decode(q_RNL, q_RNE, pages, table, length, scale=1.0, implementation="cudnn")
    with pytest.raises(ValueError, match=r"rotated parts of 10 values do not fit pages .*; expected \[P, 1, S, 34\]"):
        latent_decode(q_RNL, q_RNE[..., :10], pages, table, length, scale=1.0)
    with pytest.raises(ValueError, match="does not take 3 heads of .* over latents of 32, in float32 .*; use 'xla'"):
        latent_decode(jnp.zeros((2, 3, 32)), q_RNE[..., :8], pages, table, length, scale=1.0, implementation="triton")
