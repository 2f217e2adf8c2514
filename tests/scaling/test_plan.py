"""The work of each size."""

import dataclasses
import json

import pytest

from jaxllm.errors import ConfigError
from jaxllm.scaling.engine_options import engine_options, longest_request
from jaxllm.scaling.plan import Plan, check_sizes, mixed_requests, powers_of_two
from jaxllm.scaling.rows import to_json
from tests.scaling.samples import PLAN


def test_weak_scaling_adds_the_batch_sizes_that_it_needs() -> None:
    assert PLAN.decode_batches(1) == [1, 8]
    assert PLAN.decode_batches(4) == [1, 4, 8, 32]
    assert dataclasses.replace(PLAN, scalings=("strong",)).decode_batches(4) == [1, 8]
    assert dataclasses.replace(PLAN, scalings=("weak",)).decode_batches(4) == [4, 32]
    assert dataclasses.replace(PLAN, works=("prefill",)).decode_batches(4) == []
    assert PLAN.largest_batch() == 32


def test_sizes_that_have_no_devices_are_refused_with_those_that_have() -> None:
    check_sizes((1, 2), 2, where="this machine")
    with pytest.raises(ConfigError, match="size 4, 8 needs more devices than the 2 of this machine; .*sizes 1,2$"):
        check_sizes((1, 2, 4, 8), 2, where="this machine")


def test_powers_of_two() -> None:
    assert [powers_of_two(n) for n in (1, 2, 3, 8)] == [(1,), (1, 2), (1, 2), (1, 2, 4, 8)]


def test_the_mix_is_the_same_each_time() -> None:
    mix = mixed_requests(300, 64, 16)
    assert mix == mixed_requests(300, 64, 16) and len(set(mix)) > 100
    assert {16, 128} >= {min(p for p, _ in mix), max(p for p, _ in mix)} and min(o for _, o in mix) >= 4


def test_a_plan_survives_json() -> None:
    plan = dataclasses.replace(PLAN, requests=((3, 4), (5, 6)))
    assert Plan.from_json(json.loads(json.dumps(to_json(plan)))) == plan
    with pytest.raises(ConfigError, match="Plan: Object missing required field"):
        Plan.from_json({"model": "x"})


def test_only_results_of_the_same_experiment_are_joined() -> None:
    other = dataclasses.replace(PLAN, tensor_parallel_sizes=(8,), batch_sizes=(8, 16), works=("decode", "mixed"))
    joined = PLAN.joined(other)
    assert joined.tensor_parallel_sizes == (1, 2, 4, 8) and joined.batch_sizes == (1, 8, 16)
    assert joined.works == ("decode", "prefill", "mixed")
    with pytest.raises(ConfigError, match="input_len is 16 here and 17 there"):
        PLAN.joined(dataclasses.replace(PLAN, input_len=17))


def options(plan: Plan, *, on_gpu: bool = True, max_position: int = 100_000) -> dict:
    return engine_options(plan, 4, on_gpu=on_gpu, device_bytes=100 << 30, max_position=max_position)


def test_the_engine_has_what_the_work_needs() -> None:
    plan = dataclasses.replace(PLAN, options={"load_format": "dummy"})
    found = options(plan)
    assert (found["max_num_seqs"], found["decode_buckets"]) == (32, (8, 32))
    assert found["token_buckets"] == (16, 1024, 8192)  # a prompt, the 1024 tokens of the whole prefill, a whole step
    assert found["max_model_len"] == longest_request(plan, 8192) > plan.input_len + plan.output_len
    assert options(plan, on_gpu=False)["decode_buckets"] == (1, 4, 8, 32)
    assert options(plan, max_position=20)["max_model_len"] == 20


def test_mixed_work_runs_as_in_service() -> None:
    plan = dataclasses.replace(PLAN, works=("mixed",), requests=((50, 7), (10, 90)), options={})
    found = options(plan)
    assert found["max_num_seqs"] == 1024 and "decode_buckets" not in found and "token_buckets" not in found
    assert found["max_model_len"] == 100


def test_what_somebody_set_is_kept() -> None:
    asked = {"max_num_seqs": 9, "max_model_len": -1, "warmup": "all", "enable_prefix_caching": True, "decode_buckets": (3,)}
    asked["token_buckets"] = (64,)
    found = options(dataclasses.replace(PLAN, options=asked), max_position=77)
    assert found == {
        **asked,
        "max_num_prefill_tokens": 8192,  # as many as with decodes on so many GPUs: all steps have one limit
        "model": "some/model",
        "max_model_len": 77,
        "skip_tokenizer_init": True,
        "tensor_parallel_size": 4,
    }
