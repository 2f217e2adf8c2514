"""The server's log lines: one per HTTP request, and optionally one per prompt. Contents are logged at debug level only."""

import dataclasses
import logging

from starlette.types import Scope

from jaxllm.errors import JaxLLMError
from jaxllm.log import logger, safe
from jaxllm.outputs import RequestMetrics
from jaxllm.sampling_params import BeamSearchParams, SamplingParams
from jaxllm.text.input_processor import ParentRequest
from server.options import LoggingOptions

QUIET_PATHS = frozenset({"/live", "/ready", "/health", "/ping", "/metrics", "/load", "/version"})
MAX_PATH_CHARACTERS = 200
_DEFAULTS = SamplingParams()


class AccessLog:
    """A line for each HTTP request."""

    def __init__(self, options: LoggingOptions):
        self._is_off = options.disable_uvicorn_access_log
        given = options.disable_access_log_for_endpoints
        self._quiet = QUIET_PATHS if given is None else frozenset(given)

    def write(self, scope: Scope, status: int, seconds: float) -> None:
        """Log an answered request, unless it is a successful one that is excluded from the log."""
        if self._is_off or not logger.isEnabledFor(logging.INFO) or (scope["path"] in self._quiet and status < 400):
            return
        client = scope.get("client")
        path = safe(scope["path"], MAX_PATH_CHARACTERS)
        milliseconds = round(1000 * seconds, 1)
        request_id = scope.get("state", {}).get("request_id")
        extra = {
            "method": scope["method"],
            "path": path,
            "status": status,
            "milliseconds": milliseconds,
            "client": f"{client[0]}:{client[1]}" if client else None,
            "request_id": request_id,
        }
        logger.info("%s %s %d %.1f ms %s", scope["method"], path, status, milliseconds, request_id or "", extra=extra)


class RequestLog:
    """Log a line for each prompt that the engine accepts, and one when its answers have ended, with --enable-log-requests."""

    def __init__(self, options: LoggingOptions):
        self.is_on = options.enable_log_requests
        self._max_length = options.max_log_len

    def write(self, request: ParentRequest) -> None:
        """Log a request's sampling parameters, and its prompt at debug level."""
        if not self.is_on:
            return
        request_id, num_tokens = safe(request.request_id), len(request.prompt_token_ids)
        adapter = request.children[0].options.adapter
        extra = {"request_id": request_id, "num_prompt_tokens": num_tokens, "adapter": adapter}
        logger.info(
            "%s: %d prompt tokens, %s%s",
            request_id,
            num_tokens,
            "" if adapter is None else f"adapter {safe(adapter, 100)}, ",
            _numbers(request.beam_search_params or request.params),
            extra=extra,
        )
        if logger.isEnabledFor(logging.DEBUG):
            text = "" if request.prompt is None else safe(request.prompt, self._max_length)
            logger.debug("%s: prompt %r, ids %s", request_id, text, request.prompt_token_ids[: self._max_length])

    def ended(self, request: ParentRequest, metrics: RequestMetrics | None, error: BaseException | None) -> None:
        """Log what became of a request: see AsyncLLM.request_ended."""
        num_tokens, request_id = len(request.prompt_token_ids), safe(request.request_id)
        why = "" if error is None else ": the client disconnected"
        if isinstance(error, JaxLLMError):
            why = f": {type(error).__name__}"
        if metrics is None or metrics.num_cached_tokens is None:
            logger.info("%s: ended without a token%s", request_id, why, extra={"request_id": request_id})
            return
        loaded = metrics.loaded_tokens or {}
        computed, on_device = num_tokens - metrics.num_cached_tokens, metrics.num_cached_tokens - sum(loaded.values())
        sources = {"computed": computed, "device": on_device, **loaded}
        logger.info(
            "%s: ended, %d prompt tokens (%s), %d output tokens%s",
            request_id,
            num_tokens,
            ", ".join(f"{source} {count}" for source, count in sources.items()),
            metrics.num_generation_tokens,
            why,
            extra={"request_id": request_id, "prompt_tokens_by_source": sources},
        )


def _numbers(params: SamplingParams | BeamSearchParams) -> str:
    """The non-default parameters that are numbers or switches: texts count as contents."""
    found = []
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        if isinstance(value, (int, float)) and value != getattr(_DEFAULTS, field.name, field.default):
            found.append(f"{field.name}={value}")
    return ", ".join(found) or "default sampling"
