"""One OpenTelemetry span per request, exported by OTLP. Needs the extra `otel`, imported only if tracing is enabled."""

import os
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from jaxllm import __version__, clock
from jaxllm.errors import ConfigError, JaxLLMError
from jaxllm.outputs import RequestMetrics
from jaxllm.text.input_processor import ParentRequest

SPAN_NAME = "llm_request"
PROTOCOL_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
PROTOCOLS = ("grpc", "http/protobuf")
_NANOSECONDS = 1_000_000_000
_W3C_HEADERS = (b"traceparent", b"tracestate")
_MAX_HEADER_BYTES = 1024
_headers: ContextVar[Mapping[str, str]] = ContextVar("trace headers")
"""Trace headers of the HTTP request that the current task serves."""


class TraceHeaders:
    """ASGI middleware that stores the W3C trace headers of each request for its spans."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            found = {
                name.decode(): value.decode("latin-1")
                for name, value in scope["headers"]
                if name in _W3C_HEADERS and len(value) <= _MAX_HEADER_BYTES
            }
            _headers.set(found)
        await self._app(scope, receive, send)


class Tracer:
    """Sends spans to an OTLP collector, in batches, from a separate thread."""

    def __init__(self, provider: Any):
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("jaxllm", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def request_ended(self, request: ParentRequest, metrics: RequestMetrics | None, error: BaseException | None) -> None:
        """Record a finished request as a child of the span in its HTTP request's headers.

        `error` is the cause of its end, if any. Without metrics the request ended before it produced anything.
        """
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.status import Status, StatusCode

        carrier = _headers.get({})
        metrics = metrics or RequestMetrics(arrival_time=request.arrival_time)
        end = metrics.finished_time or clock.now()
        span = self._tracer.start_span(
            SPAN_NAME,
            context=self._propagator.extract(carrier) if carrier else None,
            kind=SpanKind.SERVER,
            start_time=int(clock.wall(request.arrival_time) * _NANOSECONDS),
            attributes=attributes(request, metrics, end),
        )
        if isinstance(error, JaxLLMError):  # every other exception means that the client disconnected
            span.set_status(Status(StatusCode.ERROR, str(error)))
        span.end(int(clock.wall(end) * _NANOSECONDS))

    def shutdown(self) -> None:
        """Send the remaining spans."""
        self._provider.shutdown()


def attributes(request: ParentRequest, metrics: RequestMetrics, end: float) -> dict[str, Any]:
    """A span's attributes, by OpenTelemetry's names where it has one. Latencies are in seconds; those that do not apply are left out."""
    params = request.params
    search = request.beam_search_params
    decode = None if metrics.first_token_time is None else end - metrics.first_token_time
    first = None if metrics.first_token_time is None else metrics.first_token_time - metrics.arrival_time
    inference = None if decode is None or metrics.prefill_seconds is None else metrics.prefill_seconds + decode
    found = {
        "gen_ai.latency.time_to_first_token": first,
        "gen_ai.latency.e2e": end - metrics.arrival_time,
        "gen_ai.latency.time_in_queue": metrics.queue_seconds,
        "gen_ai.latency.time_in_model_prefill": metrics.prefill_seconds,
        "gen_ai.latency.time_in_model_decode": decode,
        "gen_ai.latency.time_in_model_inference": inference,
        "gen_ai.usage.prompt_tokens": len(request.prompt_token_ids),
        "gen_ai.usage.cache_read.input_tokens": metrics.num_cached_tokens,
        **{f"jaxllm.usage.loaded_tokens.{source}": count for source, count in (metrics.loaded_tokens or {}).items()},
        "gen_ai.usage.completion_tokens": metrics.num_generation_tokens,
        "gen_ai.request.id": request.request_id,
        "gen_ai.request.max_tokens": (search or params).max_tokens,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.n": (search or params).n,
    }
    return {name: value for name, value in found.items() if value is not None}


def make_tracer(endpoint: str | None, *, service_name: str = "jaxllm", exporter: Any = None) -> Tracer | None:
    """A tracer that exports to `endpoint` (a URL), or None without one. `exporter` replaces the endpoint's.

    The protocol is grpc, or http/protobuf if $OTEL_EXPORTER_OTLP_TRACES_PROTOCOL says so. Raises ConfigError.
    """
    if endpoint is None:
        return None
    try:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise ConfigError("--otlp-traces-endpoint needs OpenTelemetry: pip install 'jaxllm[otel]'") from None
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"--otlp-traces-endpoint is {endpoint!r}, must be a URL such as http://127.0.0.1:4317")
    name = os.environ.get("OTEL_SERVICE_NAME") or service_name
    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: name}))
    provider.add_span_processor(BatchSpanProcessor(exporter or _exporter(endpoint)))
    return Tracer(provider)


def _exporter(endpoint: str) -> Any:
    protocol = os.environ.get(PROTOCOL_VARIABLE, PROTOCOLS[0])
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint=endpoint, insecure=endpoint.startswith("http://"))
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        return HttpExporter(endpoint=endpoint)
    raise ConfigError(f"{PROTOCOL_VARIABLE} is {protocol!r}, must be one of {', '.join(PROTOCOLS)}")
