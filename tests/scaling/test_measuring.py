"""The benchmarks' arithmetic: traces against hand-made ones, limits against counting one by one."""

import dataclasses
import gzip
import json
import time

import pytest

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import MLP, Attention, LatentAttention, Layer, MoE, Norm, Rope, Routing
from jaxllm.quantization.formats.mxfp4 import Mxfp4
from jaxllm.scaling.limits import Ceilings, ModelCost, Work
from jaxllm.scaling.trace import STRETCH, Kernel, class_of, parse, read_trace, record
from pallas_kernels.checking.attention import Batch
from scripts.kernels.attention import flash_attention_3
from scripts.measuring.asked import LONG, Asked, max_model_len, read_rows
from scripts.measuring.describe import describe, gaps
from scripts.measuring.idle import busy, idle_share, merged

GPU, OTHER_GPU, HOST = 1, 2, 700
COMPUTE, SECOND, OPS = 13, 14, 15


def meta(pid: int, name: str, tid: int | None = None) -> dict:
    kind = "process_name" if tid is None else "thread_name"
    return {"ph": "M", "pid": pid, "name": kind, "args": {"name": name}} | ({} if tid is None else {"tid": tid})


def span(pid: int, tid: int, name: str, start: float, end: float) -> dict:
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": start, "dur": end - start}


NAMES = [
    meta(GPU, "/device:GPU:0"),
    meta(OTHER_GPU, "/device:GPU:1"),
    meta(HOST, "/host:CPU"),
    meta(GPU, "Stream #13(Compute)", COMPUTE),
    meta(GPU, "Stream #14(Compute,MemcpyD2H)", SECOND),
    meta(GPU, "XLA Ops", OPS),
    meta(OTHER_GPU, "Stream #13(Compute)", COMPUTE),
    meta(HOST, "python", 9),
]
EVENTS = [
    *NAMES,
    span(HOST, 9, STRETCH, 100.0, 200.0),
    span(HOST, 9, "something else on the host", 0.0, 900.0),
    span(GPU, COMPUTE, "early", 50.0, 90.0),
    span(GPU, COMPUTE, "gemm_fusion_dot_7", 95.0, 110.0),  # cut at 100
    span(GPU, COMPUTE, "paged_decode", 120.0, 140.0),
    span(GPU, SECOND, "loop_add_fusion", 130.0, 150.0),  # overlaps on another stream
    span(GPU, SECOND, "MemcpyD2H", 150.0, 175.0),  # no kernel
    span(GPU, OPS, "paged_decode", 120.0, 180.0),  # the same time under another name
    span(GPU, COMPUTE, "paged_decode", 180.0, 230.0),  # cut at 200
]


def test_idle_is_what_no_stream_fills() -> None:
    trace = parse(EVENTS)
    assert (trace.start, trace.end, trace.wall) == (100.0, 200.0, 100.0)
    assert [kernel.name for kernel in trace.kernels] == ["gemm_fusion_dot_7", "paged_decode", "loop_add_fusion", "paged_decode"]
    assert busy(trace) == pytest.approx(10 + 30 + 20)
    assert idle_share(trace) == pytest.approx(0.4)
    assert [(t.name, t.end - t.start) for t in trace.transfers] == [("MemcpyD2H", 25.0)]


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


def test_a_trace_is_read_from_its_file(tmp_path) -> None:
    with pytest.raises(ValueError, match="0 traces"):
        read_trace(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.trace.json.gz").write_bytes(gzip.compress(json.dumps({"traceEvents": EVENTS}).encode()))
    assert busy(read_trace(tmp_path)) == pytest.approx(60)
    with pytest.raises(ValueError, match="does not hold the measured stretch"):
        parse(NAMES)


def test_a_stretch_begins_where_it_is_entered() -> None:
    trace, _ = record(lambda: time.sleep(0.2), lambda: time.sleep(0.02))
    assert 20_000 <= trace.wall < 150_000


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("paged_decode_combine", "attention"),
        ("mosaic_gpu_paged_attention_kernel", "attention"),
        ("write_cache", "cache write, rope"),
        ("nvjet_tst_128x64_h_bz_NNT", "GEMM"),
        ("gemm_fusion_dot_12", "GEMM"),
        ("norm_gate_up", "GEMM"),
        ("sm90_xmma_gemm_bf16", "GEMM"),
        ("input_reduce_fusion_3", "other"),
        ("loop_convert_fusion", "other"),
    ],
)
def test_kernels_have_classes(name: str, kind: str) -> None:
    assert class_of(name) == kind


def config(windows=(None, None, None), **changes) -> ModelConfig:
    parts = [Layer(Attention(4, 2, 2, Rope(), window), MLP(16), Norm("attention_norm"), Norm("mlp_norm")) for window in windows]
    return ModelConfig("LlamaForCausalLM", 50, 8, tuple(parts), Norm("norm"), 100, **changes)


LAYER_CACHE = 2 * 2 * 2 * 2
"""Bytes a token: keys and values of two heads of two values in bfloat16."""


def counted(c: ModelConfig, requests, weight_bytes, num_steps, skip_prompts):
    """Token by token."""
    flops, num_bytes = 0.0, weight_bytes * num_steps
    layer = 8 * (4 + 2 * 2) * 2 + 4 * 2 * 8
    layer += 3 * 8 * 16 + 2 * 8
    for prompt, output in requests:
        for position in range(prompt + output - 1):
            if skip_prompts and position < prompt:
                continue
            flops += 2 * (c.num_layers * layer + c.hidden_size)
            if position >= prompt - 1:
                flops += 2 * c.hidden_size * c.vocab_size
            for index in range(c.num_layers):
                seen = min(position + 1, c.layers[index].attention.window or 10**9)
                flops += 4 * seen * 4 * 2
                if position >= prompt:
                    num_bytes += seen * LAYER_CACHE
    return num_bytes, flops


@pytest.mark.parametrize("skip_prompts", [False, True])
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"windows": (4, None, 4)}])
def test_work_is_what_counting_gives(changes: dict, skip_prompts: bool) -> None:
    c, requests = config(**changes), [(5, 1), (3, 7), (9, 2)]
    work = ModelCost(c, weight_bytes=1000).work(requests, num_steps=7, skip_prompts=skip_prompts)
    assert (work.bytes, work.flops) == pytest.approx(counted(c, requests, 1000, 7, skip_prompts))


def test_a_long_prompt_costs_its_pairs_and_a_long_decode_its_keys() -> None:
    """Of 16 values each: in 128 k tokens attention is nearly all of the work, and the next token reads all of them."""
    c, n = config(), 1 << 17
    cost = ModelCost(c, weight_bytes=1000)
    prompt, half = (cost.work([(length, 1)], num_steps=1).flops for length in (n, n // 2))
    assert prompt / half == pytest.approx(4, rel=0.01)
    assert cost.work([(n, 2)], num_steps=1, skip_prompts=True).bytes == 1000 + (n + 1) * cost.cache_bytes_per_token


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


def test_a_decode_reads_what_each_layer_keeps() -> None:
    """The token after a context of 1000 sees 1001 in full layers, 512 in windows, and latents once for all heads."""

    def decode_bytes(c: ModelConfig, num_devices: int = 1) -> float:
        return ModelCost(c, 0, num_devices).work([(1000, 2)], num_steps=1, skip_prompts=True).bytes

    # As Gemma 3: five layers of six have a window; the six share the arrays of one.
    windows = [512] * 5 + [None]
    assert decode_bytes(config(windows)) == 16 * (5 * 512 + 1001)
    assert decode_bytes(config(windows, kv_cache_dtype="float8_e4m3fn")) == 8 * (5 * 512 + 1001)
    latent = LatentAttention(16, 512, 128, 64, 128, Rope(), 1.0, Norm("latent_norm"))
    deepseek = config([None] * 2)
    deepseek = dataclasses.replace(
        deepseek, layers=tuple(dataclasses.replace(layer, attention=latent) for layer in deepseek.layers)
    )
    assert decode_bytes(deepseek) == 2 * 1001 * 576 * 2
    # Each device reads all latents, which have a copy for each, and its share of the heads of others.
    assert decode_bytes(deepseek.for_tensor_parallel(2), 2) == 2 * 1001 * 576 * 2
    assert decode_bytes(config(windows).for_tensor_parallel(2), 2) == 8 * (5 * 512 + 1001)


def test_the_limit_is_the_slower_of_both_and_devices_share() -> None:
    ceilings = Ceilings(copy_bytes_per_second=100.0, gemm_flops_per_second=10.0)
    assert ceilings.seconds(Work(200, 5)) == 2.0 and ceilings.seconds(Work(200, 50)) == 5.0
    one, two = (ModelCost(config(), 1000, num_devices=n).work([(5, 3)], num_steps=3) for n in (1, 2))
    assert (two.bytes, two.flops) == (one.bytes / 2, one.flops / 2)


def test_a_step_reads_the_experts_that_its_tokens_are_expected_to_choose():
    moe = MoE(Routing(num_experts=8, top_k=2), width=16)
    sparse = config()
    sparse = dataclasses.replace(sparse, layers=tuple(dataclasses.replace(layer, mlp=moe) for layer in sparse.layers))
    weight_bytes, expert_values = 100_000, 3 * 16 * 8
    cost = ModelCost(sparse, weight_bytes)
    one = cost.work([(1, 2)], num_steps=1, skip_prompts=True)
    unread = 3 * 6 * expert_values * 2
    assert one.bytes == pytest.approx(weight_bytes - unread + 2 * 3 * LAYER_CACHE)
    packed = ModelCost(dataclasses.replace(sparse, formats=(Mxfp4(computes=True),)), weight_bytes)
    four_bits = packed.work([(1, 2)], num_steps=1, skip_prompts=True)
    assert four_bits.bytes == pytest.approx(weight_bytes - unread / 2 * 17 / 32 + 2 * 3 * LAYER_CACHE)
    many = cost.work([(1, 2)] * 1000, num_steps=1, skip_prompts=True)
    assert many.bytes == pytest.approx(weight_bytes + 1000 * 2 * 3 * LAYER_CACHE)
    dense = ModelCost(dataclasses.replace(sparse, layers=config().layers), 1).work([(1, 2)], num_steps=1, skip_prompts=True)
    router, chosen = 8 * 8, 2 * expert_values
    assert one.flops - dense.flops == pytest.approx(2 * 3 * (router + chosen - expert_values))
