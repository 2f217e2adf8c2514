import asyncio
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, HTTPException, Request, Response
from starlette.testclient import TestClient

from jaxllm.errors import ConfigError
from jaxllm.metrics.merge import merged
from jaxllm.metrics.metric import Counter, Histogram, Summary
from jaxllm.metrics.prometheus import exposition
from server.http_metrics import HttpMetrics, HttpMetricsMiddleware
from tests.server.canned import WEATHER, caller_app
from tests.server.client import Client


def application() -> tuple[FastAPI, HttpMetrics]:
    app, metrics = FastAPI(), HttpMetrics("m")

    @app.post("/v1/lengths")
    async def length(request: Request) -> Response:
        return Response(b"12345" if await request.body() else b"")

    @app.get("/v1/things/{name}")
    def thing(name: str) -> str:
        if name == "none":
            raise HTTPException(404)
        return name

    @app.get("/broken")
    def broken() -> None:
        raise RuntimeError

    @app.get("/health")
    def health() -> None:
        return None

    return app, metrics


def counts(metrics: HttpMetrics) -> dict[tuple[str, str, str], float]:
    return {
        (m.labels["method"], m.labels["status"], m.labels["handler"]): m.value
        for m in metrics.snapshot()
        if isinstance(m, Counter) and m.name == "http_requests"
    }


def test_requests_are_counted_by_route_and_not_by_path() -> None:
    app, metrics = application()
    with TestClient(HttpMetricsMiddleware(app, metrics), raise_server_exceptions=False) as client:
        for path in ("/v1/things/a", "/v1/things/b", "/v1/things/none", "/no/such/path", "/broken", "/health"):
            client.get(path)
        client.request("BREW", "/v1/things/a")
    assert counts(metrics) == {
        ("GET", "2xx", "/v1/things/{name}"): 2,
        ("GET", "4xx", "/v1/things/{name}"): 1,
        ("GET", "4xx", "none"): 1,
        ("GET", "5xx", "/broken"): 1,
        ("other", "4xx", "/v1/things/{name}"): 1,
    }
    durations = [m for m in metrics.snapshot() if isinstance(m, Histogram) and m.name == "http_request_duration_seconds"]
    assert {(m.labels["method"], m.labels["handler"]) for m in durations} == {(key[0], key[2]) for key in counts(metrics)}
    (together,) = [m for m in metrics.snapshot() if m.name == "http_request_duration_highr_seconds"]
    assert isinstance(together, Histogram) and (together.count, together.labels) == (6, {})


def test_bodies_are_summed_up_by_route() -> None:
    app, metrics = application()
    with TestClient(HttpMetricsMiddleware(app, metrics)) as client:
        client.post("/v1/lengths", content=b"123")
        client.post("/v1/lengths")
    sizes = {m.name: m for m in metrics.snapshot() if isinstance(m, Summary)}
    assert {name: (m.labels, m.count, m.sum) for name, m in sizes.items()} == {
        "http_request_size_bytes": ({"handler": "/v1/lengths"}, 2, 3),
        "http_response_size_bytes": ({"handler": "/v1/lengths"}, 2, 5),
    }
    page = exposition(merged([metrics.snapshot(), metrics.snapshot()])).decode()
    assert 'http_response_size_bytes_count{handler="/v1/lengths"} 4.0' in page
    assert 'http_response_size_bytes_sum{handler="/v1/lengths"} 10.0' in page


def test_a_client_that_leaves_before_the_answer_is_counted_as_gone() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise asyncio.CancelledError

    async def send(message: Any) -> None: ...
    async def receive() -> Any: ...

    metrics = HttpMetrics("m")
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(HttpMetricsMiddleware(app, metrics)({"type": "http", "path": "/x", "method": "GET"}, receive, send))
    assert counts(metrics) == {("GET", "4xx", "none"): 1}


def test_tool_calls_are_counted_by_mode_outcome_and_api() -> None:
    def calls(metrics: HttpMetrics) -> dict[tuple[str, str, str], float]:
        found = [m for m in metrics.snapshot() if m.name == "jaxllm:tool_call_parser_invocations"]
        assert all(m.labels["model_name"] == "m" and len(m.labels) == 4 for m in found)
        return {(m.labels["mode"], m.labels["outcome"], m.labels["request_type"]): m.value for m in found}

    metrics = HttpMetrics("m")
    assert len(calls(metrics)) == 12 and not any(calls(metrics).values()), "series exist before the first request"
    metrics.tool_calls_parsed("responses", True, True)
    metrics.tool_calls_parsed("chat_completions", False, False)
    assert {key: value for key, value in calls(metrics).items() if value} == {
        ("streaming", "tool_call", "responses"): 1,
        ("non_streaming", "no_tool_call", "chat_completions"): 1,
    }


def test_answers_are_counted_by_the_calls_found_in_them(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
    with caller_app(tmp_path) as app, Client(app) as client:
        assert client.chat(tools=tools, max_tokens=400).status_code == 200
        assert client.chat(tools=tools, max_tokens=400, stream=True, n=2).status_code == 200
        assert client.chat(tools=tools, max_tokens=3).status_code == 200
        assert client.chat(max_tokens=400).status_code == 200, "without tools nothing is searched"
        flat = [{"type": "function", "name": "weather", "parameters": WEATHER}]
        assert client.post("/v1/responses", {"input": "hi", "tools": flat}).status_code == 200
        anthropic = [{"name": "weather", "input_schema": WEATHER}]
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 400, "tools": anthropic}
        assert client.post("/v1/messages", body).status_code == 200
        found = [m for m in app.state.context.http_metrics.snapshot() if m.name == "jaxllm:tool_call_parser_invocations"]
    assert {(m.labels["mode"], m.labels["outcome"], m.labels["request_type"]): m.value for m in found if m.value} == {
        ("non_streaming", "tool_call", "chat_completions"): 1,
        ("streaming", "tool_call", "chat_completions"): 2,
        ("non_streaming", "no_tool_call", "chat_completions"): 1,
        ("non_streaming", "tool_call", "responses"): 1,
        ("non_streaming", "tool_call", "other"): 1,
    }


def test_a_call_to_sleep_is_counted_while_it_is_under_way() -> None:
    def in_flight() -> dict[str, float]:
        return {m.labels["operation"]: m.value for m in metrics.snapshot() if m.name.endswith("operations_in_flight")}

    metrics = HttpMetrics("m")
    with pytest.raises(ConfigError), metrics.sleep_mode("sleep"):
        assert in_flight() == {"sleep": 1, "wake": 0}
        raise ConfigError("it cannot")
    assert in_flight() == {"sleep": 0, "wake": 0}


def test_the_page_of_a_server_has_every_series_once(client: Client) -> None:
    for _ in range(2):
        assert client.complete(max_tokens=2).status_code == 200
    page = client.get("/metrics").text
    series = [line.rsplit(" ", 1)[0] for line in page.splitlines() if not line.startswith("#")]
    assert len(series) == len(set(series)) > 300
    assert 'http_requests_total{handler="/v1/completions",method="POST",status="2xx"} 2.0' in page
