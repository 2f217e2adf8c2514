"""Maps the engine's finish reasons to OpenAI's."""

from jaxllm.log import logger, safe
from jaxllm.outputs import CompletionOutput, PoolingRequestOutput
from jaxllm.request import ErrorKind
from server.errors import ApiError, overloaded


def end_of(answer: CompletionOutput | PoolingRequestOutput) -> str | None:
    """The finish reason, "stop" or "length"; None before the end. Raises ApiError for failures."""
    reason = answer.finish_reason
    if reason in (None, "stop", "length"):
        return reason
    if reason == "repetition":
        return "stop"
    if reason == "abort":
        raise ApiError(503, "the request was aborted before its end", code="aborted", retry=True)
    logger.warning("a request failed in the engine: %s", safe(str(getattr(answer, "stop_reason", "")), 300))
    raise failure(answer.error_kind)


def failure(kind: str | None) -> ApiError:
    """The client's error for a request that ended with this kind of error (`jaxllm.request.ErrorKind`)."""
    if kind == ErrorKind.QUEUE_TIMEOUT:
        return overloaded("the request waited longer than requests may; try again later")
    if kind == ErrorKind.TIMEOUT:
        return ApiError(408, "the request took longer than its time limit", code="timeout", retry=False)
    if kind == ErrorKind.OUT_OF_MEMORY:
        return overloaded("the device has no memory for this request now; try again later, or ask for less")
    if kind == ErrorKind.CONSTRAINT:
        message = "what the request allows, biases and forbids leaves no token to go on with; loosen one of them"
        return ApiError(400, message, code="no_token_left", retry=False)
    if kind == ErrorKind.ADAPTER:
        message = "the adapter that `model` names can no longer be loaded, or was unloaded; the server's log has the reason"
        return ApiError(500, message, param="model", code="adapter_not_usable", retry=False)
    if kind == ErrorKind.NOT_FINITE:
        message = "the model computed NaN or infinity for this request: its weights are damaged, or too large for its dtype"
        return ApiError(500, message, code="not_finite", retry=False)
    if kind == ErrorKind.KV_TRANSFER:
        message = "the prefill engine did not deliver the blocks of this prompt; send it again, without kv_transfer_params if it has them"
        return ApiError(500, message, code="kv_transfer", retry=True)
    return ApiError(500, "the engine failed on this request", code="engine_error", retry=False)
