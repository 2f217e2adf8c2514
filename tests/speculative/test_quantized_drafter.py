"""A drafter with fp8 weights: which of its products take activations as they are."""

from dataclasses import replace

import pytest

from jaxllm.kernel_policy import GPU
from jaxllm.quantization import fp8
from tests.helpers import engines, goldens


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "is_weight_only"), [("decode", True), ("propose", False)])
def test_a_drafter_multiplies_few_rows_as_they_are_only_in_small_programs(monkeypatch, kind, is_weight_only):
    """In a program with more tokens than `max_triton_rows`, XLA would write the whole weight down in 16 bits for them."""
    found, product = [], fp8.weight_only_product
    drafter = {
        "method": "draft_model",
        "model": str(goldens.FOLDER / "llama_gqa"),
        "num_speculative_tokens": 2,
        "quantization": "fp8",
    }
    policy = replace(GPU, decode_rows=(4,), tokens=(112,))
    core = engines.make_core("llama_gqa", kernel_policy=policy, speculative_config=drafter, warmup="lazy")
    monkeypatch.setattr(fp8, "weight_only_product", lambda *arrays: found.append(arrays) or product(*arrays))
    key = next(key for key in core.runner.shapes.common_keys() if key.kind == kind and key.width > 1)
    core.runner.shapes.lower(key)
    core.shutdown()
    assert bool(found) is is_weight_only
