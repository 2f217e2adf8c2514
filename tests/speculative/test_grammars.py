"""Drafts under grammars: the tokens are those without drafts, and drafts are accepted."""

import json
import re
from collections.abc import Iterator

import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.acceptance import Acceptance
from jaxllm.speculative.control import AdaptiveControl
from jaxllm.structured_outputs import StructuredOutputsParams
from tests.helpers.scheduling import make_request

NAMES = ["name", "age", "size"]
SCHEMA = {"type": "array", "items": {"enum": NAMES}, "minItems": 6, "maxItems": 9}
PROMPT = json.dumps(NAMES * 3, separators=(",", ":"))
FORMS = {
    "json": StructuredOutputsParams(json=SCHEMA),
    "regex": StructuredOutputsParams(regex=r'(\["(name|age)",){6,8}[a-z]{4,12}'),
    "choice": StructuredOutputsParams(choice=['"name","age","size"', '"name","age","name"']),
    "plain": None,
}
SAMPLING = {
    "greedy": {"temperature": 0.0},
    "penalties": {"temperature": 0.7, "seed": 6, "frequency_penalty": 0.1, "logprobs": 3},
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    config = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 128}
    few = {"decode_buckets": (4,), "token_buckets": (64,)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AdaptiveControl, "note_seconds", lambda *args: None)  # steps without drafts may be faster here
        llm = LLM("demo", speculative_config=config, use_progress_bar=False, **sizes, **few)
        yield llm
        llm.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLING)
def test_the_tokens_are_those_without_drafts_and_drafts_are_accepted(llm: LLM, sampling: str) -> None:
    found, num_accepted = {}, {}
    for num_drafts in (0, None):
        params = [
            SamplingParams(
                **SAMPLING[sampling],
                max_tokens=40 if form else 12,  # without a grammar: together with the others
                structured_outputs=form,
                num_speculative_tokens=num_drafts,
            )
            for form in FORMS.values()
        ]
        before = Acceptance.of(llm.llm_engine.core.stats())
        outputs = llm.generate([PROMPT] * len(FORMS), params, use_tqdm=False)
        found[num_drafts] = {name: output.outputs[0] for name, output in zip(FORMS, outputs, strict=True)}
        num_accepted[num_drafts] = (Acceptance.of(llm.llm_engine.core.stats()) - before).num_accepted_tokens
    assert num_accepted[0] == 0 < num_accepted[None]
    for name, answer in found[0].items():
        assert found[None][name].token_ids == answer.token_ids, name
        assert found[None][name].finish_reason == answer.finish_reason
        for with_drafts, without in zip(found[None][name].logprobs or [], answer.logprobs or [], strict=True):
            assert {token: entry.logprob for token, entry in with_drafts.items()} == pytest.approx(
                {token: entry.logprob for token, entry in without.items()}, abs=1e-4
            )
    json.loads(found[None]["json"].text)
    assert re.match(r'(\["(name|age)",){6}', found[None]["regex"].text)


@pytest.mark.slow
def test_drafts_save_steps_under_a_grammar(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, structured_outputs=FORMS["json"])
    runner = llm.llm_engine.core.runner
    num_before = runner.num_steps
    [output] = llm.generate([PROMPT], params, use_tqdm=False)
    assert runner.num_steps - num_before < len(output.outputs[0].token_ids)


def test_drafts_that_are_accepted_whatever_they_are_are_none_under_a_grammar() -> None:
    control = AdaptiveControl(3, 0, most_drafts=lambda num_running: 3, with_grammars=False)
    plain, masked = make_request("plain", 4), make_request("masked", 4)
    masked.matcher = NothingDone()
    assert (control.of(plain), control.of(masked)) == (3, 0)


class NothingDone:
    """An output that goes on."""

    is_done = False

    def advance(self, token_id: int) -> None:
        """Any token is allowed."""
