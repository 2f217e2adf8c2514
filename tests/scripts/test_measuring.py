"""Shared parts of the benchmarks' scripts: rows, and figures of a trace."""

import pytest

from jaxllm.measuring.trace import STRETCH, Kernel, parse
from pallas_kernels.checking.attention import Batch
from scripts.kernels.attention import flash_attention_3
from scripts.measuring.asked import LONG, Asked, max_model_len, read_rows
from scripts.measuring.describe import describe, gaps
from scripts.measuring.idle import busy, idle_share, merged
from tests.helpers.traces import COMPUTE, EVENTS, HOST, NAMES, OTHER_GPU, span


def test_idle_is_what_no_stream_fills() -> None:
    trace = parse(EVENTS)
    assert busy(trace) == pytest.approx(10 + 30 + 20)
    assert idle_share(trace) == pytest.approx(0.4)


def test_several_devices_are_averaged() -> None:
    trace = parse([*EVENTS, span(OTHER_GPU, COMPUTE, "paged_decode", 100.0, 180.0)])
    assert busy(trace) == pytest.approx((60 + 80) / 2)


def test_gaps_name_their_neighbours() -> None:
    found = gaps(parse(EVENTS).kernels)
    assert found == [("gemm_fusion_dot_7", "paged_decode", 10.0), ("loop_add_fusion", "paged_decode", 30.0)]
    inside = [Kernel("long", 0, 10, "d"), Kernel("short", 2, 3, "d"), Kernel("next", 12, 13, "d")]
    assert gaps(inside) == [("long", "next", 2)]


def test_merged_spans() -> None:
    assert merged([(5, 6), (0, 2), (1, 4), (4, 5), (8, 9), (8, 8.5)]) == [(0, 6), (8, 9)]
    assert merged([]) == []


def test_a_description_adds_up() -> None:
    text = describe(parse(EVENTS), num_steps=2, num_layers=2, top=5)
    assert (
        "wall 50 us, a kernel running 30, none 20 (40.0%); sum of kernels 35 in 2.0 launches, 1.0 a layer; transfers 12" in text
    )
    assert "attention 57.1%, other 28.6%, GEMM 14.3%" in text
    assert "gaps between kernels: 20.0 us in 1.0" in text
    assert (
        describe(parse([*NAMES, span(HOST, 9, STRETCH, 0.0, 1.0)]), num_steps=1, num_layers=1)
        == "  the trace holds no GPU kernels"
    )


def test_rows_of_a_benchmark_are_read_by_their_names() -> None:
    assert read_rows("64,decode1,mixed,128,prefill1@32K") == [
        Asked("64", "batch", 64),
        Asked("decode1", "decode", 1),
        Asked("mixed", "requests"),
        Asked("128", "requests"),
        Asked("prefill1@32K", "prefill", 1, 32768),
    ]
    assert read_rows("long") == read_rows(LONG) and Asked.of("decode1@128k").num_tokens == 128_000
    for name in ("decode", "prefill1", "0", "16@4K", "decode16@", "fast", ""):
        with pytest.raises(ValueError, match="no row"):
            read_rows(name)


def test_an_engine_has_room_for_the_longest_row() -> None:
    assert max_model_len(read_rows("64,decode64,mixed"), output=257) == 4096
    assert max_model_len(read_rows("64,prefill1@32K"), output=257) == 32768 + 128
    needed = max_model_len(read_rows("decode16@16K"), output=257)  # 128 steps of prompts, the output, steps that are traced
    assert 16384 + 128 + 257 + 44 < needed < 17_000
    assert max_model_len(read_rows("long"), output=257) < 131_072


def test_published_speeds_stand_beside_prompts_that_compare() -> None:
    assert "602 TFLOP/s (causal, 8192 tokens" in flash_attention_3(Batch("", prompts=((8192, 0),)))
    assert "616 TFLOP/s (causal, 16384" in flash_attention_3(Batch("", prompts=((8192, 122880),)))
    assert not flash_attention_3(Batch("", decodes=(9000,)))
    assert not flash_attention_3(Batch("", prompts=((8192, 0),), window=100))
    assert not flash_attention_3(Batch("", prompts=((8192, 0),), head_dim=80))
