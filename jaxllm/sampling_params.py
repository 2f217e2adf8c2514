"""The sampling parameters of a request, with their validation. Independent of arrays, models and tokenizers."""

import copy
import enum
import math
import numbers
from collections.abc import Collection, Mapping
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Annotated, Any

from jaxllm.errors import InvalidRequestError
from jaxllm.log import warn_once
from jaxllm.sampling_fields import (
    InRequests,
    Range,
    check_plain,
    checked_float,
    checked_int,
    checked_strings,
    checked_token_ids,
    read_fields,
    wrong,
)
from jaxllm.structured_outputs import StructuredOutputsParams

MAX_N = 16384
"""Most answers to one prompt."""
MAX_TEMPERATURE = 1e6
"""Far beyond it 1 / temperature is 0 in float32, which makes NaN of the logits of masked tokens."""
MIN_TEMPERATURE = 0.01
"""Lower temperatures above zero are raised to it: logits divided by less lose the noise's last bits."""
GREEDY_BELOW = 1e-5
"""Temperatures below it mean: take the likeliest token."""
MAX_LOGIT_BIAS = 100.0
MAX_LOGPROB_TOKEN_IDS = 128
MAX_LENGTH_PENALTY = 10.0
"""And its negative the least: powers of any length stay finite."""
MAX_BAD_WORDS = 128
"""Token sequences; a word usually is two of them, with and without the space before it."""
MAX_BAD_WORD_CHARACTERS = 1024
"""Most characters of a word. Longer ones would have too many tokens in any vocabulary; tokenizing them would take time."""
READS_ITSELF = -1
"""The number of arguments of a logits processor that reads numbers and texts itself."""
MAX_BAD_WORD_TOKENS = 16


class RequestOutputKind(enum.Enum):
    """Contents of each RequestOutput of a request."""

    CUMULATIVE = 0  # everything so far
    DELTA = 1  # only what is new
    FINAL_ONLY = 2  # everything, once, at the end


@dataclass(kw_only=True)
class SamplingParams:
    """Sampling

    How to sample the tokens of one request; meanings and defaults are vLLM's. Construction raises InvalidRequestError for
    values that no model could serve and brings the rest into one form (lists, plain numbers, greedy as temperature 0);
    `verify` checks what depends on the model. Fields changed later are not checked again by themselves.
    """

    n: Annotated[int, "answers to each prompt", Range(1, MAX_N), InRequests(passed_on=False)] = 1
    presence_penalty: Annotated[
        float, "subtracted from the logits of tokens already in the output, -2 to 2", Range(-2, 2), InRequests(neutral=(0,))
    ] = 0.0
    frequency_penalty: Annotated[
        float, "subtracted once per occurrence in the output, -2 to 2", Range(-2, 2), InRequests(neutral=(0,))
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        "weakens tokens of the prompt and the output; above 1 discourages, below 1 encourages",
        Range(0, low_open=True),
        InRequests(model_default=True, neutral=(1,)),
    ] = 1.0
    temperature: Annotated[
        float,
        "randomness, at least 0; 0: always the likeliest token",
        Range(0, MAX_TEMPERATURE),
        InRequests(passed_on=False, model_default=True, neutral=(0,)),
    ] = 1.0
    top_p: Annotated[
        float,
        "sample from the likeliest tokens that together have this probability",
        Range(0, 1, low_open=True),
        InRequests(passed_on=False, model_default=True, neutral=(1,)),
    ] = 1.0
    top_k: Annotated[
        int,
        "sample from this many likeliest tokens; 0: all",
        Range(-1),
        InRequests(model_default=True, neutral=(0, -1)),
    ] = 0
    min_p: Annotated[
        float,
        "drop tokens less likely than this fraction of the likeliest one's probability",
        Range(0, 1),
        InRequests(model_default=True, neutral=(0,)),
    ] = 0.0
    top_n_sigma: Annotated[
        float,
        "drop tokens whose logit is more than so many standard deviations below the highest; 0: all stay",
        Range(-1),
        InRequests(neutral=(0, -1)),
    ] = 0.0
    seed: Annotated[
        int | None,
        "seed of this request: the same seed gives the same tokens; default: random",
        Range(-(2**63), 2**63 - 1),
        InRequests(neutral=(-1,)),
    ] = None
    stop: Annotated[
        str | list[str] | None,
        "text that ends the output; may be given several times",
        InRequests(passed_on=False, neutral=([],)),
    ] = None
    stop_token_ids: Annotated[list[int] | None, "token ids that end the output", InRequests(neutral=([],))] = None
    ignore_eos: Annotated[bool, "go on after the model's end-of-text token", InRequests()] = False
    max_tokens: Annotated[int | None, "most tokens of each answer; None: as many as the model takes", Range(1)] = 16
    min_tokens: Annotated[int, "tokens before which nothing ends the output", Range(0), InRequests(neutral=(0,))] = 0
    thinking_token_budget: Annotated[
        int | None,
        "tokens of thinking after which the model must answer; default, or -1: no limit",
        Range(-1),
        InRequests(neutral=(-1,)),
    ] = None
    logprobs: Annotated[int | None, "likeliest tokens to report with their logprobs, per output token; -1: all"] = None
    prompt_logprobs: Annotated[int | None, "the same for each prompt token", InRequests(passed_on=False)] = None
    logprob_token_ids: Annotated[list[int] | None, InRequests(passed_on=False)] = None
    """Report the logprobs of exactly these tokens instead of the likeliest."""
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: Annotated[bool, "leave special tokens out of the text", InRequests()] = True
    spaces_between_special_tokens: Annotated[bool, "put spaces between special tokens in the text", InRequests()] = True
    include_stop_str_in_output: Annotated[bool, "keep the text that ended the output", InRequests()] = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: Annotated[int | None, Range(1), InRequests(passed_on=False)] = None
    """Output tokens between two RequestOutputs."""
    logit_bias: Annotated[
        dict[int, float] | None, "JSON object of token id to a number added to its logit", InRequests(neutral=({},))
    ] = None
    allowed_token_ids: Annotated[list[int] | None, "the only token ids that may be sampled", InRequests()] = None
    bad_words: Annotated[list[str] | None, "words that may not appear in the output", InRequests(neutral=([],))] = None
    bad_words_token_ids: list[list[int]] | None = field(default=None, repr=False)
    """Filled by the process that has the tokenizer."""
    extra_args: Annotated[dict[str, Any] | None, InRequests(neutral=({},))] = None
    """Custom logits processors to apply, by name, with their arguments: {name: [floats]}."""
    num_speculative_tokens: Annotated[int | None, Range(0), InRequests(neutral=(0,))] = None
    """Most drafts that each step verifies for this request, where the engine has a speculative_config; None, or more than that has: as
    many as that has. With exact acceptance, no token depends on it."""
    skip_reading_prefix_cache: bool | None = None
    repetition_detection: Annotated[dict[str, int] | None, InRequests()] = None
    """End the output when it closes with min_count equal runs of min_pattern_size to max_pattern_size tokens (these keys)."""
    structured_outputs: Annotated[StructuredOutputsParams | None, InRequests()] = None
    """The form that the output must have; a dict of its fields is taken too."""
    guided_decoding: StructuredOutputsParams | None = field(default=None, repr=False)
    """The older name of `structured_outputs`, which gets its value."""

    def __post_init__(self) -> None:
        if self.guided_decoding is not None:
            if self.structured_outputs is not None:
                raise InvalidRequestError(
                    "guided_decoding is the older name of structured_outputs; give one", "guided_decoding"
                )
            self.structured_outputs, self.guided_decoding = self.guided_decoding, None
        if self.structured_outputs is not None:
            self.structured_outputs = StructuredOutputsParams.of(self.structured_outputs)
        check_plain(self, FIELDS)
        self._simplify()
        self._check_tokens()
        self._check_agreement()

    def _simplify(self) -> None:
        self.top_k, self.top_n_sigma = max(0, self.top_k), max(0.0, self.top_n_sigma)
        if self.seed == -1:
            self.seed = None
        if self.thinking_token_budget == -1:
            self.thinking_token_budget = None
        self.logprobs = _logprob_count("logprobs", self.logprobs)
        self.prompt_logprobs = _logprob_count("prompt_logprobs", self.prompt_logprobs)
        self.repetition_detection = _repetition_detection(self.repetition_detection)
        if self.is_greedy:
            self.temperature, self.top_p, self.top_k, self.min_p, self.top_n_sigma = 0.0, 1.0, 0, 0.0, 0.0
        elif self.temperature < MIN_TEMPERATURE:
            warn_once(f"temperatures between 0 and {MIN_TEMPERATURE}, the lowest above 0, are raised to it")
            self.temperature = MIN_TEMPERATURE
        if not isinstance(self.output_kind, RequestOutputKind):
            raise wrong("output_kind", self.output_kind, "a RequestOutputKind")
        if self.skip_reading_prefix_cache is None:
            # A cached prompt token has no logits to report.
            self.skip_reading_prefix_cache = self.prompt_logprobs is not None

    def _check_tokens(self) -> None:
        self.stop = checked_strings("stop", [self.stop] if isinstance(self.stop, str) else self.stop)
        self.bad_words = checked_strings("bad_words", self.bad_words)
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise InvalidRequestError(
                f"bad_words has {len(self.bad_words)} words, at most {MAX_BAD_WORDS} are possible", "bad_words"
            )
        if (longest := max(map(len, self.bad_words), default=0)) > MAX_BAD_WORD_CHARACTERS:
            raise InvalidRequestError(
                f"bad_words has a word of {longest} characters, at most {MAX_BAD_WORD_CHARACTERS} are possible", "bad_words"
            )
        self.stop_token_ids = list(dict.fromkeys(checked_token_ids("stop_token_ids", self.stop_token_ids)))
        for name in ("allowed_token_ids", "logprob_token_ids"):
            if getattr(self, name) is not None:
                setattr(self, name, checked_token_ids(name, getattr(self, name)))
                if not getattr(self, name):
                    raise InvalidRequestError(f"{name} is empty; name at least one token id or leave it out", name)
        if self.bad_words_token_ids is not None:
            self.bad_words_token_ids = [checked_token_ids("bad_words_token_ids", ids) for ids in self.bad_words_token_ids]
            if not all(self.bad_words_token_ids):
                raise InvalidRequestError("bad_words_token_ids holds an empty sequence", "bad_words_token_ids")
        self.logit_bias = _logit_bias(self.logit_bias)
        if self.extra_args is not None and not (
            isinstance(self.extra_args, Mapping) and all(isinstance(name, str) for name in self.extra_args)
        ):
            raise wrong("extra_args", self.extra_args, "a dict of names to arguments")

    def _check_agreement(self) -> None:
        if self.is_greedy and self.n > 1:
            raise InvalidRequestError(
                f"n is {self.n}, must be 1 when temperature is 0: greedy sampling gives the same answer each time; "
                "raise temperature or ask for one",
                "n",
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {self.min_tokens}, must be at most max_tokens, which is {self.max_tokens}", "min_tokens"
            )
        if self.stop and not self.detokenize:
            raise InvalidRequestError("stop needs detokenize=True: stop strings are found in the text", "stop")
        if self.logprob_token_ids is not None:
            count = len(self.logprob_token_ids)
            if count > MAX_LOGPROB_TOKEN_IDS:
                raise InvalidRequestError(
                    f"logprob_token_ids has {count} ids, at most {MAX_LOGPROB_TOKEN_IDS} are reported", "logprob_token_ids"
                )
            if self.logprobs is not None and self.logprobs != count:
                raise InvalidRequestError(
                    f"logprobs is {self.logprobs}, must be {count}, the number of logprob_token_ids, or left out", "logprobs"
                )

    @classmethod
    def from_optional(cls, **values: Any) -> "SamplingParams":
        """Construct from values of which None means: the default."""
        return cls(**{name: value for name, value in values.items() if value is not None})

    def clone(self) -> "SamplingParams":
        """A copy that shares no list or dict with this one."""
        other = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, (list, dict, set)):  # the rest cannot change; one copy is made for every request
                setattr(other, name, value.copy() if name in _FLAT else copy.deepcopy(value))
        return other

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, without any draw."""
        return self.temperature < GREEDY_BELOW

    def verify(
        self,
        *,
        vocab_size: int,
        max_model_len: int,
        max_logprobs: int,
        num_prompt_tokens: int,
        processors: Mapping[str, int] | None = None,
    ) -> None:
        """Raise InvalidRequestError for what this model and engine cannot serve.

        `max_logprobs` -1: no limit. `processors`: the registered logits processors and how many arguments each takes.
        Prompt and max_tokens together may exceed max_model_len: the output then ends there.
        """
        room = max_model_len - num_prompt_tokens
        if room < 1:
            raise InvalidRequestError(
                f"prompt has {num_prompt_tokens} tokens, the model takes {max_model_len} with at least 1 of output; "
                "shorten it or raise --max-model-len",
                "prompt",
            )
        if self.min_tokens > room:
            raise InvalidRequestError(
                f"min_tokens is {self.min_tokens}, but after a prompt of {num_prompt_tokens} tokens only {room} of "
                f"{max_model_len} are left; lower it or raise --max-model-len",
                "min_tokens",
            )
        self.verify_logprobs(max_logprobs, vocab_size)
        self._verify_token_ids(vocab_size)
        self.verify_processors(processors or {})

    def verify_logprobs(self, max_logprobs: int, vocab_size: int | None = None) -> None:
        """Raise InvalidRequestError if more logprobs are asked for than an engine reports, as far as that can be known."""
        limit = vocab_size if max_logprobs == -1 else max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is None or limit is None or (name == "logprobs" and self.logprob_token_ids is not None):
                continue  # named ids have a limit of their own
            if count == -1 and vocab_size is not None and limit < vocab_size:
                raise InvalidRequestError(
                    f"{name} is -1, the whole vocabulary of {vocab_size}, but this engine reports at most {max_logprobs}; "
                    "ask for fewer or start it with --max-logprobs -1",
                    name,
                )
            if count > limit:
                raise InvalidRequestError(
                    f"{name} is {count}, but this engine reports at most {limit}; ask for fewer or raise --max-logprobs", name
                )

    def _verify_token_ids(self, vocab_size: int) -> None:
        sequences = self.bad_words_token_ids or []
        if len(sequences) > MAX_BAD_WORDS:
            raise InvalidRequestError(
                f"bad_words makes {len(sequences)} token sequences, at most {MAX_BAD_WORDS} are possible "
                "(a word counts twice if it differs after a space)",
                "bad_words",
            )
        longest = max(map(len, sequences), default=0)
        if longest > MAX_BAD_WORD_TOKENS:
            raise InvalidRequestError(
                f"bad_words has an entry of {longest} tokens, at most {MAX_BAD_WORD_TOKENS} are possible", "bad_words"
            )
        if (num_allowed := len(self.allowed_token_ids or ())) > vocab_size:
            raise InvalidRequestError(
                f"allowed_token_ids has {num_allowed} ids, the vocabulary has {vocab_size}", "allowed_token_ids"
            )
        named: dict[str, Collection[int]] = {
            "stop_token_ids": self.stop_token_ids or [],
            "allowed_token_ids": self.allowed_token_ids or [],
            "logprob_token_ids": self.logprob_token_ids or [],
            "logit_bias": self.logit_bias or {},
            "bad_words": [token for ids in sequences for token in ids],
        }
        for name, ids in named.items():
            if not ids or 0 <= min(ids) <= max(ids) < vocab_size:
                continue
            outside = [token for token in ids if not 0 <= token < vocab_size]
            if outside:
                raise InvalidRequestError(
                    f"{name} has token id{'s' * (len(outside) > 1)} {', '.join(map(str, outside[:10]))}"
                    f"{', …' * (len(outside) > 10)}; the vocabulary has 0 to {vocab_size - 1}",
                    name,
                )

    def verify_processors(self, processors: Mapping[str, int], field: str = "extra_args") -> None:
        """Raise InvalidRequestError for logits processors that are not registered, or that take other arguments.

        `processors`: how many numbers each takes; READS_ITSELF: numbers and texts that it reads in the engine. `field`: the
        request's name of extra_args.
        """
        for name, arguments in (self.extra_args or {}).items():
            if name not in processors:
                known = ", ".join(sorted(processors)) or "none is registered"
                raise InvalidRequestError(f"{field} names {name!r}, which is no logits processor; known: {known}", field)
            if not isinstance(arguments, (list, tuple)):
                raise wrong(f"{field}[{name!r}]", arguments, "a list of numbers", field)
            reads_itself = processors[name] == READS_ITSELF
            for number in arguments:
                if not (reads_itself and isinstance(number, str)):
                    checked_float(f"{field}[{name!r}]", number, param=field)
            if not reads_itself and len(arguments) != processors[name]:
                raise InvalidRequestError(
                    f"{field}[{name!r}] has {len(arguments)} numbers, the processor takes {processors[name]}", field
                )


_FLAT = frozenset(("stop", "stop_token_ids", "logit_bias", "allowed_token_ids", "logprob_token_ids", "bad_words"))
"""Lists and dicts of numbers and texts. They may be long."""
FIELDS = read_fields(SamplingParams)
IN_REQUESTS = {name: described.in_requests for name, described in FIELDS.items() if described.in_requests is not None}
"""The fields that requests to a server may set."""
MODEL_DEFAULTS = tuple(name for name, described in IN_REQUESTS.items() if described.model_default)
"""Fields whose default a model's generation_config.json may set; its max_new_tokens is another matter."""


@dataclass
class BeamSearchParams:
    """Beam search

    How to search the likeliest answers to one prompt; the score of an answer is its cumulative logprob divided by
    its length to the power of length_penalty.
    """

    beam_width: Annotated[int, "answers kept at each token, and returned", Range(1)]
    max_tokens: Annotated[int, "most tokens of each answer", Range(1)]
    _: KW_ONLY
    ignore_eos: bool = False
    temperature: Annotated[float, Range(0, MAX_TEMPERATURE)] = 0.0
    length_penalty: Annotated[
        float,
        "above 1 favours long answers, below 1 short ones; -10 to 10",
        Range(-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY),
    ] = 1.0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    allowed_token_ids: list[int] | None = None
    logprobs: int | None = None
    """Likeliest tokens to report with their logprobs, per output token; -1: all. None: for scripts those that the search looked at,
    else none."""
    structured_outputs: InitVar[Any] = None

    def __post_init__(self, structured_outputs: Any) -> None:
        if structured_outputs is not None:
            raise InvalidRequestError(
                "structured_outputs cannot be combined with beam search; sample with SamplingParams", "structured_outputs"
            )
        check_plain(self, _BEAM_FIELDS)
        self.logprobs = _logprob_count("logprobs", self.logprobs)
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = checked_token_ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise InvalidRequestError("allowed_token_ids is empty; name at least one token id", "allowed_token_ids")

    @property
    def n(self) -> int:
        """The number of answers, as SamplingParams calls it."""
        return self.beam_width


_BEAM_FIELDS = read_fields(BeamSearchParams)


def _logprob_count(name: str, value: Any) -> int | None:
    if value is None or value is False:
        return None
    return 1 if value is True else checked_int(name, value, -1)


def _logit_bias(bias: Any) -> dict[int, float] | None:
    if not bias:
        return None
    if not isinstance(bias, Mapping):
        raise wrong("logit_bias", bias, "a dict of token id to number")
    ids, bad = {}, []
    for key in bias:
        try:
            if isinstance(key, (bool, float)):
                raise ValueError
            ids[key] = int(key)
        except (TypeError, ValueError):
            bad.append(key)
    if bad:
        raise InvalidRequestError(f"logit_bias has keys that are no token ids: {', '.join(map(repr, bad))}", "logit_bias")
    clamped = {}
    for key, number in bias.items():
        if isinstance(number, bool) or not isinstance(number, numbers.Real) or math.isnan(number):
            raise wrong(f"logit_bias[{key!r}]", number, "a number", "logit_bias")
        clamped[ids[key]] = max(-MAX_LOGIT_BIAS, min(MAX_LOGIT_BIAS, float(number)))
    return clamped


def _repetition_detection(rule: Any) -> dict[str, int] | None:
    if rule is None:
        return None
    known = {"max_pattern_size", "min_pattern_size", "min_count"}
    if not isinstance(rule, Mapping) or not set(rule) <= known or "max_pattern_size" not in rule or "min_count" not in rule:
        raise wrong("repetition_detection", rule, "a dict with max_pattern_size, min_count and, if wanted, min_pattern_size")
    name = "repetition_detection"
    try:
        smallest = checked_int("repetition_detection.min_pattern_size", rule.get("min_pattern_size", 1), 1)
        largest = checked_int("repetition_detection.max_pattern_size", rule["max_pattern_size"], smallest)
        count = checked_int("repetition_detection.min_count", rule["min_count"], 2)
    except InvalidRequestError as error:
        raise InvalidRequestError(str(error), name) from None
    return {"max_pattern_size": largest, "min_pattern_size": smallest, "min_count": count}
