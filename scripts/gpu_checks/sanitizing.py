"""Every Mosaic and Triton kernel once on small batches, for a run under compute-sanitizer.

Arrays and what is right come from NumPy, so that hardly anything but the kernels runs on the device: the sanitizer slows all of it
down by orders of magnitude.
"""

from collections.abc import Collection, Iterator

import jax

from pallas_kernels.checking import (
    attention_at_start,
    delta_decode,
    expert_choice,
    gated_delta,
    gated_matmul,
    grouped_matmul,
    lora,
    quantize,
    quantized_matmul,
    rope_cache_write,
    router_scores,
    sampling,
    segment_attention,
    state_space,
)
from pallas_kernels.checking.attention_at_start import Layer
from pallas_kernels.checking.case import Case
from pallas_kernels.checking.check import check as run_cases
from pallas_kernels.expert_choice import Rule
from pallas_kernels.lora import Parts
from scripts.gpu_checks import Outcome

FP8 = "float8_e4m3fn"
ATTENTION = (
    # (head width, query heads per key-value head, page size, type of the cache, window, soft cap, sinks)
    (128, 4, 16, "bfloat16", None, None, False),
    (128, 3, 8, "bfloat16", 20, None, True),
    (64, 4, 128, "bfloat16", None, 20.0, False),
    (256, 2, 32, "bfloat16", None, None, False),
    (128, 4, 16, FP8, None, None, False),
    (64, 8, 16, "bfloat16", None, None, True),
)
NUM_KV_HEADS = 2
VOCAB_SIZE = 5000


def check(*, ops: Collection[str]) -> Iterator[Outcome]:
    """An outcome per case of these ops: that it is right, too."""
    for name, case in kernel_cases(interpret=jax.default_backend() != "gpu"):
        if name.split()[0] not in ops:
            continue
        # One by one: programs that compile side by side hinder each other under the sanitizer.
        (fault,) = run_cases([case])
        yield Outcome(f"{name}: {case.name}", fault is None, "right, twice" if fault is None else fault.text)


def kernel_cases(*, interpret: bool) -> list[tuple[str, Case]]:
    """The cases by the name of what they run, which begins with the op's in `scripts.kernels`."""
    found: list[tuple[str, Case]] = []
    attention: list[tuple[str, Case]] = []
    for head_dim, num_groups, page_size, cache_dtype, window, soft_cap, has_sinks in ATTENTION:
        shapes = attention_at_start.Shapes(
            dtype="bfloat16",
            cache_dtype=cache_dtype,
            num_kv_heads=NUM_KV_HEADS,
            num_groups=num_groups,
            head_dim=head_dim,
            page_size=page_size,
            table_width=max(8, 1100 // page_size),
            layers=(Layer(head_dim**-0.5, window, soft_cap, has_sinks),),
            has_scales=cache_dtype == FP8,
        )
        title = f"h{head_dim} g{num_groups} page {page_size} {cache_dtype}"
        for name in ("mosaic", "triton"):
            cases = attention_at_start.cases(shapes, name, interpret=interpret)
            attention += [(f"attention {name} {title}", case) for case in cases]
    for cache_dtype, has_norms in (("bfloat16", True), (FP8, False)):
        rope = rope_cache_write.Shapes(
            dtype="bfloat16",
            cache_dtype=cache_dtype,
            num_kv_heads=NUM_KV_HEADS,
            num_groups=4,
            head_dim=128,
            page_size=16,
            has_norms=has_norms,
            has_scales=cache_dtype == FP8,
        )
        title = f"rope triton {cache_dtype}{' norm' * has_norms}"
        found += [(title, case) for case in rope_cache_write.cases(rope, "triton", interpret=interpret)]
    for rule in (Rule(3), Rule(4, "sigmoid", renormalize=True, num_groups=4, top_groups=2, sums_two=True)):
        shapes_of_choice = expert_choice.Shapes(20, rule, has_bias=rule.num_groups > 1)
        cases = expert_choice.cases(shapes_of_choice, "triton", interpret=interpret)
        found += [(f"choice triton {rule.scoring}", case) for case in cases]
    for has_biases in (False, True):
        for name, hidden in (("mosaic", 128), ("triton", 96)):  # Mosaic's tiles divide the widths
            mixture = grouped_matmul.Shapes("bfloat16", 6, 3, 256, hidden, has_biases=has_biases)
            cases = grouped_matmul.cases(mixture, name, interpret=interpret)
            found += [(f"experts {name}{' biases' * has_biases}", case) for case in cases]
    mixture = grouped_matmul.Shapes("bfloat16", 6, 3, 256, 96, is_packed=True)
    found += [("experts triton 4 bits", case) for case in grouped_matmul.cases(mixture, "triton", interpret=interpret)]
    for stored in (grouped_matmul.Stored("int4", 64, has_zeros=True), grouped_matmul.Stored("e4m3", None)):
        mixture = grouped_matmul.Shapes("bfloat16", 6, 3, 256, 128, has_biases=True, stored=(stored, stored))
        cases = grouped_matmul.cases(mixture, "mosaic", interpret=interpret)
        found += [(f"experts mosaic {stored.number}", case) for case in cases]
    gated = gated_matmul.Shapes("bfloat16", 256, 192)
    found += [("gated mosaic", case) for case in gated_matmul.cases(gated, "mosaic", interpret=interpret)]
    delta = gated_delta.Shapes("bfloat16", 2, 2, 24, 40)
    found += [("delta triton", case) for case in gated_delta.cases(delta, "triton", interpret=interpret)]
    decode = delta_decode.Shapes("bfloat16", 2, 2, 24, 40)
    found += [("delta decode triton", case) for case in delta_decode.cases(decode, "triton", interpret=interpret)]
    router = router_scores.Shapes("bfloat16", 5, 300)
    found += [("router triton", case) for case in router_scores.cases(router, "triton", interpret=interpret)]
    mamba = state_space.Shapes("bfloat16", 2, 2, 24, 40)
    found += [("space triton", case) for case in state_space.cases(mamba, "triton", interpret=interpret)]
    adapted = lora.Shapes("bfloat16", 3, 8, 300, Parts(2, (3, 1, 1), 40))
    found += [("lora triton", case) for case in lora.cases(adapted, "triton", interpret=interpret)]
    vectors = quantize.Shapes("bfloat16", 300, 200, 2500, 1e-5)
    found += [("quantize triton", case) for case in quantize.cases(vectors, "triton", interpret=interpret)]
    for weight in (
        quantized_matmul.Shapes("int4", 200, 640, 128, has_zeros=True),
        quantized_matmul.Shapes("int4", 128, 2048, 128),  # few outputs: both kernels leave sums of four parts
        quantized_matmul.Shapes("e2m1", 128, 320, 32, "uint8"),
        quantized_matmul.Shapes("int8", 64, 256, None),
        quantized_matmul.Shapes("e4m3", 192, 192, None, "float32"),
    ):
        found += [("quantized mosaic", case) for case in quantized_matmul.cases(weight, "mosaic", interpret=interpret)]
    found += [("sampling triton", case) for case in sampling.cases(sampling.Shapes(VOCAB_SIZE), "triton", interpret=interpret)]
    for head_dim in (72, 128):
        encoder = segment_attention.Shapes("bfloat16", 2, head_dim)
        for name in ("mosaic", "triton"):
            cases = segment_attention.cases(encoder, name, interpret=interpret)
            found += [(f"segments {name} d{head_dim}", case) for case in cases]
    return attention[:7] + found + attention[7:]
