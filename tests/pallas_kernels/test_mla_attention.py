"""Every implementation of latent attention against attention in NumPy, in float64 for float32, through ragged batches and decodes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._compat import has_mosaic
from pallas_kernels.checking import mla_attention as checking
from pallas_kernels.checking.attention import Batch
from pallas_kernels.mla_attention import (
    IMPLEMENTATIONS,
    candidates,
    latent_attention,
    latent_decode,
    triton_decode,
    write_latents,
)
from tests.pallas_kernels.test_paged_attention import a_gpu_to_lower_for

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")

WIDTH, VALUE_DIM = 40, 24
GENERAL = [name for name in IMPLEMENTATIONS if name != "mosaic"]
"""Those that take every case here."""
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
    sizes = {"num_kv_heads": 1, "num_groups": num_heads, "head_dim": WIDTH, "dtype": dtype}
    return Batch(rows, **ROWS[rows], **sizes, scale=0.3, poison=True, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("implementation", GENERAL)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"dtype": "bfloat16", "num_heads": 16},
        {"dtype": "bfloat16", "cache_dtype": "float8_e4m3fn", "page_size": 8},
        {"num_heads": 70, "table_width": 20},
    ],
    ids=["float32", "bfloat16", "fp8 cache", "many heads"],
)
def test_equals_attention_in_numpy(rows, implementation, fields):
    batch = batch_of(rows, **fields)
    q, constants = checking.host_arrays(batch)
    got = jax.jit(checking.call(batch, VALUE_DIM, implementation=implementation, interpret=True))(q, *constants)
    assert got.shape == (*q.shape[:2], VALUE_DIM) and got.dtype == q.dtype
    assert checking.host_error(batch, q, constants, got) <= EXACT[batch.dtype]


@pytest.mark.parametrize("num_splits", [1, 2, 5])
def test_a_rows_keys_split_over_programs(num_splits):
    batch = batch_of("decode")
    q, constants = checking.host_arrays(batch)
    pages, table, _, length = constants
    tiles = triton_decode.DecodeTiles(block_m=16, block_k=16, num_splits=num_splits)
    got = triton_decode.latent_decode(q, pages, table, length, value_dim=VALUE_DIM, scale=0.3, interpret=True, tiles=tiles)
    assert checking.host_error(batch, q, constants, got) <= EXACT["float32"]


def test_errors_are_seen_on_the_device_as_on_the_host():
    batch = batch_of("ragged", dtype="bfloat16")
    q, constants = checking.make_arrays(batch)
    got = jax.jit(checking.call(batch, VALUE_DIM, implementation="xla"))(q, *constants)
    assert checking.worst_error(batch, q, constants, got) <= EXACT["bfloat16"]
    wrong = got.at[3, 1].multiply(1.1)
    assert checking.worst_error(batch, q, constants, wrong) > 0.05
    host = jax.tree.map(np.asarray, (q, constants))
    assert checking.host_error(batch, *host, wrong) > 0.05


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint16", "float8_e4m3fn", "uint8"])
def test_writes_each_token_into_its_slot_and_padding_nowhere(dtype):
    pages = jnp.zeros((3, 1, 4, 5), dtype)
    latent_TC = jnp.arange(1, 16, dtype=jnp.float32).reshape(3, 5) * 50
    written = write_latents(pages, latent_TC, jnp.array([9, -1, 3], jnp.int32))
    is_float = jnp.issubdtype(pages.dtype, jnp.floating)
    values = (
        written if is_float else jax.lax.bitcast_convert_type(written, "bfloat16" if dtype == "uint16" else "float8_e4m3fn")
    )
    expected = np.zeros((3, 1, 4, 5), np.float32)
    narrow = values.dtype
    limited = jnp.minimum(latent_TC, 448) if narrow == jnp.float8_e4m3fn else latent_TC
    expected[2, 0, 1], expected[0, 0, 3] = limited[0].astype(narrow), limited[2].astype(narrow)
    np.testing.assert_array_equal(values.astype(np.float32), expected)


@pytest.mark.parametrize("num_heads", [16, 128])
def test_triton_kernels_lower_for_a_gpu_in_the_shapes_of_deepseek(num_heads):
    def shape(*dims: int, dtype: str = "int32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype)

    q, pages = shape(64, num_heads, 576, dtype="bfloat16"), shape(100, 1, 16, 576, dtype="bfloat16")
    options = {"value_dim": 512, "scale": 0.1, "implementation": "triton"}

    def both(q, pages, table, query_start, kv_length):
        ragged = latent_attention(q, pages, table, query_start, kv_length, **options)
        return ragged, latent_decode(q[:5], pages, table, kv_length, **options)

    with a_gpu_to_lower_for():
        traced = jax.jit(both).trace(q, pages, shape(5, 300), shape(6), shape(5))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("xla.gpu.triton") == 5, "tiles, and two times a split decode and its combination"


MOSAIC = pytest.mark.skipif(not has_mosaic(), reason="JAX 0.10 lacks parts of Mosaic GPU that the kernel uses")


@MOSAIC
@pytest.mark.parametrize(
    ("lengths", "num_workers", "fields"),
    [
        ((1, 64, 0, 65, 200), 3, {}),
        ((70, 5), 7, {"num_groups": 5}),
        ((150,), 2, {"page_size": 128, "dtype": "float16"}),
        ((9, 20, 1), 2, {"page_size": 8}),
    ],
    ids=["rows over several workers", "more workers than tiles", "a page of two tiles", "small pages"],
)
def test_mosaics_decode_equals_attention_in_numpy(lengths, num_workers, fields):
    sizes = {"num_kv_heads": 1, "num_groups": 16, "head_dim": 192, "scale": 0.1, "poison": True, **fields}
    batch = Batch("decode", decodes=lengths, **sizes)
    q, constants = checking.host_arrays(batch)
    pages, table, _, length = constants
    got = _mosaic(num_workers)(q, pages, table, length)
    assert checking.host_error(batch, q, constants, got) <= EXACT["bfloat16"]


@MOSAIC
def test_mosaics_producer_and_consumer_do_not_race(monkeypatch):
    """A ring that is gone round several times, queries too."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from pallas_kernels.mla_attention import mosaic_decode

    monkeypatch.setattr(mosaic_decode, "mosaic_interpret", lambda _: plgpu.InterpretGPUParams(detect_races=True))
    monkeypatch.setattr(mosaic_decode, "num_stages", lambda *_: 2)
    batch = Batch("decode", decodes=(330, 0, 20, 70), num_kv_heads=1, num_groups=8, head_dim=192, scale=0.1, poison=True)
    q, constants = checking.host_arrays(batch)
    pages, table, _, length = constants
    got = _mosaic(1)(q, pages, table, length)
    assert checking.host_error(batch, q, constants, got) <= EXACT["bfloat16"]
    assert not gpu_callbacks.get_races().races_found


@MOSAIC
def test_mosaics_kernel_lowers_for_a_gpu_in_the_shapes_of_deepseek():
    shapes = (jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in MOSAIC_SHAPES)
    call = functools.partial(latent_decode, value_dim=512, scale=0.1, implementation="mosaic")
    with a_gpu_to_lower_for():
        text = jax.jit(call).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text and text.count("xla.gpu.triton") == 1


MOSAIC_SHAPES = (((64, 16, 576), "bfloat16"), ((100, 1, 16, 576), "bfloat16"), ((64, 256), "int32"), ((64,), "int32"))


def _mosaic(num_workers):
    from pallas_kernels.mla_attention import mosaic_decode

    options = {"value_dim": 128, "scale": 0.1, "interpret": True, "num_workers": num_workers}
    return jax.jit(functools.partial(mosaic_decode.latent_decode, **options))


def test_unverified_kernels_are_no_candidates():
    case = {"dtype": "bfloat16", "cache_dtype": "bfloat16", "num_heads": 16, "width": 576, "value_dim": 512, "page_size": 16}
    assert candidates(platform="cpu", **case) == ("xla",)
    assert candidates(platform="gpu", **case) == ("xla",), "this machine's device is not a verified one"


def test_what_does_not_fit_is_refused():
    q, pages = jnp.zeros((2, 3, WIDTH)), jnp.zeros((4, 1, 8, WIDTH))
    table, length = jnp.zeros((2, 2), jnp.int32), jnp.zeros(2, jnp.int32)
    with pytest.raises(
        ValueError, match="no implementation 'cudnn' of latent attention; there are reference, xla, triton, mosaic"
    ):
        latent_decode(q, pages, table, length, value_dim=24, scale=1.0, implementation="cudnn")
    with pytest.raises(ValueError, match=r"values of width 24 do not fit together; expected \[T, N, C\]"):
        latent_decode(q[..., :20], pages, table, length, value_dim=24, scale=1.0)
    with pytest.raises(ValueError, match="does not take 3 heads over vectors of 40 values, of which 8 are the .*use 'xla'"):
        latent_decode(q, pages, table, length, value_dim=8, scale=1.0, implementation="triton")
