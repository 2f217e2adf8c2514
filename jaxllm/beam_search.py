"""Beam search on top of an engine that only samples: each step asks for one token of every beam, with its likeliest rivals."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from jaxllm.errors import InvalidRequestError
from jaxllm.outputs import Logprob, RequestOutput
from jaxllm.sampling_params import MAX_LOGPROB_TOKEN_IDS, BeamSearchParams, SamplingParams
from jaxllm.text.tokenizer import Tokenizer

RunOneToken = Callable[[list[list[int]], SamplingParams], list[RequestOutput]]


@dataclass
class BeamSearchSequence:
    """One answer that the search found."""

    tokens: list[int]
    """Prompt and answer; without the EOS that ended it, unless include_stop_str_in_output."""
    logprobs: list[dict[int, Logprob]]
    """Per token of the answer its own logprob and those of its rivals."""
    cum_logprob: float = 0.0
    text: str | None = None
    """Of prompt and answer."""
    finish_reason: str | None = None
    stop_reason: int | None = None
    """The EOS id, if it is not the tokenizer's first."""

    def score(self, length_penalty: float) -> float:
        """Logprob per token of the answer, EOS counted, if length_penalty is 1."""
        return self.cum_logprob / max(1, len(self.logprobs)) ** length_penalty


@dataclass
class BeamSearchOutput:
    """The best answers to a prompt, best first."""

    sequences: list[BeamSearchSequence]


def search_beams(
    run: RunOneToken,
    prompts: Sequence[list[int]],
    params: BeamSearchParams,
    *,
    eos_token_ids: Sequence[int],
    max_model_len: int,
    max_logprobs: int,
    tokenizer: Tokenizer | None,
) -> list[BeamSearchOutput]:
    """Search from several prompts at once. `run` computes one token after each of some prompts."""
    step_params = _step_params(params, max_logprobs)
    ends = {} if params.ignore_eos else {id: None if place == 0 else id for place, id in enumerate(eos_token_ids)}

    def best(beams: list[BeamSearchSequence]) -> list[BeamSearchSequence]:
        return sorted(beams, key=lambda beam: beam.score(params.length_penalty), reverse=True)[: params.beam_width]

    running = [[BeamSearchSequence(list(prompt), [])] for prompt in prompts]
    done: list[list[BeamSearchSequence]] = [[] for _ in prompts]
    for _ in range(params.max_tokens):
        growing = [beam for beams in running for beam in beams if len(beam.tokens) < max_model_len]
        if not growing:
            break
        outputs = dict(zip(map(id, growing), run([beam.tokens for beam in growing], step_params), strict=True))
        for place, beams in enumerate(running):
            longer = [beam for beam in beams if id(beam) not in outputs]
            for beam in beams:
                if id(beam) not in outputs:
                    continue
                answer = outputs[id(beam)].outputs[0]
                assert answer.logprobs is not None
                for extended, is_done in _extensions(beam, dict(answer.logprobs[0]), params, ends):
                    (done[place] if is_done else longer).append(extended)
            running[place] = best(longer)
    found = []
    for beams, ended in zip(running, done, strict=True):
        for beam in beams:
            beam.finish_reason = "length"
        found.append(BeamSearchOutput(best(ended + beams)))
    for output in found:
        for sequence in output.sequences:
            if tokenizer is not None:
                sequence.text = tokenizer.decode(sequence.tokens, skip_special_tokens=params.skip_special_tokens)
    return found


def _step_params(params: BeamSearchParams, max_logprobs: int) -> SamplingParams:
    """What one step asks for: twice the width, so that enough rivals are left when all but a few end with EOS."""
    if params.temperature != 0:
        raise InvalidRequestError(
            f"temperature is {params.temperature}, must be 0: beam search ranks answers by the model's own logprobs",
            "temperature",
        )
    options = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)
    if (allowed := params.allowed_token_ids) is not None:
        if len(allowed) > MAX_LOGPROB_TOKEN_IDS:
            raise InvalidRequestError(
                f"allowed_token_ids has {len(allowed)} ids, beam search takes at most {MAX_LOGPROB_TOKEN_IDS}",
                "allowed_token_ids",
            )
        options.allowed_token_ids = options.logprob_token_ids = allowed
        return options
    options.logprobs = 2 * params.beam_width
    if max_logprobs != -1 and options.logprobs > max_logprobs:
        raise InvalidRequestError(
            f"beam_width is {params.beam_width}, which takes {options.logprobs} logprobs, but this engine reports at most "
            f"{max_logprobs}; lower it or raise --max-logprobs",
            "beam_width",
        )
    return options


def _extensions(
    beam: BeamSearchSequence, rivals: dict[int, Logprob], params: BeamSearchParams, ends: Mapping[int, int | None]
) -> list[tuple[BeamSearchSequence, bool]]:
    """A beam with each of the next tokens, and whether that one ends it."""
    extended = []
    for token_id, entry in rivals.items():
        is_end = token_id in ends
        keeps_token = not is_end or params.include_stop_str_in_output
        sequence = BeamSearchSequence(
            tokens=[*beam.tokens, token_id] if keeps_token else list(beam.tokens),
            logprobs=[*beam.logprobs, rivals],
            cum_logprob=beam.cum_logprob + entry.logprob,
            finish_reason="stop" if is_end else None,
            stop_reason=ends[token_id] if is_end else None,
        )
        extended.append((sequence, is_end))
    return extended
