import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from jaxllm.beam_search import search_beams
from jaxllm.errors import InvalidRequestError
from jaxllm.llm import LLM
from jaxllm.outputs import CompletionOutput, Logprob, RequestOutput
from jaxllm.sampling_params import BeamSearchParams, SamplingParams
from tests.helpers.fake_front import fake_core

VOCAB, EOS = 4, 3


def model(context: Sequence[int]) -> np.ndarray:
    """A language model: logprobs that depend on the whole context."""
    logits = np.random.default_rng(list(context)).normal(size=VOCAB) * 2
    return logits - math.log(np.exp(logits).sum())


def run(prompts: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
    """One step of every prompt."""
    outputs = []
    for prompt in prompts:
        logprobs = model(prompt)
        wanted = params.logprob_token_ids or np.argsort(-logprobs)[: params.logprobs].tolist()
        row = {int(token): Logprob(float(logprobs[token])) for token in wanted}
        outputs.append(
            RequestOutput(
                "r", None, prompt, [CompletionOutput(0, "", [max(row, key=lambda t: row[t].logprob)], logprobs=[row])], True
            )
        )
    return outputs


def search(params: BeamSearchParams, prompts: Sequence[list[int]] = ([1],), max_model_len: int = 100) -> list[list[list[int]]]:
    found = search_beams(
        run, prompts, params, eos_token_ids=(EOS,), max_model_len=max_model_len, max_logprobs=-1, tokenizer=None
    )
    return [[sequence.tokens for sequence in output.sequences] for output in found]


def all_answers(
    prompt: list[int], length: int, *, allowed: Sequence[int] = range(VOCAB), end: int | None = EOS
) -> list[tuple[float, list[int]]]:
    """Every answer with its logprob per token, best first."""
    scored = []
    for answer in itertools.chain.from_iterable(itertools.product(allowed, repeat=n) for n in range(1, length + 1)):
        if end in answer[:-1] or (answer[-1] != end and len(answer) < length):
            continue
        total = sum(model([*prompt, *answer[:place]])[token] for place, token in enumerate(answer))
        kept = answer[:-1] if answer[-1] == end else answer
        scored.append((total / len(answer), [*prompt, *kept]))
    return sorted(scored, reverse=True)


@pytest.mark.parametrize("prompt", [[1], [2, 0], [0]])
def test_a_wide_beam_finds_the_best_answers_of_all(prompt: list[int]) -> None:
    expected = [tokens for _, tokens in all_answers(prompt, 4)]
    width = VOCAB**4
    assert search(BeamSearchParams(width, 4), [prompt])[0][:20] == expected[:20]


def test_several_prompts_are_searched_at_once() -> None:
    both = search(BeamSearchParams(3, 5), [[1], [2, 2]])
    assert both == [search(BeamSearchParams(3, 5), [prompt])[0] for prompt in ([1], [2, 2])]
    assert all(len(sequences) == 3 for sequences in both)


def test_a_beam_of_one_is_greedy() -> None:
    tokens = [1]
    for _ in range(5):
        tokens.append(int(np.argmax(model(tokens))))
    assert search(BeamSearchParams(1, 5, ignore_eos=True))[0][0] == tokens


def test_eos_ends_an_answer_and_is_left_out() -> None:
    (output,) = search_beams(
        run, [[1]], BeamSearchParams(8, 3), eos_token_ids=(9, EOS), max_model_len=100, max_logprobs=-1, tokenizer=None
    )
    ended = [sequence for sequence in output.sequences if sequence.finish_reason == "stop"]
    assert ended and all(EOS not in sequence.tokens and sequence.stop_reason == EOS for sequence in ended)
    assert all(
        sequence.finish_reason == "length" and len(sequence.tokens) == 4
        for sequence in output.sequences
        if sequence not in ended
    )
    with_eos = search(BeamSearchParams(8, 3, include_stop_str_in_output=True))[0]
    assert any(tokens[-1] == EOS for tokens in with_eos)
    assert any(EOS in tokens[:-1] for tokens in search(BeamSearchParams(8, 3, ignore_eos=True))[0])


def test_a_length_penalty_favours_long_answers() -> None:
    lengths = [np.mean([len(t) for t in search(BeamSearchParams(4, 6, length_penalty=p))[0]]) for p in (-3.0, 0.0, 3.0)]
    assert lengths[0] <= lengths[1] <= lengths[2] and lengths[0] < lengths[2]


def test_only_allowed_tokens_are_used() -> None:
    expected = [tokens for _, tokens in all_answers([1], 3, allowed=(0, 2), end=None)]
    assert search(BeamSearchParams(8, 3, allowed_token_ids=[0, 2]))[0] == expected


def test_answers_end_where_the_model_does() -> None:
    assert max(len(tokens) for tokens in search(BeamSearchParams(4, 50, ignore_eos=True), max_model_len=6)[0]) == 6


def test_what_cannot_be_searched_is_a_clear_error(model_directory: Path) -> None:
    core = fake_core(model_directory)
    llm = LLM.from_config(core.config, core=core)
    with pytest.raises(InvalidRequestError, match="beam_width is 11, which takes 22 logprobs.*--max-logprobs"):
        llm.beam_search("hi", BeamSearchParams(11, 5))
    with pytest.raises(InvalidRequestError, match="temperature is 0.5, must be 0"):
        llm.beam_search("hi", BeamSearchParams(2, 5, temperature=0.5))
    with pytest.raises(InvalidRequestError, match="at most 128"):
        llm.beam_search("hi", BeamSearchParams(2, 5, allowed_token_ids=list(range(200))))
    with pytest.raises(InvalidRequestError, match="prompt is empty"):
        llm.beam_search("", BeamSearchParams(2, 5))


def test_through_an_llm_answers_have_text(model_directory: Path) -> None:
    core = fake_core(model_directory)
    llm = LLM.from_config(core.config, core=core)
    for output in llm.beam_search(["hi", {"prompt": "ho"}], BeamSearchParams(2, 3)):
        assert len(output.sequences) == 2
        best = output.sequences[0]
        assert best.text == llm.get_tokenizer().decode(best.tokens, skip_special_tokens=True)
    assert all(request.sampling_params.max_tokens == 1 for request in core.requests)
