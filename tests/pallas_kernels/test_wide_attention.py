"""Attention with wide heads: the kernels interpreted, against the reference in float32."""

import jax
import pytest

from pallas_kernels import wide_attention
from pallas_kernels.checking.attention import TOLERANCE, Batch, call, make_arrays, worst_error
from pallas_kernels.wide_attention import triton
from tests.helpers.slow import slow_except

HEADS = {"num_kv_heads": 1, "num_groups": 3, "head_dim": 320, "poison": True}
BATCHES = [
    Batch("decode in splits", decodes=(1, 16, 17, 0, 300), **HEADS),
    Batch("queries, window", decodes=(3, 0, 40), num_queries=3, window=20, **HEADS),
    Batch(
        "mixed, cap, scales",
        (40,),
        ((9, 8), (1, 0), (70, 20)),
        padding=3,
        soft_cap=30.0,
        cache_dtype="float8_e4m3fn",
        has_scales=True,
        **HEADS,
    ),
    Batch("float32", (9,), ((5, 12),), dtype="float32", **HEADS),
]


@pytest.mark.parametrize("batch", slow_except(BATCHES[:3], BATCHES), ids=lambda batch: batch.name)
def test_results_are_those_of_the_reference(batch):
    arrays = make_arrays(batch)
    got = jax.jit(call(triton, batch, interpret=True))(arrays[0], *arrays[1])
    assert worst_error(batch, *arrays, got) < TOLERANCE[batch.dtype]


def test_what_the_kernel_does_not_take_is_left_to_plain_jax():
    case = {"dtype": "bfloat16", "num_groups": 8, "head_dim": 512}
    assert wide_attention.candidates(**case) == ("triton", "xla")
    assert wide_attention.candidates(**case, platform="cpu") == ("xla",)
    for other in ({"head_dim": 1024}, {"has_sinks": True}, {"has_part": True}, {"num_groups": 64}):
        assert wide_attention.candidates(**{**case, **other}) == ("xla",)
