"""POST /v1/completions."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from jaxllm.errors import InvalidRequestError
from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.sampling_params import BeamSearchParams, SamplingParams
from jaxllm.text.input_processor import ParentRequest
from server.beam_search import beam_search_params
from server.body import read_body
from server.chunk_writer import ChunkWriter
from server.context import ServerContext, context_of, request_id_of
from server.deadline import Deadline
from server.endings import end_of
from server.errors import bad_request, constraint_error
from server.logprobs import LogprobWriter
from server.openapi import json_body
from server.prompts import (
    check_length,
    check_max_tokens,
    check_text_length,
    check_total,
    cut_text,
    encode_prompt,
    tokenizer_of,
    truncated,
)
from server.protocol.common import engine_options
from server.protocol.completions import CompletionRequest
from server.sampling import check_copies, check_xargs, constraint_param, sampling_params
from server.sse import EventStream, unless_disconnected
from server.usage import Usage, per_request_metrics, timings
from server.work import Work, in_one_piece

router = APIRouter(tags=["OpenAI"])
_json = msgspec.json.encode


@router.post("/v1/completions", openapi_extra=json_body(CompletionRequest))
async def create_completion(request: Request) -> Response:
    """Write on from one or more prompts."""
    context = context_of(request)
    body = await read_body(request, CompletionRequest)
    async with Deadline(context.time_limit(body.timeout)) as limit:
        adapter = await context.adapter_of(body.model)
        work = await prepare(body, context, f"cmpl-{request_id_of(request, body.request_id)}", adapter)
    reply = CompletionReply(body, work, context)
    if body.stream:
        return EventStream(limit.applied(reply.stream()), keep_alive_seconds=context.options.replies.sse_keep_alive_interval)
    async with limit:
        with context.running():
            whole = await unless_disconnected(request.receive, reply.whole())
    return Response(_json(whole), media_type="application/json")


@dataclass(frozen=True)
class CompletionWork:
    """A fully checked request that the engine accepts."""

    request_id: str
    n: int
    """Number of answers per prompt."""
    requests: list[ParentRequest]
    """One for each prompt."""
    echoes: list[str]
    """The texts of the prompts, if they are echoed."""


async def prepare(body: CompletionRequest, context: ServerContext, request_id: str, adapter: str | None) -> CompletionWork:
    """Check, tokenize and check again. Raises ApiError or InvalidRequestError."""
    params = await context.work.unless_small(in_one_piece(_params, body, context))
    prompts = _prompts(body, context, params.n)
    engine = context.engine
    encoded = await context.work.run(_encode_all(prompts, body, context))
    options = engine_options(body, queue_timeout_seconds=context.queue_timeout_seconds, adapter=adapter)
    requests = []
    for number, (text, ids) in enumerate(encoded):
        prompt: Any = {"prompt_token_ids": ids} if text is None else {"prompt_token_ids": ids, "prompt": text}
        own_id = request_id if len(encoded) == 1 else f"{request_id}-{number}"
        try:
            requests.append(await engine.prepare(prompt, params, own_id, options))
        except InvalidRequestError as error:
            if error.param == "prompt_token_ids":
                raise bad_request(str(error), "prompt") from None
            if error.param == "structured_outputs":
                raise constraint_error(error, constraint_param(body)) from None
            raise
    for request in requests:
        context.request_log.write(request)
    echoes = []
    if body.echo:
        tokenizer = tokenizer_of(engine, "echo")
        echoes = [tokenizer.decode(ids) if text is None or body.truncate_prompt_tokens else text for text, ids in encoded]
    return CompletionWork(request_id, params.n, requests, echoes)


def _params(body: CompletionRequest, context: ServerContext) -> SamplingParams | BeamSearchParams:
    max_tokens = 16 if body.max_tokens is None else body.max_tokens
    if body.echo and max_tokens == 0:
        max_tokens = 1  # computed and discarded: the engine requires at least one output token
    check_max_tokens(_asked_tokens(body), context.engine.max_model_len)
    limits = context.options.limits
    if body.use_beam_search:
        max_logprobs = context.engine.config.model.max_logprobs
        return beam_search_params(body, limits, max_tokens=max_tokens, logprobs=body.logprobs, max_logprobs=max_logprobs)
    params = sampling_params(body, context.defaults, limits, max_tokens=max_tokens, logprobs=body.logprobs)
    check_xargs(body, params, context.engine)
    if body.echo and body.logprobs is not None:
        params.prompt_logprobs = params.logprobs
        params.skip_reading_prefix_cache = True
    return params


def _asked_tokens(body: CompletionRequest) -> int | None:
    """The client's limit of output tokens, not the default."""
    return body.max_tokens if "max_tokens" in body.model_fields_set else None


def _prompts(body: CompletionRequest, context: ServerContext, n: int) -> Sequence[str | list[int]]:
    """The prompts as a list. Raises ApiError for too many, or none."""
    prompt = body.prompt
    if isinstance(prompt, str):
        prompts: Sequence[Any] = [prompt]
    elif prompt and isinstance(prompt[0], int):
        prompts = [prompt]
    else:
        prompts = prompt
    if not prompts:
        raise bad_request("prompt is an empty list, must have at least 1 prompt", "prompt")
    limits = context.options.limits
    if len(prompts) > limits.max_prompts_per_request:
        raise bad_request(
            f"prompt has {len(prompts)} prompts, at most {limits.max_prompts_per_request} are possible "
            "(--max-prompts-per-request)",
            "prompt",
        )
    if len(prompts) * n > limits.max_sequences_per_request:
        raise bad_request(
            f"{len(prompts)} prompts with n = {n} make {len(prompts) * n} answers, at most "
            f"{limits.max_sequences_per_request} are possible (--max-sequences-per-request)",
            "n",
        )
    check_copies(body, len(prompts))
    return prompts


def _encode_all(
    prompts: Sequence[str | list[int]], body: CompletionRequest, context: ServerContext
) -> Work[list[tuple[str | None, list[int]]]]:
    """The text, if the prompt is one, and the ids of each prompt."""
    engine, found, num_tokens = context.engine, [], 0
    for prompt in prompts:
        if not prompt:
            raise bad_request("prompt is empty, must have at least 1 token", "prompt")
        text, ids = None, prompt
        if isinstance(prompt, str):
            tokenizer = tokenizer_of(engine)
            text = prompt
            if body.truncate_prompt_tokens is None:
                yield from check_text_length(tokenizer, prompt, engine.max_model_len)
            else:
                side, longest = body.truncation_side or "left", engine.max_model_len
                prompt = yield from cut_text(tokenizer, prompt, longest, side, longest)
            ids = encode_prompt(tokenizer, prompt, add_special_tokens=body.add_special_tokens)
        ids = truncated(
            ids,  # type: ignore[arg-type]
            body.truncate_prompt_tokens,
            body.truncation_side,
            engine.max_model_len,
            _asked_tokens(body),
        )
        check_length(len(ids), engine.max_model_len)
        num_tokens += len(ids)
        check_total(num_tokens, engine.max_model_len)
        found.append((text, ids))
        yield None
    return found


class CompletionReply:
    """Writes the reply to one request, whole or in chunks."""

    def __init__(self, body: CompletionRequest, work: CompletionWork, context: ServerContext):
        self._body = body
        self._work = work
        self._context = context
        replies = context.options.replies
        self._logprobs = LogprobWriter(
            context.engine.input_processor.tokenizer,
            as_ids=context.writes_ids(body),
            skip_special_tokens=body.skip_special_tokens,
        )
        self._num_top = -1 if body.logprob_token_ids else body.logprobs or 0
        self._created = int(time.time())
        self._tells_cached = replies.enable_prompt_tokens_details
        self._has_metrics = replies.enable_per_request_metrics
        self._has_timings = body.include_timings or self._has_metrics
        self._is_prompt_only = bool(body.echo) and body.max_tokens == 0
        self._usage_so_far = Usage(prompt_tokens=sum(len(request.prompt_token_ids) for request in work.requests))
        self._metrics: Any = None
        self._prompt_logprobs: dict[int, Any] = {}
        """Prompt logprobs by prompt index: the engine sends them once, and each answer repeats them."""

    # Whole reply

    async def whole(self) -> dict[str, Any]:
        """Return the reply as one object."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._last_output(request)) for request in self._work.requests]
        except ExceptionGroup as faults:
            raise faults.exceptions[0] from None  # the others were aborted because of it
        return self.of_outputs([task.result() for task in tasks])

    def of_outputs(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The reply with the last output for each prompt."""
        choices = []
        for place, output in enumerate(outputs):
            self._count(output)
            choices += [self._choice(place, output, answer) for answer in output.outputs]
        reply: dict[str, Any] = {
            "id": self._work.request_id,
            "object": "text_completion",
            "created": self._created,
            "model": self._context.name_for(self._work.requests[0]),
            "choices": choices,
            "usage": self._usage(),
            "system_fingerprint": self._context.fingerprint,
        }
        return {**reply, **self._times()}

    def _times(self) -> dict[str, Any]:
        num_tokens, found = self._usage_so_far.completion_tokens, {}
        if self._has_timings:
            found["timings"] = timings(self._metrics, num_tokens)
        if self._has_metrics:
            is_one = len(self._work.requests) * self._work.n == 1
            found["metrics"] = per_request_metrics(self._metrics, num_tokens) if is_one else None
        return found

    async def _last_output(self, request: ParentRequest) -> RequestOutput:
        last = None
        async with contextlib.aclosing(self._context.engine.stream(request)) as outputs:
            async for output in outputs:
                last = output
        assert last is not None
        return last

    def _choice(self, place: int, output: RequestOutput, answer: CompletionOutput) -> dict[str, Any]:
        text, ids, positions = answer.text, answer.token_ids, answer.logprobs
        if self._is_prompt_only:
            text, ids, positions = "", [], None if positions is None else []
        echoed = ""
        if self._body.echo:
            echoed = self._work.echoes[place]
            text = echoed + text
        choice: dict[str, Any] = {
            "index": place * self._work.n + answer.index,
            "text": text,
            "logprobs": self._logprob_object(output, output.prompt_logprobs, ids, positions)[0],
            "finish_reason": "length" if self._is_prompt_only else end_of(answer),
            "stop_reason": None if self._is_prompt_only else answer.stop_reason,
            "prompt_logprobs": None
            if output.prompt_logprobs is None or self._body.prompt_logprobs is None
            else self._logprobs.prompt(output.prompt_logprobs),
        }
        if self._body.return_token_ids:
            choice["token_ids"] = ids
            choice["prompt_token_ids"] = output.prompt_token_ids
        return choice

    def choice_of(self, output: RequestOutput, answer: CompletionOutput, offset: int) -> tuple[dict[str, Any], int]:
        """A chunk's choice, whose logprobs begin at a text offset, and the offset at its end."""
        logprobs, offset = self._logprob_object(output, None, answer.token_ids, answer.logprobs, offset)
        choice = {
            "index": answer.index,
            "text": answer.text,
            "logprobs": logprobs,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = answer.token_ids
        return choice, offset

    def _logprob_object(
        self, output: RequestOutput, of_prompt: Any, ids: Sequence[int], positions: Any, offset: int = 0
    ) -> tuple[dict[str, Any] | None, int]:
        """The logprobs object and its end's text offset; begins with the prompt's `of_prompt` if the prompt is echoed."""
        if (self._body.logprobs is None and not self._body.logprob_token_ids) or positions is None:
            return None, offset
        if self._body.echo and of_prompt is not None:
            ids = [*output.prompt_token_ids, *ids]
            positions = [*of_prompt, *positions]
        return self._logprobs.completion(ids, positions, self._num_top, offset)

    def _count(self, output: RequestOutput) -> None:
        usage = self._usage_so_far
        if not self._is_prompt_only:
            usage.completion_tokens += sum(len(answer.token_ids) for answer in output.outputs)
        self._metrics = output.metrics
        if output.finished:
            usage.add_cached(output)

    def _usage(self) -> dict[str, Any]:
        return self._usage_so_far.as_dict(tells_cached=self._tells_cached)

    # Streamed reply

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield the reply as events; events that are ready together are sent together."""
        chunks = ChunkWriter(
            "text_completion",
            b',"text":',
            b"",
            self._body.stream_options,
            request_id=self._work.request_id,
            created=self._created,
            model=self._context.name_for(self._work.requests[0]),
            context=self._context,
        )
        offsets: dict[int, int] = {}
        with self._context.running():
            async with contextlib.aclosing(self._outputs()) as outputs:
                async for place, output in outputs:
                    self._count(output)
                    usage = self._usage() if chunks.continuous_usage else None
                    parts = []
                    for answer in output.outputs:
                        parts += self._chunks(place, output, answer, chunks, offsets, usage)
                    if parts:
                        yield b"".join(parts)
        yield chunks.end(self._usage(), self._times())

    def _chunks(
        self,
        place: int,
        output: RequestOutput,
        answer: CompletionOutput,
        chunks: ChunkWriter,
        offsets: dict[int, int],
        usage: Mapping[str, Any] | None,
    ) -> list[bytes]:
        index = place * self._work.n + answer.index
        is_first = index not in offsets
        offset = offsets.setdefault(index, 0)
        text, ids, positions = answer.text, answer.token_ids, answer.logprobs
        if self._is_prompt_only:
            text, ids, positions = "", [], None if positions is None else []
        echoed = self._work.echoes[place] if is_first and self._body.echo else ""
        reason = "length" if self._is_prompt_only else end_of(answer)
        text = echoed + text
        rich = self._body.logprobs is not None or self._body.logprob_token_ids or self._body.return_token_ids
        if not rich and usage is None and reason is None:
            return [chunks.text(index, text)] if text else []
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[place] = output.prompt_logprobs
        of_prompt = self._prompt_logprobs.get(place) if is_first else None
        logprobs, offsets[index] = self._logprob_object(output, of_prompt, ids, positions, offset)
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": reason,
            "stop_reason": None if self._is_prompt_only else answer.stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = ids
            if is_first:
                choice["prompt_token_ids"] = output.prompt_token_ids
        return [chunks.chunk(choice, usage)] if text or ids or reason else []

    async def _outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Yield the outputs of all prompts as they come, each with its prompt index."""
        requests, engine = self._work.requests, self._context.engine
        if len(requests) == 1:
            async with contextlib.aclosing(engine.stream(requests[0])) as outputs:
                async for output in outputs:
                    yield 0, output
            return
        arrived: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue(len(requests))

        async def read(place: int, request: ParentRequest) -> None:
            try:
                async with contextlib.aclosing(engine.stream(request)) as outputs:
                    async for output in outputs:
                        await arrived.put((place, output))
                await arrived.put((place, None))
            except Exception as error:
                await arrived.put((place, error))

        tasks = [asyncio.create_task(read(place, request)) for place, request in enumerate(requests)]
        try:
            num_open = len(requests)
            while num_open:
                place, update = await arrived.get()
                if isinstance(update, BaseException):
                    raise update
                if update is None:
                    num_open -= 1
                else:
                    yield place, update
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
