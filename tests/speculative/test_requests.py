"""Requests choose how many drafts they get, and no token depends on it."""

from collections.abc import Iterator

import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.acceptance import Acceptance

PROMPT = "def get_{0}(self):\n    return self._{0}\n\n"
NUM_DRAFTS = 3


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    config = {"method": "ngram", "num_speculative_tokens": NUM_DRAFTS, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    llm = LLM("demo", speculative_config=config, max_num_seqs=1, max_model_len=128, use_progress_bar=False)
    # Where no step is timed, drafts are never switched off.
    llm.llm_engine.core.scheduler.drafts.note_seconds = lambda num_rows, num_drafts, seconds: None  # type: ignore[attr-defined]
    yield llm
    llm.shutdown()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_gets_at_most_as_many_drafts_as_it_asks_for(llm: LLM, temperature: float) -> None:
    prompt = "".join(PROMPT.format(name) for name in ("name", "age", "size", "name"))
    found = {}
    for asked in (None, 0, 1, 99):
        params = SamplingParams(temperature=temperature, seed=1, max_tokens=24, ignore_eos=True, num_speculative_tokens=asked)
        before = Acceptance.of(llm.llm_engine.core.stats())
        [output] = llm.generate(prompt, params, use_tqdm=False)
        found[asked] = output.outputs[0].token_ids
        drafts = Acceptance.of(llm.llm_engine.core.stats()) - before
        most = NUM_DRAFTS if asked is None else min(asked, NUM_DRAFTS)
        assert drafts.num_draft_tokens <= most * drafts.num_drafts
        assert bool(drafts.num_drafts) == bool(most)
        assert not any(drafts.accepted_per_position[most:])
    assert len({tuple(tokens) for tokens in found.values()}) == 1
    names = {metric.name for metric in llm.get_metrics()}
    assert {"jaxllm:spec_decode_num_drafts", "jaxllm:spec_decode_num_speculative_tokens"} <= names
