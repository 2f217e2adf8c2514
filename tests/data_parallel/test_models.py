"""Mixtures of every kind over data-parallel ranks of one and of two devices, in a pool that is too small for all requests."""

from dataclasses import replace

import numpy as np
import pytest

from jaxllm.kernel_policy import CPU
from jaxllm.parallel import exchange
from tests.helpers import engines
from tests.helpers.parity import check

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "num_ranks", "size", "options"),
    [
        ("qwen3_moe", 2, 2, {"num_gpu_blocks_override": 9}),
        ("mixtral", 5, 1, {}),  # an expert on each device
        ("deepseek_v3", 4, 1, {}),  # latents, a shared expert, a dense layer
        ("gpt_oss", 5, 1, {}),  # experts with biases, windows
        ("qwen3_next", 2, 2, {}),  # states by row
    ],
)
def test_ranks(name, num_ranks, size, options):
    core = engines.make_core(
        name, data_parallel_size=num_ranks, tensor_parallel_size=size, enable_expert_parallel=True, **options
    )
    check(name, core)
    assert "num_gpu_blocks_override" not in options or core.stats().num_preemptions > 0
    core.shutdown()


@pytest.mark.parametrize(
    ("capacity", "options"),
    [(8, {}), (64, {"enable_eplb": True, "eplb_config": {"step_interval": 6, "num_redundant_experts": 4}})],
    ids=["overflowing", "to experts that move"],
)
def test_tokens_that_are_sent(monkeypatch, capacity, options):
    """Steps of prompts send their tokens, and compute them in rounds; where there is little room, most gather after all."""
    monkeypatch.setattr(exchange.RankExchange, "capacity", lambda self, num_tokens, k: capacity if num_tokens > 32 else None)
    policy = replace(CPU, max_tokens_at_once=50)
    core = engines.make_core("qwen3_moe", kernel_policy=policy, data_parallel_size=4, enable_expert_parallel=True, **options)
    check("qwen3_moe", core)
    core.shutdown()


def test_means_of_prompts_and_vectors_of_tokens():
    """Prompts in several steps, more of them in one rank than in the other."""
    options = {
        "runner": "pooling",
        "pooler_config": {"pooling_type": "mean"},
        "max_num_batched_tokens": 24,
        "token_buckets": (24,),
    }
    found = []
    for ranks in ({}, {"data_parallel_size": 2, "enable_expert_parallel": True}):
        core = engines.make_core("qwen3_moe", **options, **ranks)
        prompts = [[(i + 3 * j) % 90 for j in range(length)] for i, length in enumerate((1, 30, 9, 60, 25))]
        requests = [engines.pooling_request(str(i), prompt, skip_reading_prefix_cache=True) for i, prompt in enumerate(prompts)]
        requests.append(engines.pooling_request("tokens", prompts[3], task="token_embed", skip_reading_prefix_cache=True))
        found.append({name: answer.pooled for name, answer in engines.run(core, requests).items()})
        core.shutdown()
    of_one, of_ranks = found
    for name, expected in of_one.items():
        np.testing.assert_allclose(of_ranks[name], expected, atol=2e-5, err_msg=name)
