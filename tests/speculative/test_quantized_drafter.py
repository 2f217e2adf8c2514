"""A drafter with fp8 weights: which of its products take activations as they are, and where its blocks stay as stored."""

import json
from dataclasses import replace

import pytest

from jaxllm.kernel_policy import GPU
from jaxllm.models.load_config import load_model_config
from jaxllm.quantization import fp8
from jaxllm.speculative import draft_model
from tests.helpers import engines, goldens


@pytest.mark.slow
def test_a_drafter_multiplies_few_rows_as_they_are_only_in_small_programs(monkeypatch):
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
    for kind, is_weight_only in (("decode", True), ("propose", False)):
        found.clear()
        core.runner.shapes.lower(next(key for key in core.runner.shapes.common_keys() if key.kind == kind and key.width > 1))
        assert bool(found) is is_weight_only, kind
    core.shutdown()


@pytest.mark.parametrize(("has_tiles", "on_gpu", "is_stored"), [(True, True, True), (False, True, False), (False, False, True)])
def test_fp8_blocks_of_a_draft_model_stay_as_stored_unless_a_gpu_has_no_kernels_for_them(
    tmp_path, has_tiles, on_gpu, is_stored
):
    directory = goldens.FOLDER / "llama_gqa"
    raw = json.loads((directory / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    target = load_model_config(directory)
    target = target.in_tiles() if has_tiles else target
    drafter = draft_model.make(tmp_path, target, target_directory=directory, num_drafts=2, on_gpu=on_gpu)
    assert [(format.computes, format.tiles) for format in drafter.config.formats] == [(is_stored, has_tiles)]
