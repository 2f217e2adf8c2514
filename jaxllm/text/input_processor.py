"""Checks what a caller asks and turns it into requests for the engine core: token ids, concrete sampling, no doubts left."""

import copy
import itertools
import numbers
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from jaxllm.config import EngineConfig, unknown_name
from jaxllm.errors import ConfigError, InvalidRequestError
from jaxllm.model_config import ModelConfig
from jaxllm.request import EngineCoreRequest, Grammar
from jaxllm.sampling_params import SamplingParams
from jaxllm.structured_outputs import PARAM, StructuredOutputsParams
from jaxllm.text.generation_config import FILE_NAME, GenerationConfig
from jaxllm.text.tokenizer import Tokenizer


class TextPrompt(TypedDict, total=False):
    """A prompt as text."""

    prompt: str
    cache_salt: str


class TokensPrompt(TypedDict, total=False):
    """A prompt as token ids; its text, if given, is only reported back."""

    prompt_token_ids: list[int]
    prompt: str
    cache_salt: str


Prompt = str | list[int] | TextPrompt | TokensPrompt
_PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")


@dataclass(frozen=True)
class FrontRequest:
    """One prompt, checked, with a request to the engine core for each of its n answers."""

    request_id: str
    """The caller's own; several requests may share it."""
    internal_id: str
    """Unique in this engine."""
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    children: list[EngineCoreRequest]
    arrival_time: float


class InputProcessor:
    """Holds what checking and completing a request needs."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        max_model_len: int,
        tokenizer: Tokenizer | None,
        generation_config: GenerationConfig | None = None,
        *,
        processor_arguments: Mapping[str, int] | None = None,
        compile_grammar: Callable[[StructuredOutputsParams], Grammar] | None = None,
    ):
        self.tokenizer = tokenizer
        self._compile_grammar = compile_grammar
        self._processor_arguments = processor_arguments or {}
        self.max_model_len = max_model_len
        self._vocab_size = model_config.vocab_size
        self._max_logprobs = config.model.max_logprobs
        self._generation_config = generation_config or GenerationConfig()
        tokenizer_eos = tokenizer.eos_token_id if tokenizer is not None else None
        first = () if tokenizer_eos is None else (tokenizer_eos,)
        others = self._generation_config.eos_token_ids or model_config.eos_token_ids
        self.eos_token_ids = tuple(dict.fromkeys((*first, *others)))
        """The tokenizer's own first, then those of the generation config (or, without it, of the model)."""
        self._numbers = itertools.count()
        seed = config.model.seed
        self._random = random.SystemRandom() if seed is None else random.Random(seed)

    def default_sampling_params(self) -> SamplingParams:
        """SamplingParams with the values of the model's generation config."""
        try:
            return SamplingParams(**self._generation_config.sampling_values)
        except InvalidRequestError as error:
            raise ConfigError(f"{FILE_NAME} of the model: {error}; pass --generation-config none") from error

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
        grammar: Grammar | None = None,
    ) -> FrontRequest:
        """Raises InvalidRequestError for what cannot be served, TypeError for a request id that is not a string.

        `grammar`: what the structured outputs of `params` were compiled to, if they were; else that is done, and waited for, here.
        """
        if not isinstance(request_id, str):
            raise TypeError(f"request_id is a {type(request_id).__name__}, must be a str")
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(
                f"sampling_params is a {type(params).__name__}, must be SamplingParams", "sampling_params"
            )
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise InvalidRequestError(f"priority is {priority!r}, must be an integer", "priority")
        arrival_time = time.time() if arrival_time is None else arrival_time
        text, token_ids, cache_salt = self._read_prompt(prompt)
        self._check_token_ids(token_ids)
        params = self._completed(params, len(token_ids))
        if params.structured_outputs is not None and grammar is None:
            grammar = self.grammar_of(params.structured_outputs)
        internal_id = f"{request_id}-{next(self._numbers):x}"
        children = [
            EngineCoreRequest(
                request_id=internal_id if params.n == 1 else f"{index}_{internal_id}",
                prompt_token_ids=token_ids,
                sampling_params=self._child_params(params, index),
                eos_token_ids=self.eos_token_ids,
                arrival_time=arrival_time,
                priority=priority,
                cache_salt=cache_salt,
                grammar=grammar,
            )
            for index in range(params.n)
        ]
        return FrontRequest(request_id, internal_id, text, token_ids, params, children, arrival_time)

    def grammar_of(self, form: StructuredOutputsParams) -> Grammar:
        """What a form is compiled to. Waits for it. Raises InvalidRequestError."""
        if self._compile_grammar is None:
            raise InvalidRequestError("structured_outputs needs a tokenizer; start without --skip-tokenizer-init", PARAM)
        return self._compile_grammar(form)

    def tokenize_texts(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """The prompts with texts already turned into ids, all at once, which uses every core. Wrong ones stay as they are."""
        if self.tokenizer is None:
            return list(prompts)
        places = [place for place, prompt in enumerate(prompts) if isinstance(prompt, str) and prompt]
        tokenized = list(prompts)
        all_ids = encode_prompts(self.tokenizer, [prompts[place] for place in places])  # type: ignore[misc]
        for place, token_ids in zip(places, all_ids, strict=True):
            tokenized[place] = TokensPrompt(prompt=prompts[place], prompt_token_ids=token_ids)  # type: ignore[typeddict-item]
        return tokenized

    def _read_prompt(self, prompt: Any) -> tuple[str | None, list[int], str | None]:
        """Text if known, token ids and cache salt of any form of prompt."""
        if isinstance(prompt, Mapping):
            for key in prompt:
                if key not in _PROMPT_KEYS:
                    raise InvalidRequestError(unknown_name("key of a prompt", str(key), _PROMPT_KEYS), "prompt")
            text, token_ids, salt = (prompt.get(key) for key in _PROMPT_KEYS)
            if text is not None and not isinstance(text, str):
                raise InvalidRequestError(f"prompt is a {type(text).__name__}, must be a text", "prompt")
            if salt is not None and (not isinstance(salt, str) or not salt):
                raise InvalidRequestError(f"cache_salt is {salt!r}, must be a text that is not empty", "cache_salt")
            if token_ids is not None:
                return text, _read_token_ids(token_ids), salt
            if text is not None:
                return text, self._encode(text), salt
            raise InvalidRequestError("prompt has neither 'prompt' nor 'prompt_token_ids'", "prompt")
        if isinstance(prompt, str):
            return prompt, self._encode(prompt), None
        if isinstance(prompt, Sequence):
            return None, _read_token_ids(prompt), None
        raise InvalidRequestError(
            f"prompt is a {type(prompt).__name__}, must be a text, a list of token ids, or an object with 'prompt' or "
            "'prompt_token_ids'",
            "prompt",
        )

    def _encode(self, text: str) -> list[int]:
        if not text:
            raise InvalidRequestError("prompt is empty, must have at least 1 token", "prompt")
        if self.tokenizer is None:
            raise InvalidRequestError("prompt is a text, but there is no tokenizer; pass token ids", "prompt")
        return encode_prompts(self.tokenizer, [text])[0]

    def _check_token_ids(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise InvalidRequestError("prompt is empty, must have at least 1 token", "prompt")
        if not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:
            place = next(place for place, id in enumerate(token_ids) if not 0 <= id < self._vocab_size)
            raise InvalidRequestError(
                f"prompt has the token id {token_ids[place]} in place {place}; the vocabulary has 0 to {self._vocab_size - 1}",
                "prompt_token_ids",
            )

    def _completed(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """A copy with everything filled in that the caller left open, checked against the model."""
        params = params.clone()
        if params.bad_words:
            params.bad_words_token_ids = [*(params.bad_words_token_ids or ()), *self._spellings(params.bad_words)]
        if params.stop and self.tokenizer is None:
            raise InvalidRequestError("stop needs a tokenizer: stop strings are found in the text", "stop")
        params.verify(
            vocab_size=self._vocab_size,
            max_model_len=self.max_model_len,
            max_logprobs=self._max_logprobs,
            num_prompt_tokens=num_prompt_tokens,
            processors=self._processor_arguments,
        )
        room = self.max_model_len - num_prompt_tokens
        params.max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        return params

    def _child_params(self, params: SamplingParams, index: int) -> SamplingParams:
        """The parameters of one of the n answers: each has a seed of its own."""
        child = copy.copy(params)
        child.n = 1
        child.structured_outputs = None  # the grammar says it
        child.seed = self._random.getrandbits(63) if params.seed is None else _as_int64(params.seed + index)
        return child

    def _spellings(self, words: Sequence[str]) -> list[list[int]]:
        """The token ids of words, at the start of a text and after a space."""
        if self.tokenizer is None:
            raise InvalidRequestError("bad_words needs a tokenizer; pass bad_words_token_ids", "bad_words")
        encode = self.tokenizer.encode
        spellings = (tuple(encode(space + word.lstrip(), add_special_tokens=False)) for word in words for space in ("", " "))
        return [list(ids) for ids in dict.fromkeys(spellings) if ids]


def encode_prompts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """The ids of plain prompts, with the special tokens that the tokenizer adds; a BOS in the text is not doubled."""
    bos = tokenizer.bos_token_id
    all_ids = tokenizer.encode_batch(texts)
    return [ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids for ids in all_ids]


def _read_token_ids(token_ids: Any) -> list[int]:
    if isinstance(token_ids, str) or not hasattr(token_ids, "__iter__"):
        raise InvalidRequestError(
            f"prompt_token_ids is a {type(token_ids).__name__}, must be a list of integers", "prompt_token_ids"
        )
    ids = list(token_ids)
    if set(map(type, ids)) <= {int}:
        return ids
    for place, id in enumerate(ids):
        if isinstance(id, bool) or not isinstance(id, numbers.Integral):
            raise InvalidRequestError(
                f"prompt_token_ids has {id!r} in place {place}, must have integers only", "prompt_token_ids"
            )
    return [int(id) for id in ids]


def _as_int64(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63
