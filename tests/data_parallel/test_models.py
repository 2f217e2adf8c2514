"""Mixtures of every kind over data-parallel ranks of one and of two devices."""

from dataclasses import replace

import numpy as np
import pytest

from jaxllm.kernel_policy import CPU
from jaxllm.parallel import exchange
from tests.helpers import engines, goldens
from tests.helpers.parity import check

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "num_ranks", "size"),
    [
        ("deepseek_v3", 4, 1),  # latents, a shared expert, a dense layer
        ("gpt_oss", 5, 1),  # an expert on each device, with biases; windows
        ("qwen3_next", 2, 2),  # states by row
    ],
)
def test_ranks(name, num_ranks, size):
    core = engines.make_core(name, data_parallel_size=num_ranks, tensor_parallel_size=size, enable_expert_parallel=True)
    check(name, core)
    core.shutdown()


def test_tokens_that_are_sent(monkeypatch):
    """Steps of prompts send their tokens to experts that move, and compute them in rounds. Where there is little room: test_exchange.py."""
    monkeypatch.setattr(exchange.RankExchange, "capacity", lambda self, num_tokens, k: 64 if num_tokens > 32 else None)
    options = {"enable_eplb": True, "eplb_config": {"step_interval": 6, "num_redundant_experts": 4}}
    policy = replace(CPU, max_tokens_at_once=50)
    core = engines.make_core("qwen3_moe", kernel_policy=policy, data_parallel_size=4, enable_expert_parallel=True, **options)
    check("qwen3_moe", core)
    core.shutdown()


def test_means_of_prompts_and_vectors_of_tokens(tmp_path):
    """Prompts in several steps, more of them in one rank than in the other."""
    options = {
        "model": str(goldens.of_one_layer("qwen3_moe", tmp_path)),
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
