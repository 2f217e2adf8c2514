"""Checks a caller's request and converts it to requests for the engine core, with token ids and complete parameters."""

import contextlib
import copy
import itertools
import numbers
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

import msgspec

from jaxllm import clock
from jaxllm.config import EngineConfig, unknown_name
from jaxllm.errors import ConfigError, InvalidRequestError
from jaxllm.kv_transfer import check_role
from jaxllm.log import info_once
from jaxllm.media import ProcessedMedia
from jaxllm.pooling_params import PoolingParams, PoolingTask
from jaxllm.request import EngineCoreRequest, Grammar
from jaxllm.request_options import NO_OPTIONS, RequestOptions
from jaxllm.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from jaxllm.served_model import ServedModel
from jaxllm.structured_outputs import PARAM, StructuredOutputsParams
from jaxllm.text.generation_config import FILE_NAME, GenerationConfig
from jaxllm.text.pairs import UNCUT, PairCut, encode_pairs, joined_texts, second_start
from jaxllm.text.prompt_media import KEYS as MEDIA_KEYS
from jaxllm.text.prompt_media import PromptMedia, processed_in
from jaxllm.text.tokenization import PLAIN, Tokenization, cut_images
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.thinking import PARAM as THINKING
from jaxllm.thinking import ThinkingBudget, markers


class TextPrompt(TypedDict, total=False):
    """A prompt as text, which has a placeholder of the model's family for each image."""

    prompt: str
    cache_salt: str
    multi_modal_data: Mapping[str, Any]
    """{"image": …}: a Pillow image, an array uint8 [height, width, 3], the bytes of a file, or a list of them; {"audio": …}: samples
    and their rate, as (array, 16000), or the bytes of a file."""
    multi_modal_uuids: Mapping[str, Any]
    """{"image": …} or {"audio": …}: names of their contents, or None: items with equal ones are the same."""
    mm_processor_kwargs: Mapping[str, Any]
    """How they are prepared, over the option of that name."""


class TokensPrompt(TextPrompt, total=False):
    """A prompt as token ids; its text, if given, is only reported back."""

    prompt_token_ids: list[int]
    token_type_ids: list[int]
    """For encoders: 0 for the tokens of a first text, 1 for those of a second one behind it; absent: all are 0."""


Prompt = str | list[int] | TextPrompt | TokensPrompt
_PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt", "token_type_ids")
_NOTHING_SAMPLED = SamplingParams(
    temperature=0.0, max_tokens=1, seed=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
)
"""The sampling parameters of pooling requests, which sample nothing."""


@dataclass(frozen=True)
class ParentRequest:
    """One prompt, checked, with a request to the engine core for each of its n answers."""

    request_id: str
    """The caller's own; several requests may share it."""
    internal_id: str
    """Unique in the engine, because it contains the namespace of its process."""
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    """Unused with pooling_params."""
    children: list[EngineCoreRequest]
    arrival_time: float
    pooling_params: PoolingParams | None = None
    """If set, vectors are computed, and nothing is generated."""
    beam_search_params: BeamSearchParams | None = None
    """If set, a beam search runs, and the other fields describe its first step."""

    def forget_payloads(self) -> None:
        """Free the contents of its items, which the core has, in place: it will not be sent again."""
        for place, child in enumerate(self.children):
            if child.items:
                items = tuple(msgspec.structs.replace(item, payload=b"") for item in child.items)
                self.children[place] = replace(child, items=items)


class InputProcessor:
    """Checks requests and completes their parameters."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ServedModel,
        max_model_len: int,
        tokenizer: Tokenizer | None,
        generation_config: GenerationConfig | None = None,
        *,
        processor_arguments: Mapping[str, int] | None = None,
        namespace: str = "",
        compile_grammar: Callable[[StructuredOutputsParams], Grammar] | None = None,
        media: PromptMedia | None = None,
    ):
        self.tokenizer = tokenizer
        self.media = media or PromptMedia(None, config.multimodal)
        self._compile_grammar = compile_grammar
        self.processor_arguments = processor_arguments or {}
        self.max_model_len = max_model_len
        self._vocab_size = model_config.vocab_size
        self._model = config.model.model
        self._generates = model_config.generates
        self._pooling = model_config.pooling
        self._width = model_config.hidden_size
        self.classifier = model_config.classifier
        self._has_token_types = model_config.has_token_types
        self._max_logprobs = config.model.max_logprobs
        self._num_replicas = config.parallel.data_parallel_size
        self._policy = config.scheduler.scheduling_policy
        self._kv_role = config.kv_transfer.kv_role
        self.generation_config = generation_config or GenerationConfig()
        tokenizer_eos = tokenizer.eos_token_id if tokenizer is not None else None
        first = () if tokenizer_eos is None else (tokenizer_eos,)
        others = self.generation_config.eos_token_ids or model_config.eos_token_ids
        self.eos_token_ids = tuple(dict.fromkeys((*first, *others)))
        """The tokenizer's own first, then those of the generation config (or, without it, of the model)."""
        self._numbers = itertools.count()
        self._namespace = namespace
        seed = config.model.seed
        self._random = random.SystemRandom() if seed is None else random.Random(seed)

    def default_sampling_params(self, *, chat: bool = False) -> SamplingParams:
        """SamplingParams with the values of the model's generation config. `chat`: with those of llama.cpp where it has none."""
        config = self.generation_config
        try:
            return SamplingParams(**(config.chat_values if chat else config.sampling_values))
        except InvalidRequestError as error:
            raise ConfigError(f"{FILE_NAME} of the model: {error}; pass --generation-config none") from error

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        options: RequestOptions = NO_OPTIONS,
        *,
        arrival_time: float | None = None,
        grammar: Grammar | None = None,
    ) -> ParentRequest:
        """Check a prompt and complete its parameters. Raises InvalidRequestError, or TypeError for a request id that is no string.

        Prepares its images, and waits for them, unless `media.submit` and `with_processed` have.

        A cache salt in the prompt replaces that of the options. `grammar`: the compiled structured output of `params`; None: compile
        it here, and wait for it.
        """
        if not isinstance(request_id, str):
            raise TypeError(f"request_id is a {type(request_id).__name__}, must be a str")
        if not isinstance(params, (SamplingParams, PoolingParams)):
            raise InvalidRequestError(
                f"sampling_params is a {type(params).__name__}, must be SamplingParams", "sampling_params"
            )
        arrival_time = clock.now() if arrival_time is None else arrival_time
        processed = [image.result() for image in self.media.submit(prompt)]
        text, token_ids, salt = self._read_prompt(prompt, processed)
        second_text_start = second_start(prompt, len(token_ids))
        if second_text_start is not None and not self._has_token_types:
            raise InvalidRequestError(
                f"token_type_ids has a 1, but {self._model} has one type of tokens; leave it out", "prompt"
            )
        options = self._checked_options(options if salt is None else replace(options, cache_salt=salt))
        self._check_token_ids(token_ids)
        token_ids, items = self.media.expand(token_ids, processed)
        internal_id = f"{request_id}-{self._namespace}{next(self._numbers):x}"
        if isinstance(params, PoolingParams):
            num_tokens = len(token_ids)
            token_ids = self._truncated(text, token_ids, params, has_items=bool(items))
            if second_text_start is not None and len(token_ids) < num_tokens:
                text = "prompts with token_type_ids are not cut; cut both yourself"
                raise InvalidRequestError(text, "truncate_prompt_tokens")
            request = EngineCoreRequest(
                request_id=internal_id,
                prompt_token_ids=token_ids,
                items=items,
                sampling_params=_NOTHING_SAMPLED,
                pooling_params=self._completed_pooling(params, len(token_ids)),
                arrival_time=arrival_time,
                options=options,
                second_text_start=second_text_start,
            )
            sampling, pooling = request.sampling_params, request.pooling_params
            return ParentRequest(request_id, internal_id, text, token_ids, sampling, [request], arrival_time, pooling)
        self.check_generates()
        params = self._completed(params, len(token_ids))
        if params.structured_outputs is not None and grammar is None:
            grammar = self.grammar_of(params.structured_outputs)
        thinking_budget = self._thinking_budget(params, token_ids)
        of_others = options
        if options.kv_transfer is not None and options.kv_transfer.keep_for_decode:
            of_others = replace(options, kv_transfer=None)  # one lease for the prompt that all answers share
        children = [
            EngineCoreRequest(
                request_id=internal_id if params.n == 1 else f"{index}_{internal_id}",
                prompt_token_ids=token_ids,
                items=items,
                sampling_params=self._child_params(params, index),
                eos_token_ids=self.eos_token_ids,
                arrival_time=arrival_time,
                options=options if index == 0 else of_others,
                grammar=grammar,
                thinking_budget=thinking_budget,
            )
            for index in range(params.n)
        ]
        return ParentRequest(request_id, internal_id, text, token_ids, params, children, arrival_time)

    def check_generates(self) -> None:
        """Raise InvalidRequestError if the model makes no text."""
        if not self._generates:
            made, ask = ("a classifier", "classes or scores") if self.classifier else ("an embedding model", "embeddings")
            raise InvalidRequestError(
                f"{self._model} runs as {made} and generates no text; ask for {ask}, or start the engine with --runner generate if the "
                "checkpoint has a head for text",
                "model",
            )

    def _checked_options(self, options: RequestOptions) -> RequestOptions:
        """The options without what has no effect in this engine. Raises InvalidRequestError."""
        options.check()
        rank, num_replicas = options.data_parallel_rank, self._num_replicas
        if rank is not None and (type(rank) is not int or not 0 <= rank < num_replicas):
            most = f"0 to {num_replicas - 1}" if num_replicas > 1 else "0, as there is one engine"
            raise InvalidRequestError(f"data_parallel_rank is {rank!r}, must be {most}", "data_parallel_rank")
        if options.kv_transfer is not None:
            check_role(options.kv_transfer, self._kv_role)
        if options.priority != 0 and self._policy != "priority":
            info_once(
                f"priority of requests has no effect under the scheduling policy {self._policy} (--scheduling-policy priority "
                "changes that)"
            )
            return replace(options, priority=0)
        return options

    def grammar_of(self, form: StructuredOutputsParams) -> Grammar:
        """Compile a structured output, and wait for it. Raises InvalidRequestError."""
        if self._compile_grammar is None:
            raise InvalidRequestError("structured_outputs needs a tokenizer; start without --skip-tokenizer-init", PARAM)
        return self._compile_grammar(form)

    def _thinking_budget(self, params: SamplingParams, prompt_token_ids: list[int]) -> ThinkingBudget | None:
        budget = params.thinking_token_budget
        if budget is None:
            return None
        if self.tokenizer is None:
            raise InvalidRequestError(f"{THINKING} needs a tokenizer; start without --skip-tokenizer-init", THINKING)
        budget, special_ids = min(budget, self.max_model_len), self.tokenizer.all_special_ids
        found = ThinkingBudget.of(budget, prompt_token_ids, self._added_token_ids(), special_ids)
        if found is not None and params.allowed_token_ids and found.end_token_ids[0] not in params.allowed_token_ids:
            raise InvalidRequestError(
                f"allowed_token_ids lacks {found.end_token_ids[0]}, the token that ends the thinking at {THINKING}; add it",
                "allowed_token_ids",
            )
        return found

    @property
    def can_limit_thinking(self) -> bool:
        """Whether the model has tokens that open and close its thinking."""
        return markers(self._added_token_ids()) is not None

    def _added_token_ids(self) -> dict[str, int]:
        if self.tokenizer is None:
            return {}
        return {text: token_id for token_id, text in self.tokenizer.added_tokens.items() if token_id < self._vocab_size}

    def tokenize_texts(self, prompts: Sequence[Prompt], tokenization: Tokenization = PLAIN) -> list[Prompt]:
        """Tokenize the texts among the prompts in one batch, which uses every core, and prepare their images. Invalid prompts stay
        unchanged. Raises InvalidRequestError for images that truncation would cut.
        """
        prepared: list[Any] = self.media.prepared(prompts)
        if self.tokenizer is None:
            return prepared
        texts: dict[int, str] = {}
        images: dict[int, list[ProcessedMedia]] = {}
        for place, prompt in enumerate(prepared):
            if (text := _untokenized(prompt)) and (found := processed_in(prompt)) is not None:
                with contextlib.suppress(InvalidRequestError):
                    texts[place], images[place] = self.media.expand_text(text, found), found
        for has_images in (False, True):
            places = [place for place in texts if bool(images[place]) is has_images]
            batch = [texts[place] for place in places]
            all_ids = self._own(tokenization).encode(self.tokenizer, batch, self.max_model_len, truncates=not has_images)
            for place, token_ids in zip(places, all_ids, strict=True):
                if has_images:
                    try:
                        token_ids, _ = self.media.expand(token_ids, images[place])
                    except InvalidRequestError:
                        continue
                    tokenization.check_uncut(len(token_ids), self.max_model_len)
                known: Any = prepared[place] if isinstance(prepared[place], Mapping) else {"prompt": prepared[place]}
                prepared[place] = {**known, "prompt_token_ids": token_ids}
        return prepared

    def _read_prompt(self, prompt: Any, images: Sequence[ProcessedMedia]) -> tuple[str | None, list[int], str | None]:
        """Text if known, token ids and cache salt of any form of prompt."""
        if isinstance(prompt, Mapping):
            for key in prompt:
                if key not in (*_PROMPT_KEYS, *MEDIA_KEYS):
                    raise InvalidRequestError(unknown_name("key of a prompt", str(key), (*_PROMPT_KEYS, *MEDIA_KEYS)), "prompt")
            text, token_ids, salt, _ = (prompt.get(key) for key in _PROMPT_KEYS)
            if text is not None and not isinstance(text, str):
                raise InvalidRequestError(f"prompt is a {type(text).__name__}, must be a string", "prompt")
            if token_ids is not None:
                return text, _read_token_ids(token_ids), salt
            if text is not None:
                return text, self._encode(self.media.expand_text(text, images)), salt
            raise InvalidRequestError("prompt has neither 'prompt' nor 'prompt_token_ids'", "prompt")
        if isinstance(prompt, str):
            return prompt, self._encode(prompt), None
        if isinstance(prompt, Sequence):
            return None, _read_token_ids(prompt), None
        raise InvalidRequestError(
            f"prompt is a {type(prompt).__name__}, must be a string, a list of token ids, or an object with 'prompt' or "
            "'prompt_token_ids'",
            "prompt",
        )

    def _encode(self, text: str) -> list[int]:
        if not text:
            raise InvalidRequestError("prompt is empty, must have at least 1 token", "prompt")
        if self.tokenizer is None:
            raise InvalidRequestError("prompt is a text, but there is no tokenizer; pass token ids", "prompt")
        return self._own(PLAIN).encode(self.tokenizer, [text], self.max_model_len)[0]

    def _own(self, tokenization: Tokenization) -> Tokenization:
        """The model's own: prompts of one that writes down speech say all special tokens, which its tokenizer would put around them."""
        return tokenization if self.media.speech is None else replace(tokenization, add_special_tokens=False)

    def _check_token_ids(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise InvalidRequestError("prompt is empty, must have at least 1 token", "prompt")
        if not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:
            place = next(place for place, id in enumerate(token_ids) if not 0 <= id < self._vocab_size)
            raise InvalidRequestError(
                f"prompt has the token id {token_ids[place]} at position {place}; the vocabulary has 0 to {self._vocab_size - 1}",
                "prompt_token_ids",
            )

    def _completed(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """A copy with all defaults filled in, checked against the model."""
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
            processors=self.processor_arguments,
        )
        room = self.max_model_len - num_prompt_tokens
        params.max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        return params

    def _truncated(self, text: str | None, token_ids: list[int], params: PoolingParams, *, has_items: bool) -> list[int]:
        """The token ids, truncated. The special tokens around a text are kept. Raises InvalidRequestError if items would be cut."""
        limit = params.truncate_prompt_tokens
        if limit is None:
            return token_ids
        if limit > self.max_model_len:
            raise InvalidRequestError(
                f"truncate_prompt_tokens is {limit}, the model takes {self.max_model_len}; lower it or raise --max-model-len",
                "truncate_prompt_tokens",
            )
        limit = self.max_model_len if limit == -1 else limit
        if len(token_ids) <= limit:
            return token_ids
        if has_items:
            raise cut_images(len(token_ids), limit)
        first, last = 0, len(token_ids)
        if text is not None and self.tokenizer is not None:
            plain = self.tokenizer.encode(text, add_special_tokens=False)
            places = range(len(token_ids) - len(plain) + 1)
            first = next((place for place in places if token_ids[place : place + len(plain)] == plain), None) or 0
            last = first + len(plain) if plain and token_ids[first : first + len(plain)] == plain else last
        room = max(0, limit - first - (len(token_ids) - last))
        middle = token_ids[first:last]
        kept = middle[len(middle) - room :] if params.truncation_side == "left" else middle[:room]
        return [*token_ids[:first], *kept, *token_ids[last:]][:limit]

    def _completed_pooling(self, params: PoolingParams, num_prompt_tokens: int) -> PoolingParams:
        """A copy with all defaults filled in, checked against the model."""
        pooling, width = self._pooling, params.dimensions
        if num_prompt_tokens > self.max_model_len:
            raise InvalidRequestError(
                f"prompt has {num_prompt_tokens} tokens, the model takes {self.max_model_len}; shorten it, pass "
                "truncate_prompt_tokens or raise --max-model-len",
                "prompt",
            )
        task = params.task or ("embed" if self.classifier is None else "classify")
        self._check_task(task, width)
        if width is not None:
            lengths = pooling.matryoshka_dimensions
            if lengths is None:
                raise InvalidRequestError(
                    f"dimensions is {width}, but {self._model} was not trained for shorter vectors (Matryoshka): leave it out and "
                    f"take all {self._width}; if it was, say so with --hf-overrides '{{\"is_matryoshka\": true}}'",
                    "dimensions",
                )
            if width > self._width or (lengths and width not in lengths):
                known = ", ".join(map(str, lengths)) or f"1 to {self._width}"
                raise InvalidRequestError(f"dimensions is {width}, {self._model} makes vectors of {known}", "dimensions")
        needs_all_tokens = task == "token_embed" or pooling.pooling_type != "last"
        return replace(
            params,
            task=task,
            use_activation=(task == "classify" or pooling.normalize)
            if params.use_activation is None
            else params.use_activation,
            # The hidden states of cached tokens are not kept.
            skip_reading_prefix_cache=needs_all_tokens or bool(params.skip_reading_prefix_cache),
        )

    def _check_task(self, task: PoolingTask, width: int | None) -> None:
        """Raise InvalidRequestError for what the model's head does not compute."""
        if task == "classify" and self.classifier is None:
            raise InvalidRequestError(
                f"{self._model} has no classification head (…ForSequenceClassification): ask for embeddings, or serve a classifier",
                "task",
            )
        if task != "classify" and self.classifier is not None:
            raise InvalidRequestError(
                f"{self._model} is a classifier and makes no embeddings; ask for classes or scores (/classify, /score, LLM.classify)",
                "task",
            )
        if task == "classify" and width is not None:
            raise InvalidRequestError(
                f"dimensions is {width}, but there is a number for each class; leave it out", "dimensions"
            )

    def pair_prompts(
        self, pairs: Sequence[tuple[Any, Any]], cut: PairCut = UNCUT, *, add_special_tokens: bool = True
    ) -> list[TokensPrompt]:
        """Prompts of pairs of texts for a model with one class, which is their score. A decoder's are longer than the whole of `cut`, as
        `process` cuts them. Raises InvalidRequestError."""
        assert self.classifier is not None
        if (count := len(self.classifier.labels)) != 1:
            raise InvalidRequestError(
                f"{self._model} has {count} classes, but the score of two texts needs a model with 1; ask for classes"
            )
        if self.tokenizer is None:
            raise InvalidRequestError("pairs of texts need a tokenizer; start without --skip-tokenizer-init", "prompt")
        if not all(isinstance(text, str) and text for pair in pairs for text in pair):
            raise InvalidRequestError("texts that are scored must be strings, not empty: the model joins each pair", "prompt")
        special = {"add_special_tokens": add_special_tokens}
        if not self.classifier.takes_pairs:
            texts = joined_texts(self.tokenizer, pairs, cut)
            all_ids = self.tokenizer.encode_batch(texts, **special)
            return [{"prompt": text, "prompt_token_ids": ids} for text, ids in zip(texts, all_ids, strict=True)]
        encoded = encode_pairs(self.tokenizer, pairs, cut, longest=self.max_model_len, **special)
        has_types = self._has_token_types and self.tokenizer.gives_types
        prompts: list[TokensPrompt] = [
            {"prompt": f"{first}{second}", "prompt_token_ids": each.ids}
            for (first, second), each in zip(pairs, encoded, strict=True)
        ]
        for prompt, each in zip(prompts, encoded, strict=True):
            if has_types and 1 in each.type_ids:
                prompt["token_type_ids"] = each.type_ids
        return prompts

    def _child_params(self, params: SamplingParams, index: int) -> SamplingParams:
        """The parameters of one of the n answers: each has its own seed."""
        child = copy.copy(params)
        child.n = 1
        child.structured_outputs = child.thinking_token_budget = None  # the request says it
        child.seed = self._random.getrandbits(63) if params.seed is None else _as_int64(params.seed + index)
        return child

    def _spellings(self, words: Sequence[str]) -> list[list[int]]:
        """The token ids of words, at the start of a text and after a space."""
        if self.tokenizer is None:
            raise InvalidRequestError("bad_words needs a tokenizer; pass bad_words_token_ids", "bad_words")
        encode = self.tokenizer.encode
        spellings = (tuple(encode(space + word.lstrip(), add_special_tokens=False)) for word in words for space in ("", " "))
        return [list(ids) for ids in dict.fromkeys(spellings) if ids]


def _untokenized(prompt: Any) -> str | None:
    """The text of a prompt without token ids."""
    if isinstance(prompt, Mapping):
        prompt = prompt.get("prompt") if prompt.get("prompt_token_ids") is None else None
    return prompt if isinstance(prompt, str) else None


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
                f"prompt_token_ids has {id!r} at position {place}, must have integers only", "prompt_token_ids"
            )
    return [int(id) for id in ids]


def _as_int64(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63
