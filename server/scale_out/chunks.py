"""Chunks of generate become chunks of chats or completions. The client carries the state: each call reads all chunks again."""

from collections.abc import Sequence
from typing import Any

from server.chat_deltas import ChatDelta, join_into
from server.context import ServerContext
from server.errors import bad_request
from server.protocol.scale_out import DerenderChatRequest, DerenderCompletionRequest, StreamState, TokensReply
from server.scale_out.completions import CompletionReader
from server.scale_out.derender import NO_REQUEST, ChatReader, TokenAnswer, reason_of, replay


def chat_chunk(
    body: DerenderChatRequest, context: ServerContext, chunk: TokensReply, prompt_ids: Sequence[int]
) -> tuple[list[dict[str, Any]], StreamState]:
    """The choices of a chunk of a chat completion, and the state for the next one. Raises ApiError or InvalidRequestError."""
    state = body.stream_state or StreamState()
    answer = _only_answer(chunk, state, context, prompt_ids)
    if answer is None:
        return [], state
    request = NO_REQUEST if body.chat_request is None else body.chat_request
    reader = ChatReader(context, request, [answer.index], chunk.request_id or "", prompt_ids, stream=True)
    call_ids = list(state.last_tool_call_ids)

    def read(part: Sequence[TokenAnswer]) -> list[ChatDelta]:
        deltas = reader.read(part)
        for call in (call for delta in deltas for call in delta.tool_calls if call.id is not None):
            call_ids[call.index : call.index] = [] if call.index < len(call_ids) else [call.id or ""]
            call.id = call_ids[call.index]
        return deltas

    replay(read, answer.index, state.output_token_ids, state.output_chunk_lens)
    by_index = {answer.index: ChatDelta(answer.index)}
    join_into(by_index, read([answer]))
    choice = reader.reply.choice_of(by_index[answer.index])
    if answer.finish_reason == "abort":
        choice["finish_reason"] = "abort"
    if not state.role_sent:
        choice["delta"] = {"role": context.options.chat.response_role, "content": "", **choice["delta"]}
    return [choice], _next(state, answer).model_copy(update={"role_sent": True, "last_tool_call_ids": call_ids})


def completion_chunk(
    body: DerenderCompletionRequest, context: ServerContext, chunk: TokensReply, prompt_ids: Sequence[int]
) -> tuple[list[dict[str, Any]], StreamState]:
    """The choices of a completion's chunk, and the state for the next one."""
    state = body.stream_state or StreamState()
    answer = _only_answer(chunk, state, context, prompt_ids)
    if answer is None:
        return [], state
    reader = CompletionReader(context, body.completion_request, [chunk], [prompt_ids], stream=True)
    replay(reader.read, answer.index, state.output_token_ids, state.output_chunk_lens)
    output, offset = reader.read([answer]), state.logprob_text_offset
    choices = []
    for written in [] if output is None else output.outputs:
        assert output is not None
        written.finish_reason = written.finish_reason if written.finish_reason == "abort" else reason_of(written)
        choice, offset = reader.reply.choice_of(output, written, offset)
        choices.append(choice)
    return choices, _next(state, answer).model_copy(update={"logprob_text_offset": offset})


def _only_answer(
    chunk: TokensReply, state: StreamState, context: ServerContext, prompt_ids: Sequence[int]
) -> TokenAnswer | None:
    """The part of an answer in a chunk; None for the last chunk, which has the usage alone."""
    if len(chunk.choices) > 1:
        raise bad_request(
            f"generate_chunk has {len(chunk.choices)} choices, must have one: send them one by one", "generate_chunk"
        )
    if not chunk.choices:
        return None
    answer = TokenAnswer.of(chunk.choices[0], context)
    TokenAnswer.of(chunk.choices[0].model_copy(update={"token_ids": state.output_token_ids, "logprobs": None}), context)
    length, most = len(prompt_ids) + len(state.output_token_ids) + len(answer.token_ids), context.engine.max_model_len
    if length > most:
        raise bad_request(f"prompt and output have {length} tokens, at most {most} are possible", "stream_state")
    return answer


def _next(state: StreamState, answer: TokenAnswer) -> StreamState:
    """The state behind a chunk."""
    ids, lengths = state.output_token_ids, state.output_chunk_lens
    if answer.token_ids:
        ids, lengths = [*ids, *answer.token_ids], [*lengths, len(answer.token_ids)]
    return state.model_copy(update={"output_token_ids": ids, "output_chunk_lens": lengths})
