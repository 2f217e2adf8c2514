"""Whole engines of models that see images, in steps of at most 16 tokens, against what transformers computed (goldens/*/pictures.json)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.config import EngineConfig
from jaxllm.engine.core import EngineCore
from tests.helpers import engines, pictures
from tests.helpers.picture_requests import golden_requests
from tests.helpers.slow import slow_except


def make_core(name: str, directory: Path, **options: Any) -> EngineCore:
    small = {"max_num_batched_tokens": 16, "token_buckets": (16, 112), "dtype": "float32", "mm_max_patches": 256}
    model = str(pictures.write(name, directory / "model"))
    return EngineCore(EngineConfig.from_options(**{**engines.SMALL, **small, "model": model, **options}))


OF_EACH_KIND = ["qwen3_vl", "idefics3", "qwen2_5_vl"]
"""Positions of three axes and features between layers; tiles; windows of an encoder. The others have these parts, and what their layers
compute is in tests/models/test_pictures.py. Tokens of an image that see each other: test_image_spans.py."""


@pytest.fixture(scope="module", params=slow_except(["qwen3_vl"], OF_EACH_KIND))
def golden(request, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, EngineCore]]:
    """Name of a golden, and an engine over it that all checks share."""
    core = make_core(request.param, tmp_path_factory.mktemp(request.param))
    yield request.param, core
    core.shutdown()


def check(name: str, core: EngineCore) -> None:
    """All prompts together, and one alone while another rank is idle."""
    requests = golden_requests(name, core.model_config.vision, logprobs=0)
    for together in (requests, requests[:1]):
        found = engines.run(core, together)
        for answer, result in zip(found.values(), pictures.golden(name).results, strict=False):
            assert answer.tokens == result.tokens
            np.testing.assert_allclose(answer.token_logprobs.logprobs[:, 0], result.logprobs, atol=2e-4)


def test_prompts_with_images(golden) -> None:
    check(*golden)


@pytest.mark.slow
def test_prompts_of_text_alone(golden) -> None:
    """Beside prompts with pictures, each golden has one without."""
    name, core = golden
    result = pictures.golden(name).results[-1]
    assert not result.pictures
    answer = engines.run(core, [engines.request("0", result.prompt, max_tokens=64, prompt_logprobs=0)])["0"]
    assert answer.tokens == result.tokens
    np.testing.assert_allclose(answer.prompt_logprobs.logprobs[:, 0], result.prompt_logprobs, rtol=0, atol=1e-4)


RANKS = {"data_parallel_size": 2, "enable_expert_parallel": True}
IN_PARTS = {"mm_max_decode_step_patches": 100}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3_vl_moe", {**RANKS, **IN_PARTS}),
        ("internvl", {"tensor_parallel_size": 2, **IN_PARTS}),  # of all in parts: runner/test_images
    ],
)
def test_other_engines(name, options, tmp_path) -> None:
    core = make_core(name, tmp_path, **options)
    check(name, core)
    parts = {key.part for key in core.runner.programs._compiled if key.kind == "encode"}
    assert parts == {0, 1}
    core.shutdown()
