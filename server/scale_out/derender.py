"""Token ids of answers become a chat completion or a completion, whole or chunk by chunk, by the readers of those APIs."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxllm.outputs import CompletionOutput, EngineCoreOutput, Logprob, RequestOutput
from jaxllm.request import EngineCoreRequest, FinishReason
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.text.input_processor import ParentRequest
from jaxllm.text.output_processor import OutputProcessor
from server.chat_deltas import ChatDelta, join_into
from server.chat_service import PreparedChat
from server.context import ServerContext
from server.errors import bad_request
from server.prompts import tokenizer_of
from server.protocol.chat import ChatCompletionRequest
from server.protocol.nested import parse
from server.protocol.scale_out import TokensChoice
from server.routes.chat import ChatReply, to_conversation
from server.usage import Usage

NO_REQUEST: Mapping[str, Any] = {"messages": [{"role": "user", "content": ""}]}
"""The chat request of answers that are plain text."""
Positions = list[dict[int, Logprob]]


@dataclass
class TokenAnswer:
    """An answer as token ids, whole or in part."""

    index: int
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: Positions | None = None

    @classmethod
    def of(cls, choice: TokensChoice, context: ServerContext) -> "TokenAnswer":
        """Read a choice of generate. Raises ApiError for ids that the vocabulary lacks."""
        tokenizer, ids = tokenizer_of(context.engine, "generate_response"), choice.token_ids or []
        if len(ids) > context.engine.max_model_len:
            raise bad_request(f"token_ids has {len(ids)} ids, at most {context.engine.max_model_len} are possible", "token_ids")
        content = [] if choice.logprobs is None else choice.logprobs.content or []
        rows = [[own, *own.top_logprobs] for own in content]
        if wrong := [id for id in (*ids, *(each.token_id for row in rows for each in row)) if id >= len(tokenizer)]:
            raise bad_request(f"token_ids has the id {wrong[0]}; the vocabulary has 0 to {len(tokenizer) - 1}", "token_ids")
        if content and len(content) != len(ids):
            raise bad_request(f"logprobs.content has {len(content)} entries for {len(ids)} token_ids", "logprobs")
        positions: Positions | None = None
        if choice.logprobs is not None and choice.logprobs.content is not None:
            positions = [
                {each.token_id: Logprob(each.logprob, each.rank, tokenizer.token_text(each.token_id)) for each in row}
                for row in rows
            ]
        return cls(choice.index, ids, choice.finish_reason, choice.stop_reason, positions)


class TokenReader:
    """Turns the token ids of one prompt's answers into RequestOutputs, as `RequestProcessor` does."""

    def __init__(
        self, context: ServerContext, request_id: str, prompt_ids: Sequence[int], params: SamplingParams, indices: Sequence[int]
    ):
        if not indices or len(set(indices)) < len(indices):
            raise bad_request("choices is empty, or has an index twice", "choices")
        self._eos = frozenset(context.engine.input_processor.eos_token_ids)
        tokenizer = tokenizer_of(context.engine, "generate_response")
        params = dataclasses.replace(params, logprobs=None, logprob_token_ids=None, prompt_logprobs=None)
        self._params, ids = params, list(prompt_ids)
        children = [
            EngineCoreRequest(request_id=f"{index}_{request_id}", prompt_token_ids=ids, sampling_params=params)
            for index in indices
        ]
        self.request = ParentRequest(request_id, request_id, None, ids, params, children, 0.0)
        self._engine_ids = {index: child.request_id for index, child in zip(indices, children, strict=True)}
        self._indices = list(indices)
        self._processor = OutputProcessor(tokenizer)
        self._processor.add(self.request)

    def read(self, answers: Sequence[TokenAnswer]) -> RequestOutput | None:
        """The output after these answers or parts of answers; None if none is due. Whole answers come all at once."""
        output: RequestOutput | None = None
        for answer in answers:
            engine_id = self._engine_ids[answer.index]
            ends_in_text = self._ends_in_text(answer)
            part = EngineCoreOutput(engine_id, answer.token_ids, None if ends_in_text else FinishReason.STOP)
            outputs = [found for _, found in self._processor.process([part]).outputs]
            if answer.finish_reason is not None and ends_in_text:
                end = EngineCoreOutput(engine_id, [], FinishReason.LENGTH)  # ignored if a stop string has ended it
                outputs += [found for _, found in self._processor.process([end]).outputs]
            for found in outputs:
                output = found if output is None else _together(output, found)
        by_index = {answer.index: answer for answer in answers}
        for written in () if output is None else output.outputs:
            given = by_index[self._indices[written.index]]
            written.index, written.logprobs = given.index, given.logprobs
            written.finish_reason, written.stop_reason = given.finish_reason, given.stop_reason
        return output

    def _ends_in_text(self, answer: TokenAnswer) -> bool:
        """Whether the last token belongs to the text; if not, it has ended the answer."""
        if answer.finish_reason != "stop" or not answer.token_ids or isinstance(answer.stop_reason, str):
            return True
        last = answer.token_ids[-1]
        return not (last in self._eos or last in (self._params.stop_token_ids or ()) or last == answer.stop_reason)


def _together(earlier: RequestOutput, later: RequestOutput) -> RequestOutput:
    """Two outputs of one chunk, whose second part has what was held back."""
    first, last = earlier.outputs[0], later.outputs[0]
    first.text += last.text
    first.token_ids = [*first.token_ids, *last.token_ids]
    return earlier


def reason_of(answer: CompletionOutput) -> str | None:
    """Results for the readers of chats: an aborted answer is one that was cut."""
    return {"abort": "length", "repetition": "stop"}.get(answer.finish_reason or "", answer.finish_reason)


class ChatReader:
    """Reads one prompt's answers to a chat request."""

    def __init__(
        self,
        context: ServerContext,
        given: Mapping[str, Any],
        indices: Sequence[int],
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
    ):
        """given: the chat request. params: those that the tokens were sampled with; None: the request's own."""
        body = parse(ChatCompletionRequest, {**given, "stream": stream, "stream_options": None}, "chat_request")
        conversation = to_conversation(body, context, request_id)
        speech, tokenizer = context.chat.speech, tokenizer_of(context.engine, "generate_response")
        tools, choice = speech.check(conversation.tools, conversation.tool_choice)
        own = conversation.params if params is None else dataclasses.replace(params, structured_outputs=None)
        own = dataclasses.replace(own, output_kind=RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY)
        own, reader = speech.prepared(
            own,
            tools,
            choice,
            tokenizer.decode(list(prompt_ids)),
            parallel=conversation.parallel_tool_calls,
            include_reasoning=conversation.include_reasoning,
        )
        own = dataclasses.replace(own, structured_outputs=None)
        self.reads_tokens = own.output_kind is RequestOutputKind.DELTA and not stream
        """Whether whole answers are read token by token, so that those of the reasoning are counted."""
        self._tokens = TokenReader(context, request_id, prompt_ids, own, indices)
        conversation.request_id = request_id
        self.chat = PreparedChat(conversation, self._tokens.request, Usage(prompt_tokens=len(prompt_ids)), reader)
        self.reply = ChatReply(body, self.chat, context)

    def read(self, answers: Sequence[TokenAnswer]) -> list[ChatDelta]:
        """The deltas of these answers or parts of answers."""
        output = self._tokens.read(answers)
        deltas = [] if output is None else self.chat.deltas_of(output, reason_of)
        self.chat.usage.cached_tokens = None
        return deltas


def derendered_chat(
    context: ServerContext,
    given: Mapping[str, Any],
    answers: Sequence[TokenAnswer],
    request_id: str,
    prompt_ids: Sequence[int],
    params: SamplingParams | None = None,
) -> dict[str, Any]:
    """The chat completion with these whole answers. Raises ApiError or InvalidRequestError."""
    whole = [dataclasses.replace(answer, finish_reason=answer.finish_reason or "stop") for answer in answers]
    reader = ChatReader(context, given, [answer.index for answer in answers], request_id, prompt_ids, params)
    by_index: dict[int, ChatDelta] = {}
    for part in [piece for answer in whole for piece in _tokens(answer)] if reader.reads_tokens else [whole]:
        join_into(by_index, reader.read(part))
    reply = reader.reply.of_answers([by_index[index] for index in sorted(by_index)])
    tell_aborted(reply["choices"], whole)
    return reply


def _tokens(answer: TokenAnswer) -> list[list[TokenAnswer]]:
    """An answer in parts of one token."""
    ids, logprobs, last = answer.token_ids, answer.logprobs, len(answer.token_ids) - 1
    parts = [
        [TokenAnswer(answer.index, [token_id], logprobs=None if logprobs is None else [logprobs[place]])]
        for place, token_id in enumerate(ids[:last])
    ]
    rest = None if logprobs is None else logprobs[max(0, last) :]
    return [*parts, [dataclasses.replace(answer, token_ids=ids[max(0, last) :], logprobs=rest)]]


def tell_aborted(choices: Sequence[dict[str, Any]], answers: Sequence[TokenAnswer]) -> None:
    """Say of the choices of aborted answers that they are."""
    aborted = {answer.index for answer in answers if answer.finish_reason == "abort"}
    for choice in choices:
        if choice["index"] in aborted:
            choice["finish_reason"] = "abort"


Read = Callable[[Sequence[TokenAnswer]], Any]


def replay(read: Read, index: int, token_ids: Sequence[int], lengths: Sequence[int]) -> None:
    """Read the earlier chunks of an answer again. Raises ApiError for a state that contradicts itself."""
    if sum(lengths) != len(token_ids):
        raise bad_request(
            f"stream_state.output_chunk_lens add up to {sum(lengths)}, but there are {len(token_ids)} output_token_ids",
            "stream_state",
        )
    start = 0
    for length in lengths:
        read([TokenAnswer(index, list(token_ids[start : start + length]))])
        start += length
