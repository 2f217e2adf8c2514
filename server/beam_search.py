"""Builds BeamSearchParams from a request's fields. Rejects by name each field that a search does not support."""

from collections.abc import Mapping
from typing import Any

from jaxllm.beam_search import step_params
from jaxllm.errors import InvalidRequestError
from jaxllm.sampling_params import IN_REQUESTS, BeamSearchParams
from server.errors import ApiError, bad_request
from server.options import LimitOptions
from server.protocol.chat import ChatCompletionRequest
from server.protocol.common import ResponseFormat, SessionFields
from server.protocol.completions import CompletionRequest
from server.sampling import check_limits

FIELD = "use_beam_search"
HONOURED = frozenset(
    # How to search
    (
        "use_beam_search",
        "n",
        "best_of",
        "length_penalty",
        "max_tokens",
        "max_completion_tokens",
        "ignore_eos",
        "allowed_token_ids",
    )
    # Input
    + ("model", "prompt", "messages", "tools", "tool_choice", "documents", "chat_template", "chat_template_kwargs")
    + ("add_generation_prompt", "continue_final_message", "add_special_tokens", "reasoning_effort", "mm_processor_kwargs")
    + ("truncate_prompt_tokens", "truncation_side", "request_id", *SessionFields.model_fields)
    # What to return
    + ("include_stop_str_in_output", "skip_special_tokens", "logprobs", "top_logprobs", "echo", "include_reasoning")
    + ("parallel_tool_calls", "modalities", "verbosity")
    + ("return_token_ids", "return_tokens_as_token_ids", "include_timings")
    # Labels without effect on any request
    + ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
)
"""Fields with the same meaning in a search as in sampling. All others are rejected unless they have no effect."""
_ASKS_NOTHING: Mapping[str, tuple[Any, ...]] = {
    **{name: where.neutral for name, where in IN_REQUESTS.items()},
    "stream": (False,),
    "vllm_xargs": ({},),
    "kv_transfer_params": ({},),
}
"""Values that clients send by default."""
_WHY: Mapping[str, str] = {
    "stream": "the best answers are known at the end alone; leave stream out",
    "temperature": "answers are ranked by the model's own logprobs; leave temperature out or send 0",
    "response_format": "a search follows no grammar; leave response_format out, or sample",
    "structured_outputs": "a search follows no grammar; leave structured_outputs out, or sample",
}


def beam_search_params(
    fields: CompletionRequest | ChatCompletionRequest,
    limits: LimitOptions,
    *,
    max_tokens: int,
    logprobs: int | None,
    max_logprobs: int,
) -> BeamSearchParams:
    """The search that a request asks for, on an engine with this `max_logprobs` (-1: no limit). Raises ApiError."""
    check_limits(fields, limits)
    _refuse_others(fields)
    try:
        params = BeamSearchParams(
            beam_width=1 if fields.n is None else fields.n,
            max_tokens=max_tokens,
            ignore_eos=fields.ignore_eos,
            length_penalty=1.0 if fields.length_penalty is None else fields.length_penalty,
            include_stop_str_in_output=fields.include_stop_str_in_output,
            skip_special_tokens=fields.skip_special_tokens,
            allowed_token_ids=fields.allowed_token_ids,
            logprobs=logprobs,
        )
        step_params(params, max_logprobs)
    except InvalidRequestError as error:
        own = {"beam_width": "n", "logprobs": "top_logprobs" if isinstance(fields, ChatCompletionRequest) else "logprobs"}
        name = error.param or FIELD
        raise bad_request(str(error).replace(name, own.get(name, name), 1), own.get(name, name)) from None
    return params


def _refuse_others(fields: CompletionRequest | ChatCompletionRequest) -> None:
    for name, field in type(fields).model_fields.items():
        value = getattr(fields, name)
        if name in HONOURED or value is None or value == field.default or value in _ASKS_NOTHING.get(name, ()):
            continue
        if isinstance(value, ResponseFormat) and value.type == "text":
            continue
        raise _refusal(name)
    if isinstance(fields, CompletionRequest):
        if fields.echo and fields.logprobs is not None:
            raise _refusal("echo", "the logprobs of prompts are not computed; leave echo or logprobs out")
        return
    choice = fields.tool_choice
    if choice not in (None, "none", "auto"):
        raise _refusal("tool_choice", "a search follows no grammar, which enforced calls need; send auto or none, or sample")
    if choice != "none" and any(tool.function.strict for tool in fields.tools or ()):
        raise _refusal("tools", "a search follows no grammar, which strict tools need; leave strict out, or sample")


def _refusal(name: str, why: str | None = None) -> ApiError:
    why = why or _WHY.get(name, f"leave {name} out, or sample")
    return bad_request(f"{name} cannot be combined with {FIELD}: {why}", name, "unsupported_parameter")
