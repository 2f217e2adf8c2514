"""Engines whose dense layers a kernel computes in steps of many tokens, and by XLA in the others."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from jaxllm.engine import kernel_choice
from jaxllm.engine.kernel_shapes import product_shapes, shapes_of
from jaxllm.kernel_policy import CPU, GATED_ROWS
from jaxllm.layers.build import build_model
from jaxllm.models.load_config import load_model_config
from jaxllm.parallel.mesh import make_mesh
from pallas_kernels import _compat
from pallas_kernels.checking import gated_matmul
from tests.helpers import goldens
from tests.helpers.engines import make_core, request, run

BF16 = {
    "dtype": "bfloat16",
    "load_format": "dummy",
    "hf_overrides": {"intermediate_size": 256, "head_dim": 16},
    "warmup": "lazy",
}
PADDED = {"token_buckets": [GATED_ROWS], "max_num_batched_tokens": GATED_ROWS}
PROMPT = [*range(3, 35)]


@pytest.mark.newer
@pytest.mark.slow
@pytest.mark.skipif(not _compat.has_mosaic(), reason="JAX 0.10 lacks parts of Mosaic GPU that the kernels use")
def test_logprobs_are_those_of_layers_without_the_kernel():
    logprobs = []
    for min_tokens in (GATED_ROWS, GATED_ROWS + 1):
        policy = replace(CPU, min_gated_tokens=min_tokens)
        core = make_core("llama_gqa", kernel_policy=policy, attention_implementation="triton", **BF16, **PADDED)
        assert core.kernels["gated_matmul"].implementation == "mosaic"
        found = run(core, [request("a", PROMPT, max_tokens=1, prompt_logprobs=1)])["a"].prompt_logprobs
        assert found is not None
        logprobs.append(np.asarray(found.logprobs)[:, 0])
        core.shutdown()
    by_kernel, apart = logprobs
    assert np.abs(by_kernel - apart).max() < 0.02
    assert not np.array_equal(by_kernel, apart)  # what the activation takes is not rounded


def test_the_kernel_is_chosen_where_a_record_says_that_it_was_right(monkeypatch):
    core = make_core("llama_gqa", **BF16)
    model, plan = core.model_config, core.memory_plan
    products = product_shapes([build_model(model)], model.dtype)
    whole = gated_matmul.Shapes("bfloat16", model.hidden_size, 256)
    assert products.gated == (whole,)

    def candidates(wanted, on_gpu=True, num_devices=1):
        mesh = make_mesh(num_devices)
        found = kernel_choice.candidates(wanted, model, plan, mesh, on_gpu=on_gpu, gated=products.gated)
        return found.get("gated_matmul")

    monkeypatch.setattr(kernel_choice.gated_matmul, "candidates", lambda **_: ("mosaic", "xla"))
    monkeypatch.setattr(kernel_choice, "attention_candidates", lambda *_, **__: {"paged_attention": ("triton", "xla")})
    for is_right, expected in ((False, None), (True, ("mosaic", "xla"))):
        monkeypatch.setattr(kernel_choice, "is_verified", lambda kind, op, is_right=is_right: is_right)
        assert candidates("auto") == expected
    assert candidates("triton") == ("mosaic", "xla")  # a kernel was asked for by name: it is checked
    assert candidates("auto", on_gpu=False) is None
    assert candidates("auto", num_devices=2) is None  # no record has several devices
    assert candidates("triton", num_devices=2) == ("mosaic", "xla")
    assert shapes_of(core.config, model, plan, None, products)["gated_matmul"] == (whole,)
    core.shutdown()
    load = partial(load_model_config, goldens.golden("llama_gqa").directory, dtype="bfloat16")
    found = {method: product_shapes([build_model(load(quantization=method))], "bfloat16").gated for method in ("int8", "fp8")}
    assert found == {"int8": (), "fp8": (gated_matmul.Shapes("bfloat16", model.hidden_size, 96, is_scaled=True),)}
