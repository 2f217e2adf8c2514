"""Replies of generate become completions."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import RequestOutputKind
from server.context import ServerContext
from server.errors import bad_request
from server.prompts import tokenizer_of
from server.protocol.completions import CompletionRequest
from server.protocol.nested import parse
from server.protocol.scale_out import TokensReply
from server.routes.completions import CompletionReply, CompletionWork
from server.sampling import sampling_params
from server.scale_out.derender import TokenAnswer, TokenReader, reason_of, tell_aborted


class CompletionReader:
    """Reads the answers to the prompts of a completion request."""

    def __init__(
        self,
        context: ServerContext,
        given: Mapping[str, Any] | None,
        replies: Sequence[TokensReply],
        prompt_ids: Sequence[Sequence[int]],
        *,
        stream: bool = False,
    ):
        has_logprobs = any(choice.logprobs is not None for reply in replies for choice in reply.choices)
        fields = {"prompt": "", "logprobs": 20 if has_logprobs else None} if given is None else given
        body = parse(CompletionRequest, {**fields, "stream": stream, "stream_options": None}, "completion_request")
        if body.use_beam_search or (body.echo and body.max_tokens == 0):
            raise bad_request(
                "completion_request asks for what is not rendered: beam search, or the prompt alone", "completion_request"
            )
        if stream and body.echo:
            raise bad_request(
                "completion_request.echo cannot be streamed here; the prompt is yours already", "completion_request"
            )
        params = sampling_params(body, {}, context.options.limits, max_tokens=None, logprobs=None)
        kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
        params = dataclasses.replace(params, output_kind=kind, structured_outputs=None)
        self._readers = [
            TokenReader(context, reply.request_id or "", ids, params, [choice.index for choice in reply.choices] or [0])
            for reply, ids in zip(replies, prompt_ids, strict=True)
        ]
        tokenizer = tokenizer_of(context.engine, "generate_responses")
        texts: list[Any] = body.prompt if isinstance(body.prompt, list) and len(body.prompt) == len(replies) else [body.prompt]
        is_text = given is not None and len(texts) == len(replies) and not body.truncate_prompt_tokens
        echoes = [
            texts[place] if is_text and isinstance(texts[place], str) else tokenizer.decode(list(ids))
            for place, ids in enumerate(prompt_ids if body.echo else ())
        ]
        requests = [reader.request for reader in self._readers]
        most = max((len(reply.choices) for reply in replies), default=1)
        self.reply = CompletionReply(body, CompletionWork(replies[0].request_id or "", max(1, most), requests, echoes), context)

    def read(self, answers: Sequence[TokenAnswer], place: int = 0) -> RequestOutput | None:
        """The output of a prompt's answers, or of parts of them."""
        return self._readers[place].read(answers)


def derendered(
    context: ServerContext, given: Mapping[str, Any] | None, replies: Sequence[TokensReply], prompt_ids: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """The completion with these whole answers to each prompt. Raises ApiError or InvalidRequestError."""
    reader = CompletionReader(context, given, replies, prompt_ids)
    outputs, answers = [], []
    for place, reply in enumerate(replies):
        whole = [TokenAnswer.of(choice, context) for choice in reply.choices]
        for answer in whole:
            answer.finish_reason = answer.finish_reason or "stop"
        output = reader.read(whole, place)
        if output is None:
            raise bad_request("generate_responses has a reply without choices", "generate_responses")
        for written in output.outputs:
            written.finish_reason = reason_of(written)
        outputs.append(output)
        answers += whole
    found = reader.reply.of_outputs(outputs)
    tell_aborted(found["choices"], answers)
    return found
