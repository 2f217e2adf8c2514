"""Real engines as replicas: the tokens of one engine, and prefixes that are found where they were computed."""

import pytest

from jaxllm import LLM, SamplingParams
from tests.helpers import goldens
from tests.helpers.engines import SMALL

pytestmark = pytest.mark.slow


def test_tokens_are_those_of_one_engine() -> None:
    """Greedy, seeded, with logprobs, several answers."""
    model = str(goldens.golden("llama_gqa").directory)
    options = {**SMALL, "model": model, "dtype": "float32", "disable_log_stats": False}
    options["warmup"] = "lazy"  # idle engine processes would compile what nothing here needs
    prompts = [{"prompt_token_ids": [3 + (7 * row + 5 * place) % 90 for place in range(9 + 5 * row)]} for row in range(10)]
    params = [
        SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0 if row % 2 else 0.8, seed=row, n=2 - row % 2, logprobs=1)
        for row in range(len(prompts))
    ]
    found = {}
    for num_replicas in (1, 2):
        llm = LLM(data_parallel_size=num_replicas, **options)
        try:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found[num_replicas] = [[answer.token_ids for answer in output.outputs] for output in outputs]
            if num_replicas == 1:
                continue
            # 48 tokens are three blocks: whoever computed them computes what begins with them.
            prefix = [3 + place % 50 for place in range(48)]
            one = SamplingParams(max_tokens=1, temperature=0.0)
            for row in range(6):
                [output] = llm.generate([{"prompt_token_ids": [*prefix, 60 + row]}], one, use_tqdm=False)
                assert output.num_cached_tokens == (48 if row else 0)
            served = [stats.prefix_cache_queries for stats, _ in llm.llm_engine.core._core.loads()]  # type: ignore[attr-defined]
            assert all(served), f"a replica had nothing to do: {served}"
            llm.check_integrity()
        finally:
            llm.shutdown()
    assert found[2] == found[1]
