"""Puts HTTP metrics and, if they are asked for, traces around an application."""

from jaxllm.async_llm import AsyncLLM
from server.http_metrics import App, HttpMetrics, HttpMetricsMiddleware
from server.tracing import TraceHeaders, Tracer


def observed(app: App, engine: AsyncLLM, metrics: HttpMetrics, tracer: Tracer | None) -> App:
    """The application with its requests counted, and those to the engine traced. To be put in front of everything."""
    if tracer is not None:
        engine.request_ended = tracer.request_ended
        app = TraceHeaders(app)
    return HttpMetricsMiddleware(app, metrics)
