"""The requests of a benchmark: random prompts, greedy tokens up to a fixed number, no text."""

from collections.abc import Sequence

import numpy as np

from jaxllm.llm_engine import LLMEngine
from jaxllm.sampling_params import RequestOutputKind, SamplingParams


def random_prompts(lengths: Sequence[int], vocab_size: int, seed: int) -> list[dict[str, list[int]]]:
    """Prompts of so many tokens, none of them among the last 256 of the vocabulary, which may be special."""
    rng = np.random.default_rng(seed)
    num_ids = max(1, vocab_size - 256)
    return [{"prompt_token_ids": rng.integers(0, num_ids, n).tolist()} for n in lengths]


def greedy(num_tokens: int) -> SamplingParams:
    """Exactly so many tokens."""
    return SamplingParams(
        temperature=0.0, ignore_eos=True, max_tokens=num_tokens, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )


def end_all(engine: LLMEngine) -> None:
    """End all requests, and wait for the steps in flight."""
    engine.abort_all()
    while engine.core.has_unfinished_requests():
        engine.core.step()
