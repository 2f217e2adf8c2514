"""Turns prompts into vectors or classes: shared by embeddings, pooling, classes, scores and ranks. Independent of HTTP."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxllm.async_llm import AsyncLLM
from jaxllm.errors import InvalidRequestError, RequestFailedError
from jaxllm.media import ProcessedMedia
from jaxllm.outputs import PoolingRequestOutput
from jaxllm.pooling_params import PoolingParams
from jaxllm.request_options import NO_OPTIONS, RequestOptions
from jaxllm.text.input_processor import ParentRequest, TokensPrompt
from jaxllm.text.pairs import PairCut
from jaxllm.text.prompt_media import with_processed
from jaxllm.text.tokenization import encode_prompts
from server.endings import end_of, failure
from server.errors import ApiError, bad_request
from server.options import LimitOptions
from server.prompts import PIECE_CHARACTERS, check_text_length, check_total, cut_text, tokenizer_of
from server.usage import Usage
from server.work import Work, WorkPool

PAIRS_AT_ONCE = 32
"""Pairs that are tokenized in one piece."""
MAX_VALUES = 1 << 24
"""Maximum number of numbers in one reply: vectors of all tokens make a very large text."""


@dataclass(frozen=True)
class Input:
    """One prompt, and its name in the request."""

    prompt: str | list[int] | TokensPrompt
    """A prompt with token ids is taken as it is."""
    param: str
    params: PoolingParams
    images: Sequence[ProcessedMedia] = ()
    """Images of a prompt that is token ids."""


@dataclass(frozen=True)
class Pair:
    """Two texts that the model scores, and their names in the request."""

    texts: tuple[str, str]
    param_names: tuple[str, str]


class PoolingService:
    """Computes vectors with one engine."""

    def __init__(self, engine: AsyncLLM, limits: LimitOptions, work: WorkPool):
        self._engine = engine
        self._work = work
        self._limits = limits
        self._queue_timeout_seconds = limits.queue_timeout or None

    async def prepare(
        self,
        inputs: Sequence[Input],
        request_id: str,
        *,
        add_special_tokens: bool = True,
        options: RequestOptions = NO_OPTIONS,
    ) -> list[ParentRequest]:
        """Tokenize and check all inputs before any of them runs. Raises ApiError."""
        limit = self._limits.max_prompts_per_request
        if len(inputs) > limit:
            raise bad_request(
                f"{inputs[0].param} has {len(inputs)} inputs, at most {limit} are possible (--max-prompts-per-request)",
                inputs[0].param,
            )
        options = replace(options, queue_timeout_seconds=self._queue_timeout_seconds)
        requests = []
        prompts = await self._work.run(self._encode(inputs, add_special_tokens))
        for place, (each, prompt) in enumerate(zip(inputs, prompts, strict=True)):
            own_id = request_id if len(inputs) == 1 else f"{request_id}-{place}"
            try:
                requests.append(await self._engine.prepare(prompt, each.params, own_id, options))
            except InvalidRequestError as error:
                is_of_prompt = error.param in ("prompt", "prompt_token_ids")
                index = sum(other.param == each.param for other in inputs[:place])
                text = f"{each.param}[{index}]: {error}" if is_of_prompt and len(inputs) > 1 else str(error)
                raise InvalidRequestError(text, each.param if is_of_prompt else error.param) from error
        self._check_size(requests)
        return requests

    async def pair_inputs(
        self, pairs: Sequence[Pair], cut: PairCut, params: PoolingParams, *, add_special_tokens: bool = True
    ) -> list[Input]:
        """Pairs of texts as inputs of a model that scores them. Raises ApiError."""
        limit = self._limits.max_prompts_per_request
        if len(pairs) > limit:
            param = pairs[0].param_names[1]
            raise bad_request(
                f"{param} makes {len(pairs)} pairs, at most {limit} are possible (--max-prompts-per-request)", param
            )
        prompts = await self._work.run(self._encode_pairs(pairs, cut, add_special_tokens))
        return [Input(prompt, pair.param_names[1], params) for prompt, pair in zip(prompts, pairs, strict=True)]

    def _encode_pairs(self, pairs: Sequence[Pair], cut: PairCut, add_special_tokens: bool) -> Work[list[Any]]:
        """Prompts with their token ids. Tokenizes only as much of overlong texts as is needed to reject or cut them."""
        longest, kept = self._engine.max_model_len, {}
        limits = (cut.first, cut.second)
        for param, text, most in dict.fromkeys(
            each for pair in pairs for each in zip(pair.param_names, pair.texts, limits, strict=True)
        ):
            tokenizer = tokenizer_of(self._engine, param)
            if not text:
                raise bad_request(f"{param} has an empty text, must have at least 1 token", param)
            if cut.whole is not None or most is not None:
                kept[text] = yield from cut_text(tokenizer, text, longest, cut.side, longest)
                continue
            try:
                yield from check_text_length(tokenizer, text, longest + 1, param)
            except ApiError:
                raise _too_long("far too many", longest, param) from None
        texts = [tuple(kept.get(text, text) for text in pair.texts) for pair in pairs]
        prompts: list[Any] = []
        num_tokens = 0
        for first in range(0, len(texts), PAIRS_AT_ONCE):
            some = texts[first : first + PAIRS_AT_ONCE]
            made = self._engine.input_processor.pair_prompts(some, cut, add_special_tokens=add_special_tokens)  # type: ignore[arg-type]
            prompts += made
            num_tokens += sum(len(prompt["prompt_token_ids"]) for prompt in made)
            check_total(num_tokens, longest, pairs[0].param_names[1])
            yield None
        return prompts

    async def run(self, requests: Sequence[ParentRequest]) -> list[PoolingRequestOutput]:
        """Return the vectors of prepared requests, in order. If it is cancelled or one request fails, the others are aborted.

        Raises ApiError, EngineError or EngineDeadError.
        """
        tasks = [asyncio.ensure_future(self._engine.pool_prepared(request)) for request in requests]
        try:
            outputs = await asyncio.gather(*tasks)
        except RequestFailedError as error:
            raise failure(error.kind) from error
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for output in outputs:
            end_of(output)
        return outputs

    def _encode(self, inputs: Sequence[Input], add_special_tokens: bool) -> Work[list[Any]]:
        """Prompts with their token ids. Tokenizes only as much of an overlong text as is needed to reject it."""
        longest = self._engine.max_model_len
        texts = [each for each in inputs if isinstance(each.prompt, str)]
        kept: dict[str, str] = {}
        for each in texts:
            tokenizer = tokenizer_of(self._engine, each.param)
            if not each.prompt:
                raise bad_request(f"{each.param} has an empty text, must have at least 1 token", each.param)
            assert isinstance(each.prompt, str)
            if each.params.truncate_prompt_tokens is not None:
                side = each.params.truncation_side
                kept[each.prompt] = yield from cut_text(tokenizer, each.prompt, longest, side, longest)
            else:
                try:
                    yield from check_text_length(tokenizer, each.prompt, longest + 1, each.param)
                except ApiError:
                    raise _too_long("far too many", longest, each.param) from None
        by_text: dict[str, list[int]] = {}
        if texts:
            unique = list(dict.fromkeys(kept.get(each.prompt, each.prompt) for each in texts if isinstance(each.prompt, str)))
            num_tokens = 0
            for some in _in_batches(unique):
                encoded = encode_prompts(tokenizer, some) if add_special_tokens else tokenizer.encode_batch(some, False)
                by_text.update(zip(some, encoded, strict=True))
                num_tokens += sum(map(len, encoded))
                check_total(num_tokens, longest, texts[0].param)
                yield None
        prompts: list[Any] = []
        for each in inputs:
            if isinstance(each.prompt, str):
                text = kept.get(each.prompt, each.prompt)
                prompts.append({"prompt": text, "prompt_token_ids": by_text[text]})
            elif isinstance(each.prompt, dict):
                prompts.append(each.prompt)
            else:
                prompts.append(with_processed({"prompt_token_ids": each.prompt}, each.images))
            num_tokens = len(prompts[-1]["prompt_token_ids"])
            if each.params.truncate_prompt_tokens is None and num_tokens > longest:
                raise _too_long(num_tokens, longest, each.param)
        return prompts

    def _check_size(self, requests: Sequence[ParentRequest]) -> None:
        width, count = self._engine.model_config.hidden_size, 0
        if (classifier := self._engine.model_config.classifier) is not None:
            width = len(classifier.labels)
        for request in requests:
            params = request.pooling_params
            assert params is not None
            count += (params.dimensions or width) * (len(request.prompt_token_ids) if params.task == "token_embed" else 1)
        if count > MAX_VALUES:
            raise bad_request(
                f"the vectors of this request have {count} numbers, at most {MAX_VALUES} are possible; ask for fewer or shorter "
                "inputs at once",
                "input",
            )


def _in_batches(texts: Sequence[str]) -> Iterator[list[str]]:
    """The texts, as many at a time as are tokenized in one piece."""
    batch: list[str] = []
    size = 0
    for text in texts:
        if batch and size + len(text) > PIECE_CHARACTERS:
            yield batch
            batch, size = [], 0
        batch.append(text)
        size += len(text)
    yield batch


def usage_of(outputs: Sequence[PoolingRequestOutput], *, tells_cached: bool) -> dict[str, Any]:
    """Token counts of a request in OpenAI's format."""
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    num_cached = sum(output.num_cached_tokens for output in outputs) if tells_cached else None
    return Usage(prompt_tokens=num_tokens, cached_tokens=num_cached).as_dict()


def _too_long(num_tokens: int | str, longest: int, param: str) -> ApiError:
    return bad_request(
        f"{param} has {num_tokens} tokens; this model's maximum context length is {longest} tokens; shorten it or pass "
        "truncate_prompt_tokens",
        param,
        "context_length_exceeded",
    )
