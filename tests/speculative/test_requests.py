"""Requests choose how many drafts they get, and no token depends on it."""

from collections.abc import Iterator
from typing import Any

import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.acceptance import Acceptance

pytestmark = pytest.mark.slow

PROMPT = "def get_{0}(self):\n    return self._{0}\n\n"
REPETITIVE = "".join(PROMPT.format(name) for name in ("name", "age", "size", "name"))
NUM_DRAFTS = 2
SIZES = {"max_num_seqs": 2, "max_model_len": 128, "decode_buckets": (2,), "token_buckets": (64,), "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    config = {"method": "ngram", "num_speculative_tokens": NUM_DRAFTS, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    llm = LLM("demo", speculative_config=config, use_progress_bar=False, **SIZES)
    # Where no step is timed, drafts are never switched off.
    llm.llm_engine.core.scheduler.drafts.note_seconds = lambda num_rows, num_drafts, seconds: None  # type: ignore[attr-defined]
    yield llm
    llm.shutdown()


def test_a_request_gets_at_most_as_many_drafts_as_it_asks_for(llm: LLM) -> None:
    found = {}
    for asked in (None, 0, 1, 99):
        params = SamplingParams(temperature=1.0, seed=1, max_tokens=24, ignore_eos=True, num_speculative_tokens=asked)
        before = Acceptance.of(llm.llm_engine.core.stats())
        [output] = llm.generate(REPETITIVE, params, use_tqdm=False)
        found[asked] = output.outputs[0].token_ids
        drafts = Acceptance.of(llm.llm_engine.core.stats()) - before
        most = NUM_DRAFTS if asked is None else min(asked, NUM_DRAFTS)
        assert drafts.num_draft_tokens <= most * drafts.num_drafts
        assert bool(drafts.num_drafts) == bool(most)
        assert not any(drafts.accepted_per_position[most:])
    assert len({tuple(tokens) for tokens in found.values()}) == 1
    names = {metric.name for metric in llm.get_metrics()}
    assert {"jaxllm:spec_decode_num_drafts", "jaxllm:spec_decode_num_speculative_tokens"} <= names


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.6, "seed": 1, "stop": ["self"]}, {"temperature": 0.6, "n": 2, "seed": 1}],
    ids=["stop string", "two answers"],
)
def test_answers_are_those_without_drafts(llm: LLM, options: dict[str, Any]) -> None:
    """A stop string may end amid the tokens of a step, and the answers of a request each have their own drafts."""
    found = {}
    for asked in (0, None):
        params = SamplingParams(max_tokens=24, ignore_eos=True, num_speculative_tokens=asked, **options)
        before = Acceptance.of(llm.llm_engine.core.stats())
        [output] = llm.generate(REPETITIVE, params, use_tqdm=False)
        found[asked] = [(each.text, each.token_ids, each.finish_reason, each.stop_reason) for each in output.outputs]
        num_accepted = (Acceptance.of(llm.llm_engine.core.stats()) - before).num_accepted_tokens
        assert bool(num_accepted) == (asked is None)
    assert found[None] == found[0]
    assert {reason for _, _, reason, _ in found[0]} == {"stop" if "stop" in options else "length"}
    assert len({text for text, *_ in found[0]}) == options.get("n", 1)
