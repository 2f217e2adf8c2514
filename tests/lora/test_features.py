"""Requests of every kind with an adapter get the tokens that a model has with the same adapter merged into its weights."""

from collections.abc import Iterable
from typing import Any

import pytest

from jaxllm import LLM, LoRARequest, SamplingParams
from tests.helpers import goldens, peft_files

PROMPTS = [{"prompt_token_ids": [3 + (7 * i + 5 * j) % 110 for j in range(1 + 9 * i)]} for i in range(6)]
KINDS: dict[str, dict[str, Any]] = {  # logprobs: test_parity.py
    "greedy": {"temperature": 0.0},
    "filtered": {"temperature": 0.9, "seed": 4, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "biased": {"temperature": 0.0, "logit_bias": {7: 3.0, 9: -50.0}, "min_tokens": 4, "stop_token_ids": [11]},
    "allowed": {"temperature": 0.0, "allowed_token_ids": list(range(20, 60))},
    "several": {"temperature": 1.0, "seed": 5, "n": 2},
}
OPTIONS = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "use_progress_bar": False,
    "max_model_len": 96,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 32,  # prompts come in chunks
    "token_buckets": [32],
    "decode_buckets": [6],
}


def answers(llm: LLM, adapter: LoRARequest | None, kinds: Iterable[str] = tuple(KINDS)) -> dict[str, list[list[int]]]:
    found = {}
    for kind in kinds:
        sampling = SamplingParams(**{"max_tokens": 14, "ignore_eos": True, "detokenize": False, **KINDS[kind]})
        outputs = llm.generate(PROMPTS, sampling, lora_request=adapter, use_tqdm=False)
        found[kind] = [list(answer.token_ids) for output in outputs for answer in output.outputs]
    return found


@pytest.mark.slow
def test_requests_of_every_kind(tmp_path) -> None:
    """With drafts, and with so few blocks that some are preempted. On several devices: test_parity.py."""
    model, rank = "qwen3", 512
    options: dict[str, Any] = {"num_gpu_blocks_override": 14}
    options["speculative_config"] = {"method": "ngram", "num_speculative_tokens": 1}
    adapter = peft_files.write(tmp_path / "adapter", goldens.FOLDER / model, rank=rank, strength=0.3)
    with LLM(str(goldens.FOLDER / model), enable_lora=True, max_lora_rank=rank, **OPTIONS, **options) as llm:
        found = answers(llm, LoRARequest("adapted", 1, str(adapter)))
        assert found["greedy"] != answers(llm, None, ["greedy"])["greedy"]
        assert llm.llm_engine.core.stats().num_preemptions
        llm.llm_engine.check_integrity()
    merged = peft_files.merged(goldens.FOLDER / model, adapter, tmp_path / "merged")
    with LLM(str(merged), **OPTIONS, num_gpu_blocks_override=60) as llm:
        expected = answers(llm, None)
    for kind, tokens in expected.items():
        assert found[kind] == tokens, kind
