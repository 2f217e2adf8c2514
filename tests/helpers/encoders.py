"""Engines with the tiny encoders and classifiers in tests/goldens, and what transformers computed with them."""

import json
from dataclasses import replace
from typing import Any

import numpy as np

from jaxllm.config import EngineConfig
from jaxllm.engine.core import EngineCore
from tests.helpers import engines
from tests.helpers.goldens import FOLDER

SMALL = {**engines.SMALL, "max_model_len": 64, "max_num_batched_tokens": 80, "token_buckets": (80,)}


def make_core(directory, **options: Any) -> EngineCore:
    return EngineCore(EngineConfig.from_options(**{**SMALL, "model": str(directory), **options}))


def golden(name: str) -> list[dict[str, Any]]:
    results = json.loads((FOLDER / name / "encoder.json").read_text(encoding="utf-8"))["results"]
    return [{**result, "found": np.array(result["found"], np.float32)} for result in results]


def request_of(request_id: str, result: dict[str, Any], **params: Any):
    made = engines.pooling_request(request_id, result["prompt"], **params)
    return replace(made, second_text_start=result["second_text_start"])


def check(core: EngineCore, results: list[dict[str, Any]], task: str, expected_of=lambda found: found) -> None:
    """More requests than rows, of which steps hold one or several."""
    requests = [request_of(f"{i} {again}", result, task=task) for again in range(3) for i, result in enumerate(results)]
    answers = engines.run(core, requests)
    assert core.stats().num_preemptions == 0
    for i, result in enumerate(results):
        for again in range(3):
            np.testing.assert_allclose(answers[f"{i} {again}"].pooled, expected_of(result["found"]), rtol=1e-4, atol=1e-4)
