import sys
from collections.abc import Iterator
from typing import Any

import pytest

from jaxllm.async_llm import AsyncLLM
from jaxllm.errors import ConfigError, EngineError
from jaxllm.outputs import RequestMetrics
from jaxllm.request import EngineCoreRequest
from jaxllm.sampling_params import SamplingParams
from jaxllm.text.input_processor import ParentRequest
from server import tracing
from server.app import create_app
from server.tracing import Tracer, attributes, make_tracer
from tests.server.client import Client
from tests.server.conftest import options

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def request() -> ParentRequest:
    params = SamplingParams(max_tokens=5, temperature=0.5, top_p=0.9)
    child = EngineCoreRequest(request_id="c", prompt_token_ids=[1, 2], sampling_params=params)
    return ParentRequest("r", "i", None, [1, 2], params, [child], arrival_time=100.0)


@pytest.fixture(scope="module")
def spans(engine: AsyncLLM) -> Iterator[Any]:
    """Spans as they are exported, from an application around a fake engine."""
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracing, "_exporter", lambda endpoint: exporter)
        app = create_app(engine, options(otlp_traces_endpoint="http://127.0.0.1:4317"))
    assert engine.request_ended is not None
    tracer: Tracer = engine.request_ended.__self__

    def ended(headers: dict[str, str], body: dict[str, Any]) -> list[Any]:
        exporter.clear()
        with Client(app) as client:
            client.post("/v1/completions", json=body, headers=headers)
        tracer._provider.force_flush()
        return list(exporter.get_finished_spans())

    yield ended
    engine.request_ended = None
    tracer.shutdown()


@pytest.mark.parametrize("stream", [False, True])
def test_each_request_is_a_span_below_that_of_its_caller(spans: Any, stream: bool) -> None:
    body = {"model": "m", "prompt": "one two", "max_tokens": 3, "temperature": 0.5, "stream": stream}
    (span,) = spans({"traceparent": f"00-{TRACE}-{PARENT}-01"}, body)
    assert (span.name, span.kind.name) == ("llm_request", "SERVER")
    assert format(span.context.trace_id, "032x") == TRACE and format(span.parent.span_id, "016x") == PARENT
    assert span.attributes["gen_ai.usage.completion_tokens"] == 3 and span.attributes["gen_ai.request.temperature"] == 0.5
    assert span.end_time >= span.start_time


def test_a_beam_search_is_one_span(spans: Any) -> None:
    (span,) = spans({}, {"prompt": "one two", "max_tokens": 4, "n": 2, "use_beam_search": True})
    told = {name: span.attributes[f"gen_ai.{name}"] for name in ("request.n", "request.max_tokens", "usage.completion_tokens")}
    assert told == {"request.n": 2, "request.max_tokens": 4, "usage.completion_tokens": 8}


def test_a_request_without_a_caller_s_span_is_a_root(spans: Any) -> None:
    (span,) = spans({"traceparent": "nonsense"}, {"model": "m", "prompt": "one", "max_tokens": 2})
    assert span.parent is None


def test_cached_tokens_are_told_by_where_they_were_kept() -> None:
    found = attributes(request(), RequestMetrics(100.0, num_cached_tokens=48, loaded_tokens={"host": 32}), 102.0)
    assert (found["gen_ai.usage.cache_read.input_tokens"], found["jaxllm.usage.loaded_tokens.host"]) == (48, 32)
    assert not [name for name in attributes(request(), RequestMetrics(100.0), 102.0) if "cache" in name or "loaded" in name]


def test_latencies_add_up() -> None:
    metrics = RequestMetrics(100.0, first_token_time=100.5, finished_time=102.0, queue_seconds=0.1, prefill_seconds=0.3)
    found = attributes(request(), metrics, 102.0)
    assert found["gen_ai.latency.time_to_first_token"] == 0.5 and found["gen_ai.latency.e2e"] == 2.0
    assert found["gen_ai.latency.time_in_model_decode"] == 1.5
    assert found["gen_ai.latency.time_in_model_inference"] == pytest.approx(1.8)
    assert found["gen_ai.request.id"] == "r" and found["gen_ai.request.max_tokens"] == 5


def test_a_failed_request_is_an_error_and_has_no_first_token() -> None:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    tracer = make_tracer("http://127.0.0.1:4317", exporter=exporter)
    assert tracer is not None
    tracer.request_ended(request(), None, EngineError("the step failed"))
    tracer.shutdown()
    (span,) = exporter.get_finished_spans()
    assert span.status.description == "the step failed"
    assert "gen_ai.latency.time_to_first_token" not in span.attributes


def test_nothing_is_imported_and_nothing_runs_without_an_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    assert make_tracer(None) is None
    with pytest.raises(ConfigError, match=r"jaxllm\[otel\]"):
        make_tracer("http://127.0.0.1:4317")


def test_an_endpoint_must_be_a_url() -> None:
    with pytest.raises(ConfigError, match="must be a URL"):
        make_tracer("localhost:4317")
