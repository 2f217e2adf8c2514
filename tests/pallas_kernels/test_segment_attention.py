"""Segment attention against its definition in float64, with segments of all kinds and padding of NaN."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _compat
from pallas_kernels.checking.segment_attention import (
    TOLERANCE,
    Shapes,
    compared_patches,
    host_arrays,
    host_error,
    plain,
    segment_ids,
)
from pallas_kernels.segment_attention import (
    IMPLEMENTATIONS,
    PLAIN,
    PREFERENCE,
    candidates,
    choose,
    cudnn,
    mosaic,
    segment_attention,
    triton,
    xla,
)
from pallas_kernels.segment_attention.parts import head_parts
from pallas_kernels.segment_attention.segments import bounds, tile_keys

INTERPRETED = ("reference", "xla", "triton")
"""Implementations that run fast on a CPU; Mosaic's interpreter takes seconds for a program."""
SMALL = mosaic.MosaicTiles(block_kv=64)
run = jax.jit(segment_attention, static_argnames=("scale", "implementation", "interpret"))


def error_of(implementation: str, shapes: Shapes, lengths: tuple[int, ...], num_padding: int) -> float:
    q, constants = host_arrays(shapes, lengths, num_padding)
    got = run(q, *constants, scale=shapes.scale, implementation=implementation, interpret=True)
    assert got.dtype == shapes.dtype and got.shape == q.shape
    return host_error(q, constants, got, scale=shapes.scale)


@pytest.mark.parametrize("implementation", INTERPRETED)
@pytest.mark.parametrize(
    ("lengths", "num_padding"),  # few sums, each of which is a program
    [
        ((5, 1, 40, 1, 100, 64, 90), 19),  # tiles of several segments, segments of several tiles
        ((64,) * 4, 64),
        ((300,), 0),
        ((1,) * 9, 1),
        ((1,), 9),
        ((), 10),
    ],
)
def test_results_are_those_of_each_segment_alone(implementation, lengths, num_padding):
    assert error_of(implementation, Shapes("float32", 2, 16), lengths, num_padding) <= TOLERANCE["float32"]


@pytest.mark.parametrize(
    ("implementation", "head_dim", "dtype"),
    [
        ("triton", 32, "float32"),
        ("triton", 72, "bfloat16"),
        ("triton", 80, "float16"),
        ("xla", 72, "bfloat16"),
        ("reference", 80, "float16"),
    ],
)
@pytest.mark.slow
def test_types_and_widths_of_heads(implementation, dtype, head_dim):
    assert error_of(implementation, Shapes(dtype, 2, head_dim), (70, 3, 60), 11) <= TOLERANCE[dtype]


def test_plain_jax_in_several_chunks_of_queries_and_keys(monkeypatch):
    monkeypatch.setattr(xla, "QUERIES", 32)
    monkeypatch.setattr(xla, "KEYS", 48)
    shapes = Shapes("float32", 2, 16)
    q, constants = host_arrays(shapes, (5, 100, 31, 1, 70), 13)
    got = jax.jit(xla.segment_attention, static_argnames="scale")(q, *constants, scale=shapes.scale)
    assert host_error(q, constants, got, scale=shapes.scale) <= TOLERANCE["float32"]


@pytest.mark.parametrize("tiles", [triton.SegmentTiles(16, 32, 4, 2), triton.SegmentTiles(64, 16, 4, 2)])
@pytest.mark.slow
def test_other_tiles_of_triton(tiles):
    shapes = Shapes("bfloat16", 2, 72)
    q, constants = host_arrays(shapes, (17, 80, 1, 33), 9)
    attend = functools.partial(triton.segment_attention, scale=shapes.scale, interpret=True, tiles=tiles)
    got = jax.jit(attend)(q, *constants)
    assert host_error(q, constants, got, scale=shapes.scale) <= TOLERANCE["bfloat16"]


@pytest.mark.slow
@pytest.mark.skipif(not _compat.has_mosaic(), reason="JAX 0.10 lacks parts of Mosaic GPU that the kernel uses")
@pytest.mark.parametrize(
    ("shapes", "lengths", "num_padding", "tiles"),
    [
        # The only run of this kernel in CI, whose older JAX has not what it needs.
        pytest.param(
            Shapes("bfloat16", 2, 72), (5, 1, 100), 22, SMALL, id="a tile of several segments", marks=pytest.mark.newer
        ),
        pytest.param(Shapes("float16", 2, 64), (300,), 33, SMALL, id="a segment of several tiles"),
        pytest.param(Shapes("bfloat16", 2, 80), (40, 260, 17, 1), 9, SMALL, id="segments that begin within a chunk"),
        pytest.param(Shapes("bfloat16", 1, 128), (1,), 3, None, id="one patch"),
        pytest.param(Shapes("bfloat16", 2, 16), (64,) * 4, 0, None, id="windows"),
        pytest.param(Shapes("bfloat16", 1, 32), (), 3, None, id="no patch"),
    ],
)
def test_mosaic(shapes, lengths, num_padding, tiles):
    q, constants = host_arrays(shapes, lengths, num_padding)
    attend = functools.partial(mosaic.segment_attention, scale=shapes.scale, interpret=True, tiles=tiles)
    assert host_error(q, constants, jax.jit(attend)(q, *constants), scale=shapes.scale) <= TOLERANCE[shapes.dtype]


def test_heads_are_cut_into_powers_of_two():
    assert head_parts(64) == ((0, 64),) and head_parts(16) == head_parts(9) == ((0, 16),)
    assert head_parts(72) == head_parts(80) == ((0, 64), (64, 16))
    assert head_parts(88) == ((0, 64), (64, 32)) and head_parts(120) == ((0, 128),)


def test_bounds_of_segments_and_the_keys_of_tiles():
    segment_P = jnp.asarray([0, 0, 0, 1, 2, 2, -1, -1], jnp.int32)
    start_P, end_P = jax.jit(bounds)(segment_P)
    assert start_P.tolist() == [0, 0, 0, 3, 4, 4, 0, 0] and end_P.tolist() == [3, 3, 3, 4, 6, 6, 0, 0]
    tile_keys_of = jax.jit(tile_keys, static_argnums=2)
    assert tile_keys_of(start_P, end_P, 3).tolist() == [[0, 3, 1], [3, 6, 0], [0, 0, 1]]
    assert tile_keys_of(start_P, end_P, 5).tolist() == [[0, 6, 0], [4, 6, 0]]


@pytest.mark.slow
def test_segments_as_cudnn_takes_them():
    segment_P = jnp.asarray([0, 0, 0, 1, 2, 2, -1, -1], jnp.int32)
    lengths_and_starts = jax.jit(cudnn.lengths_and_starts, static_argnums=1)
    length_M, start_M1, number = lengths_and_starts(segment_P, 4)
    assert (length_M.tolist(), start_M1.tolist(), int(number)) == ([3, 1, 2, -1], [0, 3, 4, -1, -1], 3)
    length_M, start_M1, number = lengths_and_starts(segment_P[:6], 3)
    assert (length_M.tolist(), start_M1.tolist(), int(number)) == ([3, 1, 2], [0, 3, 4, -1], 3)
    length_M, start_M1, number = lengths_and_starts(segment_P, 2)
    assert (length_M.tolist(), start_M1.tolist(), int(number)) == ([3, 1], [0, 3, -1], 3)
    assert int(lengths_and_starts(segment_P[6:], 2)[2]) == 0


def test_cudnn_is_not_there_without_a_gpu_or_with_another_entry(monkeypatch):
    monkeypatch.setattr(cudnn, "_is_there", cudnn._is_there.__wrapped__)
    case = {"platform": "gpu", "dtype": "bfloat16", "head_dim": 72}
    assert not cudnn.supports(**case)

    class Entry:
        @staticmethod
        def dot_product_attention(query, key, value, q_seqlen, kv_seqlen, q_offsets, kv_offsets, *, scale): ...

        check_cudnn_version = staticmethod(lambda: 91000)
        check_compute_capability = staticmethod(lambda capability: True)

    monkeypatch.setattr(cudnn, "_entry", lambda: Entry)
    assert cudnn.supports(**case)
    assert not cudnn.supports(**case | {"dtype": "float32"}) and not cudnn.supports(**case | {"head_dim": 76})
    assert not cudnn.supports(**case, interpret=True) and not cudnn.supports(**case | {"platform": "cpu"})
    monkeypatch.setattr(Entry, "dot_product_attention", staticmethod(lambda query, key, value: None))
    assert not cudnn.supports(**case)


def test_a_kernel_is_chosen_only_where_it_was_verified():
    case = {"dtype": "bfloat16", "head_dim": 72}
    assert candidates(platform="cpu", **case) == ("xla",) == (choose(platform="cpu", **case),)
    mosaic_too = ("mosaic",) if _compat.has_mosaic() else ()
    assert candidates(platform="gpu", **case) == (*mosaic_too, "triton", "xla")
    assert candidates(platform="gpu", dtype="float32", head_dim=72) == ("triton", "xla")
    assert set(PREFERENCE) <= set(IMPLEMENTATIONS) and PREFERENCE[-1] in PLAIN


def test_what_does_not_fit_is_refused():
    q = jnp.zeros((8, 2, 16), jnp.float32)
    segment_P = jnp.zeros(8, jnp.int32)
    with pytest.raises(ValueError, match=r"k is float32\[7, 2, 16\], expected float32\[8, 2, 16\]"):
        segment_attention(q, q[:7], q, segment_P, scale=1.0)
    with pytest.raises(ValueError, match="v is bfloat16"):
        segment_attention(q, q, q.astype(jnp.bfloat16), segment_P, scale=1.0)
    with pytest.raises(ValueError, match=r"segment_P is \[9\]"):
        segment_attention(q, q, q, jnp.zeros(9, jnp.int32), scale=1.0)
    with pytest.raises(ValueError, match="no implementation 'cuda'"):
        segment_attention(q, q, q, segment_P, scale=1.0, implementation="cuda")
    with pytest.raises(ValueError, match="'triton' of segment attention does not take heads of width 8"):
        segment_attention(*(q[:, :, :8],) * 3, segment_P, scale=1.0, implementation="triton", interpret=True)


def test_of_many_patches_the_ends_of_segments_and_others_are_compared():
    segment_P = segment_ids((700, 1, 900), 50)
    compared = compared_patches(segment_P)
    assert {0, 699, 700, 701, 1600} <= set(compared) and max(compared) == 1600 and len(compared) < 600
    shapes = Shapes("float32", 1, 16)
    q, constants = host_arrays(shapes, (700, 1, 900), 50)
    right = np.zeros_like(q)
    right[:1601] = plain(q, *constants, scale=shapes.scale, patches=np.arange(1601))
    assert host_error(q, constants, right, scale=shapes.scale) <= 1e-6
    for patch, value in ((0, 9.0), (700, 9.0), (1600, np.nan), (701, 9.0), (1610, 1e-9), (1, np.nan)):
        wrong = right.copy()
        wrong[patch, 0, 0] = value
        assert not host_error(q, constants, wrong, scale=shapes.scale) <= TOLERANCE["bfloat16"], patch
