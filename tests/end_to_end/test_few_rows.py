"""Engines of fewer requests at a time than their smallest program of a decode has rows, as on a GPU: their outputs are the same."""

from dataclasses import replace
from typing import Any

import pytest

from jaxllm.kernel_policy import CPU
from jaxllm.progress import Progress
from jaxllm.runner.programs.key import ProgramKey
from tests.helpers.core_client import make_prompts
from tests.helpers.engines import make_core, request, run
from tests.helpers.slow import slow_except

ROWS = 8
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
CASES: list[list[Any]] = [
    ["qwen3", {}],
    ["qwen3", {"async_scheduling": False, "pipeline_parallel_size": 2}],
    ["qwen3_next", {}],  # states by row, of which all padding rows have one
    ["llama_gqa", {"speculative_config": NGRAM}],
]


@pytest.mark.parametrize("case", slow_except(CASES[:1], CASES), ids=str)
def test_padding_rows_that_outnumber_all_requests_change_nothing(case: list[Any]) -> None:
    name, options = case
    prompts = make_prompts(3)
    answers = []
    for policy, sizes in ((CPU, (2,)), (replace(CPU, decode_rows=(ROWS,), rows_apart=(ROWS,)), None)):
        core = make_core(name, kernel_policy=policy, max_num_seqs=2, decode_buckets=sizes, warmup="lazy", **options)
        requests = [request(f"r{i}", prompt, max_tokens=6, logprobs=2 if i == 2 else None) for i, prompt in enumerate(prompts)]
        if not hasattr(core.runner, "stages"):  # for logprobs; steps do without while they are not there
            apart = [ProgramKey("forward_rows", size) for size in core.runner.buckets.rows_apart]
            core.runner.programs.compile_all(apart, Progress())
        found = run(core, requests)
        answers.append([found[each.request_id] for each in requests])
        for runner in getattr(core.runner, "stages", (core.runner,)):
            kinds = {(key.kind, key.size) for key in runner.programs._compiled}
            assert sizes or {size for kind, size in kinds if kind in ("decode", "forward_rows")} == {ROWS}, kinds
        core.shutdown()
    for wanted, found in zip(*answers, strict=True):
        assert found.tokens == wanted.tokens
    assert found.token_logprobs.logprobs == pytest.approx(wanted.token_logprobs.logprobs, abs=1e-5)
