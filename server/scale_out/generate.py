"""Tokens in, tokens out: runs a request of token ids and writes its reply, whole or in chunks."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from jaxllm.errors import InvalidRequestError
from jaxllm.outputs import CompletionOutput, RequestMetrics, RequestOutput
from jaxllm.sampling_params import SamplingParams
from jaxllm.text.input_processor import ParentRequest
from server.context import ServerContext
from server.endings import end_of
from server.errors import bad_request, constraint_error
from server.logprobs import LogprobWriter, finite
from server.prompts import check_length, tokenizer_of
from server.protocol.common import engine_options
from server.protocol.scale_out import GenerateRequest, ParseContext
from server.scale_out.derender import NO_REQUEST, TokenAnswer, derendered_chat
from server.scale_out.sampling import params_of
from server.sse import DONE, event
from server.usage import Usage, per_request_metrics

_json = msgspec.json.encode


def reason_of(answer: CompletionOutput) -> str | None:
    """The finish reason, of an aborted request too, whose tokens count. Raises ApiError for failures."""
    return answer.finish_reason if answer.finish_reason in ("abort", "repetition") else end_of(answer)


async def prepare(body: GenerateRequest, context: ServerContext, request_id: str, adapter: str | None) -> ParentRequest:
    """Check a request for the engine. Raises ApiError or InvalidRequestError."""
    engine, with_text = context.engine, body.output_mode != "tokens"
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options needs stream to be true", "stream_options")
    if body.stream and body.output_mode == "derender":
        raise bad_request("output_mode derender cannot be streamed; use text, or /v1/chat/completions/derender", "output_mode")
    if with_text:
        tokenizer_of(engine, "output_mode")
    if body.output_mode == "derender":
        _check_context(body.parse_context, context)
    params = params_of(
        body.sampling_params,
        context.options.limits,
        stream=bool(body.stream),
        max_tokens=context.default_max_tokens,
        with_text=with_text,
    )
    if with_text and not params.detokenize:
        raise bad_request(f"output_mode {body.output_mode} needs sampling_params.detokenize to be true", "sampling_params")
    check_length(len(body.token_ids), engine.max_model_len, "token_ids")
    params = _constrained(params, body, context)
    options = engine_options(body, queue_timeout_seconds=context.queue_timeout_seconds, adapter=adapter)
    try:
        request = await engine.prepare({"prompt_token_ids": body.token_ids}, params, request_id, options)
    except InvalidRequestError as error:
        if error.param in ("prompt_token_ids", "prompt"):
            raise bad_request(str(error), "token_ids") from None
        if error.param == "structured_outputs":
            raise constraint_error(error, "sampling_params") from None
        raise
    context.request_log.write(request)
    return request


def _check_context(given: ParseContext | None, context: ServerContext) -> None:
    """Raise ApiError or InvalidRequestError, before anything is computed, if the answer could not be read."""
    speech = context.chat.speech
    if given is None and speech.reads_answers:
        raise bad_request(
            "parse_context is missing: without it, output_mode derender cannot tell reasoning and tool calls from text",
            "parse_context",
        )
    asked = _chat_fields(given)
    speech.check(asked.get("tools"), asked.get("tool_choice"))


def _chat_fields(given: ParseContext | None) -> dict[str, Any]:
    """The fields of the chat request that say how its answer is read."""
    names = {"tools", "tool_choice", "parallel_tool_calls", "include_reasoning"}
    return (given or ParseContext()).model_dump(include=names, exclude_none=True)


def _constrained(params: SamplingParams, body: GenerateRequest, context: ServerContext) -> SamplingParams:
    """A structured output applies after the reasoning, unless the request says from where on."""
    form, tokenizer = params.structured_outputs, context.engine.input_processor.tokenizer
    if form is None or tokenizer is None or form.start_after_token_ids is not None or body.reasoning_ended:
        return params
    return replace(params, structured_outputs=context.chat.speech.constrained(form, tokenizer.decode(body.token_ids)))


class GenerateReply:
    """Writes the reply to one request."""

    def __init__(self, body: GenerateRequest, request: ParentRequest, context: ServerContext):
        self._body = body
        self._request = request
        self._context = context
        self._head = {"request_id": request.request_id, "output_mode": body.output_mode}
        params = request.params
        self._num_top = -1 if params.logprob_token_ids else params.logprobs or 0
        self._logprobs = LogprobWriter(
            context.engine.input_processor.tokenizer, as_ids=context.options.replies.return_tokens_as_token_ids
        )
        self._usage = Usage(prompt_tokens=len(request.prompt_token_ids))
        self._metrics: RequestMetrics | None = None

    async def whole(self) -> dict[str, Any]:
        """The reply as one object."""
        last: RequestOutput | None = None
        async with contextlib.aclosing(self._context.engine.stream(self._request)) as outputs:
            async for output in outputs:
                self._count(output)
                last = output
        assert last is not None
        is_read = self._body.output_mode == "derender"
        reply = {
            **self._head,
            "model": self._context.name_for(self._request),
            "created": int(time.time()),
            "choices": await asyncio.to_thread(self._derendered, last) if is_read else [*map(self._choice, last.outputs)],
            "usage": self._usage_object(),
            "prompt_logprobs": None if last.prompt_logprobs is None else self._logprobs.prompt(last.prompt_logprobs),
            "prompt_token_ids": self._request.prompt_token_ids if self._body.return_token_ids else None,
        }
        return {**reply, **self._times()}

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The reply as events."""
        asked = self._body.stream_options
        first: dict[str, Any] = {}
        if self._body.return_token_ids:
            first["prompt_token_ids"] = self._request.prompt_token_ids
        with self._context.running():
            async with contextlib.aclosing(self._context.engine.stream(self._request)) as outputs:
                async for output in outputs:
                    self._count(output)
                    for answer in output.outputs:
                        chunk = {**self._head, "choices": [self._choice(answer)], **first}
                        first = {}
                        if asked is not None and asked.include_usage and asked.continuous_usage_stats:
                            chunk["usage"] = self._usage_object()
                        yield event(_json(chunk))
        if asked is not None and asked.include_usage:
            yield event(_json({**self._head, "choices": [], "usage": self._usage_object(), **self._times()}))
        yield DONE

    def _count(self, output: RequestOutput) -> None:
        usage, self._metrics = self._usage, output.metrics
        usage.completion_tokens += sum(len(answer.token_ids) for answer in output.outputs)
        usage.set_cached(output)

    def _choice(self, answer: CompletionOutput) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": answer.index,
            "finish_reason": reason_of(answer),
            "stop_reason": answer.stop_reason,
            "token_ids": answer.token_ids,
            "logprobs": None,
        }
        if self._body.output_mode == "text":
            choice["text"] = answer.text
        if answer.logprobs is not None:
            content = [*map(_token_logprobs, answer.token_ids, answer.logprobs)]
            if self._body.output_mode == "text":
                content = self._logprobs.chat(answer.token_ids, answer.logprobs, self._num_top)
            choice["logprobs"] = {"content": content}
        return choice

    def _derendered(self, output: RequestOutput) -> list[dict[str, Any]]:
        """The choices of a chat completion."""
        has_logprobs = output.outputs[0].logprobs is not None
        chat_request = {
            **_chat_fields(self._body.parse_context),
            **NO_REQUEST,
            "return_token_ids": True,
            "logprobs": has_logprobs,
            **({"top_logprobs": self._num_top} if has_logprobs else {}),
        }
        answers = [
            TokenAnswer(answer.index, answer.token_ids, reason_of(answer), answer.stop_reason, answer.logprobs)
            for answer in output.outputs
        ]
        reply = derendered_chat(
            self._context, chat_request, answers, self._request.request_id, self._request.prompt_token_ids, self._request.params
        )
        return [{name: value for name, value in choice.items() if value is not None} for choice in reply["choices"]]

    def _usage_object(self) -> Mapping[str, Any]:
        return self._usage.as_dict(tells_cached=self._context.options.replies.enable_prompt_tokens_details)

    def _times(self) -> dict[str, Any]:
        if not self._context.options.replies.enable_per_request_metrics:
            return {}
        is_one = self._request.params.n == 1
        return {"metrics": per_request_metrics(self._metrics, self._usage.completion_tokens) if is_one else None}


def _token_logprobs(token_id: int, position: Any) -> dict[str, Any]:
    """Logprobs by token id: the sampled token, and all that the engine reports, in its order."""

    def entry(token_id: int, found: Any) -> dict[str, Any]:
        return {"token_id": token_id, "logprob": finite(found.logprob), "rank": found.rank}

    if not position or token_id not in position:
        return {"token_id": token_id, "logprob": -9999.0, "rank": None, "top_logprobs": []}
    return {**entry(token_id, position[token_id]), "top_logprobs": [entry(*each) for each in position.items()]}
