import asyncio
from typing import Any

import pytest
from fastapi import FastAPI, HTTPException
from starlette.testclient import TestClient

from jaxllm.metrics.metric import Counter, Histogram, Metric
from server.http_metrics import HttpMetrics, HttpMetricsMiddleware
from tests.server.client import Client


def application() -> tuple[FastAPI, HttpMetrics]:
    app, metrics = FastAPI(), HttpMetrics()

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
        ("GET", "200", "/v1/things/{name}"): 2,
        ("GET", "404", "/v1/things/{name}"): 1,
        ("GET", "404", "none"): 1,
        ("GET", "500", "/broken"): 1,
        ("other", "405", "/v1/things/{name}"): 1,
    }
    durations: list[Metric] = [m for m in metrics.snapshot() if isinstance(m, Histogram)]
    assert {(m.labels["method"], m.labels["handler"]) for m in durations} == {(key[0], key[2]) for key in counts(metrics)}


def test_a_client_that_leaves_before_the_answer_is_counted_as_gone() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise asyncio.CancelledError

    async def send(message: Any) -> None: ...
    async def receive() -> Any: ...

    metrics = HttpMetrics()
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(HttpMetricsMiddleware(app, metrics)({"type": "http", "path": "/x", "method": "GET"}, receive, send))
    assert counts(metrics) == {("GET", "499", "none"): 1}


def test_tool_calls_are_counted_by_parser() -> None:
    metrics = HttpMetrics()
    metrics.tool_calls_parsed("hermes")
    metrics.tool_calls_parsed("hermes")
    (metric,) = metrics.snapshot()
    assert metric == Counter(
        "jaxllm:tool_call_parser_invocations",
        {"tool_parser": "hermes"},
        "requests whose output was searched for tool calls",
        2,
    )


def test_the_page_of_a_server_has_every_series_once(client: Client) -> None:
    for _ in range(2):
        assert client.complete(max_tokens=2).status_code == 200
    page = client.get("/metrics").text
    series = [line.rsplit(" ", 1)[0] for line in page.splitlines() if not line.startswith("#")]
    assert len(series) == len(set(series)) > 300
    assert 'http_requests_total{handler="/v1/completions",method="POST",status="200"} 2.0' in page
