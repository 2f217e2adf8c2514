"""The work of each size."""

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jaxllm.config import EngineConfig, resolve_platform_defaults
from jaxllm.errors import ConfigError
from jaxllm.model_config import ModelConfig
from jaxllm.models.load_config import load_model_config
from jaxllm.scaling.engine_options import engine_options, longest_request
from jaxllm.scaling.plan import Plan, mixed_requests
from tests.scaling.samples import PLAN

MODEL = load_model_config(Path(__file__).parents[1] / "goldens" / "llama_gqa")


def plan(**changes: Any) -> Plan:
    return msgspec.structs.replace(PLAN, **changes)


def test_weak_scaling_adds_the_batch_sizes_that_it_needs() -> None:
    assert PLAN.decode_batches(1) == [1, 8]
    assert PLAN.decode_batches(4) == [1, 4, 8, 32]
    assert plan(scalings=("strong",)).decode_batches(4) == [1, 8]
    assert plan(scalings=("weak",)).decode_batches(4) == [4, 32]
    assert plan(works=("prefill",)).decode_batches(4) == []
    assert PLAN.largest_batch() == 32


def test_the_mix_is_the_same_each_time() -> None:
    mix = mixed_requests(300, 64, 16)
    assert mix == mixed_requests(300, 64, 16) and len(set(mix)) > 100
    assert {16, 128} >= {min(p for p, _ in mix), max(p for p, _ in mix)} and min(o for _, o in mix) >= 4


def test_only_results_of_the_same_experiment_are_joined() -> None:
    joined = PLAN.joined(plan(tensor_parallel_sizes=(8,), batch_sizes=(8, 16), works=("decode", "mixed"), requests=((3, 4),)))
    assert joined.tensor_parallel_sizes == (1, 2, 4, 8) and joined.batch_sizes == (1, 8, 16)
    assert set(joined.works) == {"decode", "prefill", "mixed"} and joined.requests == ((3, 4),)
    for changes, message in (
        ({"input_len": 17}, "input_len is 16 here and 17 there"),
        ({"options": {}}, "options is {'load_format'.* here and {} there"),
    ):
        with pytest.raises(ConfigError, match=message):
            PLAN.joined(plan(**changes))
    with pytest.raises(ConfigError, match="requests is"):
        joined.joined(plan(requests=((5, 6),)))


def options(plan: Plan, *, on_gpu: bool = True, max_position: int = 100_000) -> dict[str, Any]:
    """A host with four GPUs of 100 GiB each."""

    def resolve(given: dict[str, Any]) -> tuple[EngineConfig, ModelConfig]:
        config = resolve_platform_defaults(EngineConfig.from_options(**given), on_gpu=on_gpu, device_bytes=100 << 30)
        return config, dataclasses.replace(MODEL, max_position=max_position)

    return engine_options(plan, 4, resolve, on_gpu=on_gpu)


def test_the_engine_has_what_the_work_needs() -> None:
    found = options(plan(options={"load_format": "dummy"}))
    assert (found["max_num_seqs"], found["decode_buckets"]) == (32, (8, 32))
    assert found["token_buckets"] == (16, 1024, 8192)  # a prompt, the 1024 tokens of the whole prefill, a whole step
    assert found["max_model_len"] == longest_request(PLAN, 8192) > PLAN.input_len + PLAN.output_len
    assert options(plan(options={}), on_gpu=False)["decode_buckets"] == (1, 4, 8, 32)
    assert options(plan(options={}), max_position=20)["max_model_len"] == 20


def test_mixed_work_runs_as_in_service() -> None:
    found = options(plan(works=("mixed",), requests=((50, 7), (10, 90)), options={}))
    assert found["max_num_seqs"] == 1024 and "decode_buckets" not in found and "token_buckets" not in found
    assert found["max_model_len"] == 100


def test_what_somebody_set_is_kept() -> None:
    asked = {"max_num_seqs": 9, "max_model_len": -1, "warmup": "all", "enable_prefix_caching": True, "decode_buckets": [3]}
    asked["token_buckets"] = [64]
    assert options(plan(options=asked), max_position=77) == {
        **asked,
        "decode_buckets": (3,),
        "token_buckets": (64,),
        "max_num_prefill_tokens": 8192,  # as many as with decodes on so many GPUs: all steps have one limit
        "model": "some/model",
        "max_model_len": 77,
        "skip_tokenizer_init": True,
        "tensor_parallel_size": 4,
    }
