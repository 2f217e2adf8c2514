"""Beam search on top of an engine that only samples: each step asks for one token of every beam, with its likeliest rivals.

`BeamSearch` is the search and runs nothing itself; `search_beams` drives it for scripts, `search_request` for asyncio programs.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import NamedTuple, TypeVar

from jaxllm import clock
from jaxllm.errors import InvalidRequestError
from jaxllm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from jaxllm.request import FinishReason
from jaxllm.sampling_params import MAX_LOGPROB_TOKEN_IDS, BeamSearchParams, RequestOutputKind, SamplingParams
from jaxllm.text.detokenizer import Detokenizer, text_of
from jaxllm.text.input_processor import ParentRequest
from jaxllm.text.tokenizer import Tokenizer

RunStep = Callable[[list[tuple[int, list[int]]]], list[RequestOutput]]
"""Computes one token after each of some sequences, which are given with the number of their prompt."""
RunTogether = Callable[[list[ParentRequest]], Awaitable[list[RequestOutput]]]
_FAILURES = (str(FinishReason.ABORT), str(FinishReason.ERROR))


@dataclass
class BeamSearchSequence:
    """One answer that the search found."""

    tokens: list[int]
    """Prompt and answer; without the EOS that ended it, unless include_stop_str_in_output."""
    logprobs: list[Mapping[int, Logprob]]
    """Per token of the answer, the EOS too, its own logprob and those of its rivals."""
    cum_logprob: float = 0.0
    text: str | None = None
    """Token ids of prompt and answer."""
    finish_reason: str | None = None
    stop_reason: int | None = None
    """The EOS id, if it is not the tokenizer's first."""


@dataclass
class BeamSearchOutput:
    """The best answers to a prompt, best first."""

    sequences: list[BeamSearchSequence]


@dataclass(frozen=True)
class Beam:
    """An answer while it grows, and when it has ended."""

    tokens: list[int]
    """Prompt and answer, with the EOS that ended it."""
    logprobs: list[Mapping[int, Logprob]]
    cum_logprob: float
    score: float
    ended: bool = False
    """By an EOS."""


class Extension(NamedTuple):
    """A beam with one more token: a candidate that may be discarded."""

    score: float
    beam: Beam
    token_id: int
    rivals: Mapping[int, Logprob]


_Scored = TypeVar("_Scored", Beam, Extension)


class BeamSearch:
    """The search from one prompt: computing one token after each of `prompts` and handing the outputs to `take` is a step.

    `keeps_logprobs`: whether the beams' logprobs will be asked for.
    """

    def __init__(
        self,
        prompt_token_ids: Sequence[int],
        params: BeamSearchParams,
        *,
        eos_token_ids: Sequence[int],
        max_model_len: int,
        keeps_logprobs: bool,
    ):
        self._params = params
        self._max_tokens = min(params.max_tokens, max_model_len - len(prompt_token_ids))
        self._ends = frozenset(() if params.ignore_eos else eos_token_ids)
        self._num_rivals = None if params.allowed_token_ids is not None else _num_rivals(params)
        self._keeps_logprobs = keeps_logprobs
        self._num_steps = 0
        self._growing = [Beam(list(prompt_token_ids), [], 0.0, 0.0)]
        self._ended: list[Beam] = []

    @property
    def prompts(self) -> list[list[int]]:
        """The sequences that need one more token; empty when the search is over."""
        return [beam.tokens for beam in self._growing] if self._num_steps < self._max_tokens else []

    def take(self, outputs: Sequence[RequestOutput]) -> None:
        """Process the outputs of `prompts`."""
        self._num_steps += 1
        norm = self._num_steps**self._params.length_penalty
        ended: list[Extension] = []
        growing: list[Extension] = []
        for beam, output in zip(self._growing, outputs, strict=True):
            logprobs = output.outputs[0].logprobs
            assert logprobs is not None
            for token_id, entry in itertools.islice(logprobs[0].items(), self._num_rivals):
                score = (beam.cum_logprob + entry.logprob) / norm
                (ended if token_id in self._ends else growing).append(Extension(score, beam, token_id, logprobs[0]))
        self._growing = [self._extended(each) for each in self._best(growing)]
        self._ended = self._best([*self._ended, *(self._extended(each, ended=True) for each in self._best(ended))])

    def answers(self) -> list[Beam]:
        """The best, best first."""
        return self._best([*self._ended, *self._growing])

    def _best(self, items: list[_Scored]) -> list[_Scored]:
        return sorted(items, key=attrgetter("score"), reverse=True)[: self._params.beam_width]

    def _extended(self, extension: Extension, *, ended: bool = False) -> Beam:
        score, beam, token_id, rivals = extension
        logprobs = beam.logprobs
        if self._keeps_logprobs:
            logprobs = [*logprobs, _reported(rivals, token_id, self._params.logprobs)]
        return Beam([*beam.tokens, token_id], logprobs, beam.cum_logprob + rivals[token_id].logprob, score, ended)


def search_beams(
    run: RunStep,
    prompts: Sequence[list[int]],
    params: BeamSearchParams,
    *,
    eos_token_ids: Sequence[int],
    max_model_len: int,
    tokenizer: Tokenizer | None,
) -> list[BeamSearchOutput]:
    """Search from several prompts at once. `run` samples by `step_params`."""
    searches = [
        BeamSearch(prompt, params, eos_token_ids=eos_token_ids, max_model_len=max_model_len, keeps_logprobs=True)
        for prompt in prompts
    ]
    while any(wanted := [search.prompts for search in searches]):
        outputs = iter(run([(number, ids) for number, its_prompts in enumerate(wanted) for ids in its_prompts]))
        for search, its_prompts in zip(searches, wanted, strict=True):
            if its_prompts:
                search.take(list(itertools.islice(outputs, len(its_prompts))))
    return [
        BeamSearchOutput([_sequence(beam, params, eos_token_ids, tokenizer) for beam in search.answers()])
        for search in searches
    ]


async def search_request(
    request: ParentRequest,
    run: RunTogether,
    *,
    is_aborted: Callable[[], bool],
    eos_token_ids: Sequence[int],
    max_model_len: int,
    tokenizer: Tokenizer | None,
) -> RequestOutput:
    """The answers to a request with beam_search_params. `run` computes the requests of a step, each of which has one output.

    A step that fails, or is aborted, gives all answers its end. Raises what `run` raises.
    """
    params = request.beam_search_params
    assert params is not None
    search = BeamSearch(
        request.prompt_token_ids,
        params,
        eos_token_ids=eos_token_ids,
        max_model_len=max_model_len,
        keeps_logprobs=params.logprobs is not None,
    )
    metrics = RequestMetrics(arrival_time=request.arrival_time)
    num_cached_tokens, num_preemptions = 0, 0
    failure: CompletionOutput | None = None
    for step in itertools.count():
        if not (prompts := search.prompts):
            break
        if is_aborted():
            failure = CompletionOutput(0, "", [], finish_reason=str(FinishReason.ABORT))
            break
        outputs = await run([step_request(request, step, place, ids) for place, ids in enumerate(prompts)])
        if step == 0 and outputs[0].metrics is not None:
            metrics, num_cached_tokens = replace(outputs[0].metrics), outputs[0].num_cached_tokens
        num_preemptions += sum(output.metrics.num_preemptions for output in outputs if output.metrics is not None)
        failure = next((output.outputs[0] for output in outputs if output.outputs[0].finish_reason in _FAILURES), None)
        if failure is not None:
            break
        search.take(outputs)
    if failure is None:
        beams = search.answers()
        answers = await asyncio.to_thread(_completions, beams, request.prompt_token_ids, params, eos_token_ids, tokenizer)
    else:
        answers = [
            replace(failure, index=index, text="", token_ids=[], cumulative_logprob=None, logprobs=None)
            for index in range(params.beam_width)
        ]
    metrics.finished_time, metrics.num_preemptions = clock.now(), num_preemptions
    metrics.num_generation_tokens = sum(len(answer.token_ids) for answer in answers)
    return RequestOutput(
        request.request_id,
        request.prompt,
        request.prompt_token_ids,
        answers,
        finished=True,
        num_cached_tokens=num_cached_tokens,
        metrics=metrics,
    )


def step_params(params: BeamSearchParams, max_logprobs: int) -> SamplingParams:
    """Sampling parameters of one step. Raises InvalidRequestError for a search that this `max_logprobs` does not allow."""
    if params.temperature != 0:
        raise InvalidRequestError(
            f"temperature is {params.temperature}, must be 0: beam search ranks answers by the model's own logprobs",
            "temperature",
        )
    options = SamplingParams(
        max_tokens=1,
        temperature=0.0,
        ignore_eos=True,
        detokenize=params.logprobs is not None,  # for the texts of rivals; those of answers are made at the end
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    if (allowed := params.allowed_token_ids) is not None:
        if len(allowed) > MAX_LOGPROB_TOKEN_IDS:
            raise InvalidRequestError(
                f"allowed_token_ids has {len(allowed)} ids, beam search takes at most {MAX_LOGPROB_TOKEN_IDS}; name fewer",
                "allowed_token_ids",
            )
        if params.logprobs:
            raise InvalidRequestError(
                f"logprobs is {params.logprobs}, must be 0 in a beam search with allowed_token_ids, which considers no other "
                "tokens; leave one of them out",
                "logprobs",
            )
        options.allowed_token_ids = options.logprob_token_ids = allowed
        return options
    count = _num_rivals(params)
    if max_logprobs != -1 and count > max_logprobs:
        raise InvalidRequestError(
            f"beam_width is {params.beam_width}, which takes {count} logprobs, but this engine reports at most "
            f"{max_logprobs}; lower it or raise --max-logprobs",
            "beam_width",
        )
    options.logprobs = -1 if params.logprobs == -1 else max(count, params.logprobs or 0)
    return options


def _num_rivals(params: BeamSearchParams) -> int:
    """Number of continuations considered per beam; enough remain if some of them end with EOS."""
    return 2 * params.beam_width


def step_request(search: ParentRequest, step: int, place: int, token_ids: list[int]) -> ParentRequest:
    """The request for one token of one beam. `search` is, in all but its answers, that of the first beam."""
    now = clock.now()
    (first,) = search.children
    options = first.options
    if options.timeout_seconds is not None:
        options = replace(options, timeout_seconds=max(0.0, options.timeout_seconds - (now - search.arrival_time)))
    if step:
        options = replace(options, queue_timeout_seconds=None)  # a search that has begun no longer waits
    # The rest of the id is unique among all requests.
    internal_id = f"{step}.{place}_{search.internal_id}"
    child = replace(
        first,
        request_id=internal_id,
        prompt_token_ids=token_ids,
        arrival_time=now,
        options=options,
    )
    return ParentRequest(search.request_id, internal_id, None, token_ids, child.sampling_params, [child], now)


def _reported(rivals: Mapping[int, Logprob], token_id: int, count: int | None) -> Mapping[int, Logprob]:
    """The logprobs of a token and of the `count` likeliest at its place (-1 or None: of all that are known)."""
    if count is None:
        return rivals
    likeliest = sorted(rivals.items(), key=lambda item: item[1].logprob, reverse=True)
    return {token_id: rivals[token_id], **dict(likeliest if count == -1 else likeliest[:count])}


def _stop_reason(beam: Beam, eos_token_ids: Sequence[int]) -> int | None:
    return beam.tokens[-1] if beam.ended and beam.tokens[-1] != eos_token_ids[0] else None


def _finish_reason(beam: Beam) -> str:
    return str(FinishReason.STOP if beam.ended else FinishReason.LENGTH)


def _sequence(
    beam: Beam, params: BeamSearchParams, eos_token_ids: Sequence[int], tokenizer: Tokenizer | None
) -> BeamSearchSequence:
    drops_eos = beam.ended and not params.include_stop_str_in_output
    tokens = beam.tokens[:-1] if drops_eos else beam.tokens
    text = None if tokenizer is None else text_of(tokenizer, tokens, skip_special_tokens=params.skip_special_tokens)
    return BeamSearchSequence(
        tokens, beam.logprobs, beam.cum_logprob, text, _finish_reason(beam), _stop_reason(beam, eos_token_ids)
    )


def _completions(
    beams: Sequence[Beam],
    prompt_token_ids: list[int],
    params: BeamSearchParams,
    eos_token_ids: Sequence[int],
    tokenizer: Tokenizer | None,
) -> list[CompletionOutput]:
    """Answers as sampled ones are reported: an EOS is among the ids, and in the text only with include_stop_str_in_output."""
    options = SamplingParams(
        skip_special_tokens=params.skip_special_tokens, include_stop_str_in_output=params.include_stop_str_in_output
    )
    answers = []
    for index, beam in enumerate(beams):
        token_ids = beam.tokens[len(prompt_token_ids) :]
        text = Detokenizer(tokenizer, prompt_token_ids, options)
        for token_id in token_ids[:-1] if beam.ended else token_ids:
            text.push(token_id)
        if beam.ended:
            text.push_stop_token(token_ids[-1])
        text.finish()
        answers.append(
            CompletionOutput(
                index,
                text.text,
                token_ids,
                beam.cum_logprob,
                None if params.logprobs is None else [dict(position) for position in beam.logprobs],
                _finish_reason(beam),
                _stop_reason(beam, eos_token_ids),
            )
        )
    return answers
