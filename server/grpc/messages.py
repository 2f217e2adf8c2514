"""Converts gRPC messages to engine requests and engine outputs to gRPC messages."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from jaxllm.outputs import CompletionOutput, Logprob, RequestOutput
from jaxllm.request_options import OPTION_NAMES
from server.errors import as_api_error
from server.grpc import jaxllm_pb2 as pb
from server.protocol.common import SamplingFields


def sampling_fields(request: pb.GenerateRequest) -> SamplingFields:
    """A request's settings as fields of an HTTP request, so that both get the same checks. Raises ApiError.

    Excludes `max_tokens` and `logprobs`, which differ between HTTP endpoints.
    """
    values: dict[str, Any] = {"stream": not request.final_only, **option_values(request)}
    for field, value in request.sampling.ListFields():
        if field.name in ("max_tokens", "logprobs"):
            continue
        if field.name == "structured_outputs":
            values[field.name] = _structured_outputs(value)
        elif field.name == "logit_bias":
            values[field.name] = {str(token): bias for token, bias in value.items()}
        else:
            values[field.name] = list(value) if field.is_repeated else value
    try:
        return SamplingFields.model_validate(values)
    except ValidationError as error:
        raise as_api_error(error) from None


def option_values(request: pb.GenerateRequest) -> dict[str, Any]:
    """The options of RequestOptions that a request sets."""
    return {field.name: value for field, value in request.ListFields() if field.name in OPTION_NAMES}


def _structured_outputs(given: pb.StructuredOutputs) -> dict[str, Any]:
    values: dict[str, Any] = {field.name: value for field, value in given.ListFields()}
    if "choice" in values:
        values["choice"] = list(given.choice.texts)
    return values


def response_of(output: RequestOutput, request_id: str, *, is_first: bool) -> pb.GenerateResponse:
    """The client's message for an output."""
    response = pb.GenerateResponse(request_id=request_id, num_cached_tokens=output.num_cached_tokens, finished=output.finished)
    if is_first:
        response.prompt_token_ids.extend(output.prompt_token_ids)
        if output.prompt_logprobs is not None:
            response.prompt_logprobs.extend(_position(place) for place in output.prompt_logprobs)
    response.outputs.extend(_completion(answer) for answer in output.outputs)
    return response


def _completion(answer: CompletionOutput) -> pb.Completion:
    completion = pb.Completion(index=answer.index, text=answer.text, token_ids=answer.token_ids)
    if answer.logprobs is not None:
        completion.logprobs.extend(_position(place) for place in answer.logprobs)
    if answer.finish_reason is not None:
        completion.finish_reason = answer.finish_reason
    if isinstance(answer.stop_reason, str):
        completion.stop_text = answer.stop_reason
    elif answer.stop_reason is not None:
        completion.stop_token_id = answer.stop_reason
    return completion


def _position(place: Mapping[int, Logprob] | None) -> pb.PositionLogprobs:
    entries: Sequence[pb.TokenLogprob] = [
        pb.TokenLogprob(token_id=token_id, logprob=entry.logprob, rank=entry.rank, text=entry.decoded_token)
        for token_id, entry in (place or {}).items()
    ]
    return pb.PositionLogprobs(entries=entries)
