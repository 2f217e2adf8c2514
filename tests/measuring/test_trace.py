"""Traces are read as they were made by hand."""

import gzip
import json
import time

import pytest

from jaxllm.measuring.trace import class_of, parse, read_trace, record
from tests.helpers.traces import EVENTS, NAMES


def test_kernels_are_cut_to_the_stretch_and_transfers_are_none() -> None:
    trace = parse(EVENTS)
    assert (trace.start, trace.end, trace.wall) == (100.0, 200.0, 100.0)
    assert [kernel.name for kernel in trace.kernels] == ["gemm_fusion_dot_7", "paged_decode", "loop_add_fusion", "paged_decode"]
    assert [(kernel.start, kernel.end) for kernel in trace.kernels] == [(100, 110), (120, 140), (130, 150), (180, 200)]
    assert [(t.name, t.end - t.start) for t in trace.transfers] == [("MemcpyD2H", 25.0)]


def test_a_trace_is_read_from_its_file(tmp_path) -> None:
    with pytest.raises(ValueError, match="0 traces"):
        read_trace(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.trace.json.gz").write_bytes(gzip.compress(json.dumps({"traceEvents": EVENTS}).encode()))
    assert read_trace(tmp_path) == parse(EVENTS)
    with pytest.raises(ValueError, match="does not hold the measured stretch"):
        parse(NAMES)


def test_a_stretch_begins_where_it_is_entered() -> None:
    began = time.perf_counter()
    trace, _ = record(lambda: time.sleep(0.2), lambda: time.sleep(0.02))
    assert 20_000 <= trace.wall < 1e6 * (time.perf_counter() - began - 0.2)


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
