"""Builds SamplingParams from a request's fields. Rejects unsupported fields; SamplingParams checks the ranges."""

import contextlib
from collections.abc import Mapping
from typing import Any

from jaxllm.async_llm import AsyncLLM
from jaxllm.errors import InvalidRequestError
from jaxllm.sampling_params import IN_REQUESTS, MAX_LOGIT_BIAS, READS_ITSELF, RequestOutputKind, SamplingParams
from jaxllm.structured_outputs import StructuredOutputsParams
from server.errors import bad_request, constraint_error
from server.options import LimitOptions
from server.protocol.common import ResponseFormat, SamplingFields, StructuredOutputs

MAX_STOP_CHARACTERS = 1000
MAX_COPIED_IDS = 1 << 21


def sampling_params(
    fields: SamplingFields,
    defaults: Mapping[str, Any],
    limits: LimitOptions,
    *,
    max_tokens: int | None,
    logprobs: int | None,
) -> SamplingParams:
    """A request's sampling parameters; `defaults` are the model's own values. Raises ApiError or InvalidRequestError."""
    check_limits(fields, limits)
    check_copies(fields, 1)
    _check_streaming(fields)
    values = {name: value for name in IN_REQUESTS if (value := getattr(fields, name)) is not None}
    if fields.logit_bias:
        values["logit_bias"] = logit_bias_of(fields.logit_bias)
    if fields.repetition_detection is not None:
        values["repetition_detection"] = fields.repetition_detection.model_dump()
    if (extra := fields.extra_args or fields.vllm_xargs) is not None:
        values["extra_args"] = {name: value if isinstance(value, list) else [value] for name, value in extra.items()}
    values |= {
        "structured_outputs": _constraint(fields),
        "max_tokens": max_tokens,
        "logprobs": logprobs,
        "output_kind": RequestOutputKind.DELTA if fields.stream else RequestOutputKind.FINAL_ONLY,
    }
    return SamplingParams(**{**defaults, **values})


def check_xargs(fields: SamplingFields, params: SamplingParams, engine: AsyncLLM) -> None:
    """Check extra_args under the name that the client gave it, and read texts of numbers. Raises InvalidRequestError."""
    processors = engine.input_processor.processor_arguments
    for name, arguments in (params.extra_args or {}).items():
        if processors.get(name, READS_ITSELF) != READS_ITSELF:
            params.extra_args[name] = [_as_number(each) for each in arguments]  # type: ignore[index]
    if fields.vllm_xargs is not None:
        params.verify_processors(processors, "vllm_xargs")


def _as_number(value: float | str) -> float | str:
    """The number that a text is; anything else as it is."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return float(value)
    return value


def check_limits(fields: SamplingFields, limits: LimitOptions) -> None:
    """Raise ApiError for values above the server's limits."""
    if fields.n is not None and fields.n > limits.max_n:
        raise bad_request(f"n is {fields.n}, must be at most {limits.max_n} (--max-n)", "n")
    if fields.best_of not in (None, fields.n or 1):
        raise bad_request("best_of is not supported; use n and choose among the answers", "best_of", "unsupported_parameter")
    stops = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    if len(stops) > limits.max_stop_strings:
        raise bad_request(
            f"stop has {len(stops)} texts, at most {limits.max_stop_strings} are possible (--max-stop-strings)", "stop"
        )
    if any(len(stop) > MAX_STOP_CHARACTERS for stop in stops):
        raise bad_request(f"stop has a text of more than {MAX_STOP_CHARACTERS} characters", "stop")
    if isinstance(fields.stop, str) and not fields.stop:
        raise bad_request("stop is an empty text; leave it out", "stop")
    if fields.extra_args is not None and fields.vllm_xargs is not None:
        raise bad_request("extra_args and vllm_xargs are two names of the same; use one", "vllm_xargs")
    if fields.length_penalty not in (None, 1.0) and not fields.use_beam_search:
        raise bad_request("length_penalty is for beam search; set use_beam_search or leave it out", "length_penalty")


def check_copies(fields: SamplingFields, num_prompts: int) -> None:
    """Raise ApiError for ids that the engine would get too many copies of: one for each answer."""
    count, answers = len(fields.allowed_token_ids or ()), num_prompts * (fields.n or 1)
    if count * answers > MAX_COPIED_IDS and answers > 1:
        raise bad_request(
            f"allowed_token_ids has {count} ids for each of {answers} answers, at most {MAX_COPIED_IDS} are possible in all; ask for "
            "fewer answers in one request",
            "allowed_token_ids",
        )


def _check_streaming(fields: SamplingFields) -> None:
    if fields.stream_options is not None and not fields.stream:
        raise bad_request("stream_options needs stream to be true", "stream_options")
    if fields.stream and fields.prompt_logprobs is not None:
        raise bad_request("prompt_logprobs cannot be streamed; set stream to false", "prompt_logprobs")


def logit_bias_of(bias: Mapping[str, float]) -> dict[int, float]:
    """The biases by token id. Raises ApiError."""
    found = {}
    for key, value in bias.items():
        if not key.isascii() or not key.isdigit() or len(key) > 10:
            raise bad_request(f"logit_bias has the key {key[:40]!r}, must have token ids only", "logit_bias")
        if not -MAX_LOGIT_BIAS <= value <= MAX_LOGIT_BIAS:
            raise bad_request(f"logit_bias of token {key} is {value}, must be -100 to 100", "logit_bias")
        found[int(key)] = value
    return found


def _constraint(fields: SamplingFields) -> StructuredOutputsParams | None:
    """Convert response_format or structured_outputs to StructuredOutputsParams."""
    formats = fields.response_format
    has_format = formats is not None and formats.type != "text"
    if fields.structured_outputs is not None and has_format:
        raise bad_request("response_format and structured_outputs are both given; use one", "structured_outputs")
    try:
        if fields.structured_outputs is not None:
            return StructuredOutputsParams(**_named(fields.structured_outputs))
        if formats is not None and has_format:
            return StructuredOutputsParams(**_of_format(formats))
    except InvalidRequestError as error:
        raise constraint_error(error, constraint_param(fields)) from None
    return None


def constraint_param(fields: SamplingFields) -> str:
    """The name of the field that constrains the answer."""
    return "response_format" if fields.structured_outputs is None and fields.response_format else "structured_outputs"


def _named(given: StructuredOutputs) -> dict[str, Any]:
    found = {name: getattr(given, name) for name in given.model_fields_set}
    if "json_schema" in found:
        found["json"] = found.pop("json_schema")
    return {name: value for name, value in found.items() if value is not None}


def _of_format(formats: ResponseFormat) -> dict[str, Any]:
    """Convert a response_format to fields of StructuredOutputsParams."""
    if formats.schema_ is not None:
        raise bad_request(
            "response_format.schema belongs into json_schema: {type: json_schema, json_schema: {name, schema}}",
            "response_format",
        )
    if formats.type == "json_object":
        return {"json_object": True}
    if formats.type == "structural_tag":
        given = formats.model_dump(exclude_none=True, include={"type", "structures", "triggers", "format"})
        return {"structural_tag": given}
    if formats.json_schema is None:
        raise bad_request("response_format is json_schema but has no json_schema", "response_format")
    if formats.json_schema.schema_ is None:
        raise bad_request("response_format.json_schema has no schema", "response_format")
    if not isinstance(formats.json_schema.schema_, (dict, bool)):
        raise bad_request("response_format.json_schema.schema must be a JSON Schema, which is an object", "response_format")
    return {"json": formats.json_schema.schema_}
