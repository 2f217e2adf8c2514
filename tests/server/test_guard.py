from collections.abc import Iterator

import pytest

from jaxllm.async_llm import AsyncLLM
from jaxllm.errors import ConfigError, EngineError
from jaxllm.metrics.metric import Gauge, Histogram
from server.app import create_app
from tests.helpers.fake_engine_core import FakeEngineCore
from tests.server.client import Client
from tests.server.conftest import options

DEV = [
    "/reset_prefix_cache",
    "/sleep",
    "/wake_up",
    "/is_sleeping",
    "/expert_load",
    "/server_info",
    "/start_profile",
    "/stop_profile",
]
DEV += ["/pause", "/resume", "/is_paused"]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def guarded(engine: AsyncLLM) -> Iterator[Client]:
    app = create_app(
        engine,
        options(
            api_key=["one", "two"],
            admin_api_key="boss",
            enable_dev_endpoints=True,
            allowed_origins=["http://page.example"],
            max_request_body_bytes=2048,
        ),
    )
    with Client(app) as client:
        yield client


def test_vllm_s_key_guards_an_application_without_options(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "theirs")
    with Client(create_app(engine)) as client:
        statuses = [client.get("/v1/models", headers=headers).status_code for headers in ({}, bearer("theirs"))]
    assert statuses == [401, 200]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        (bearer("one"), 200),
        (bearer("two"), 200),
        (bearer("boss"), 200),
        ({"x-api-key": "two"}, 200),
        ({"authorization": "bearer one"}, 200),
        ({"authorization": "one"}, 401),
        (bearer("ONE"), 401),
        (bearer(""), 401),
    ],
)
def test_each_key_opens_and_nothing_else(guarded: Client, headers: dict[str, str], status: int) -> None:
    assert guarded.get("/v1/models", headers=headers).status_code == status


def test_operators_endpoints_need_the_operators_key(guarded: Client) -> None:
    for path in DEV:
        method = "GET" if path in ("/is_sleeping", "/is_paused", "/server_info") else "POST"
        assert guarded.request(method, path).status_code == 401
        assert guarded.request(method, path, headers=bearer("one")).status_code == 403
    info = guarded.get("/server_info", headers=bearer("boss"))
    assert info.status_code == 200 and "boss" not in info.text and info.json()["server"]["port"] == 8000
    assert info.json()["kernels"]["paged_attention"] == {
        "implementation": "triton",
        "check": "passed",
        "failed": {"mosaic": "ragged batch: error 0.97, allowed 0.015"},
    }
    assert guarded.post("/reset_prefix_cache", headers=bearer("boss")).json() == {"success": True}
    assert guarded.post("/sleep?level=7", headers=bearer("boss")).json()["error"]["param"] == "level"


def test_operators_endpoints_are_not_there_unless_asked_for(client: Client) -> None:
    assert [client.post(path).status_code for path in DEV] == [404] * len(DEV)


def test_probes_page_and_preflights_need_no_key(guarded: Client) -> None:
    for path in ("/live", "/ready", "/health", "/ping", "/", "/docs"):
        assert guarded.get(path).status_code == 200, path
    preflight = {"origin": "http://page.example", "access-control-request-method": "POST"}
    allowed = guarded.request("OPTIONS", "/v1/chat/completions", headers=preflight)
    assert allowed.headers["access-control-allow-origin"] == "http://page.example"
    foreign = guarded.request("OPTIONS", "/v1/chat/completions", headers={**preflight, "origin": "http://evil.example"})
    assert "access-control-allow-origin" not in foreign.headers


def test_a_page_can_read_that_its_key_is_wrong(guarded: Client) -> None:
    reply = guarded.get("/v1/models", headers={"origin": "http://page.example"})
    assert reply.status_code == 401 and reply.headers["access-control-allow-origin"] == "http://page.example"


def test_a_body_over_the_limit_ends_the_connection(guarded: Client) -> None:
    reply = guarded.post("/v1/completions", {"prompt": "a" * 3000}, headers=bearer("one"))
    assert reply.status_code == 413 and reply.headers["connection"] == "close"
    assert reply.json()["error"]["type"] == "invalid_request_error"


def test_request_ids_are_the_clients_own_if_they_are_sane(guarded: Client) -> None:
    assert guarded.get("/live", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    for wrong in ("a b", "a" * 200, "\x1b[31m"):
        assert guarded.get("/live", headers={"x-request-id": wrong}).headers["x-request-id"] != wrong
    reply = guarded.post("/v1/completions", {"prompt": "hi"}, headers={**bearer("one"), "x-request-id": "abc-2"})
    assert reply.json()["id"] == "cmpl-abc-2"


def test_the_document_describes_bodies_without_foreign_assets(guarded: Client) -> None:
    document = guarded.get("/openapi.json", headers=bearer("one")).json()
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["$ref"].rpartition("/")[2] in document["components"]["schemas"]
    for path in ("/docs", "/docs.js"):
        assert "http://" not in guarded.get(path).text and "https://" not in guarded.get(path).text


@pytest.fixture(scope="module")
def operator(engine: AsyncLLM) -> Iterator[Client]:
    with Client(create_app(engine, options(enable_dev_endpoints=True))) as client:
        yield client


def test_an_engine_is_paused_and_resumed(operator: Client) -> None:
    assert operator.post("/pause?mode=wait&clear_cache=false").json() == {"status": "paused"}
    assert operator.get("/is_paused").json() == {"is_paused": True}
    assert operator.post("/resume").json() == {"status": "resumed"}
    assert operator.get("/is_paused").json() == {"is_paused": False}
    assert operator.post("/pause?mode=stop").json()["error"]["param"] == "mode"


def test_what_is_not_tagged_sleeps_on(operator: Client) -> None:
    operator.post("/sleep")
    for query, sleeps in (("?tags=weights", True), ("?tags=weights&tags=kv_cache", False)):
        assert operator.post(f"/wake_up{query}").status_code == 200
        assert operator.get("/is_sleeping").json() == {"is_sleeping": sleeps}
    assert operator.post("/wake_up?tags=cache").json()["error"]["param"] == "tags"
    found = [m for m in operator.app.state.context.http_metrics.snapshot() if "sleep_mode_operation" in m.name]
    assert {m.labels["operation"]: m.count for m in found if isinstance(m, Histogram)} == {"sleep": 1, "wake": 2}
    assert {m.labels["operation"]: m.value for m in found if isinstance(m, Gauge)} == {"sleep": 0, "wake": 0}


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (ConfigError("start the engine with --profiler-dir DIRECTORY"), 400, "--profiler-dir"),
        (EngineError("a trace is being written already; stop it first"), 409, "stop it first"),
    ],
)
def test_operators_are_told_why_there_is_no_trace(
    operator: Client, core: FakeEngineCore, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int, text: str
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(core, "start_profile", fail)
    reply = operator.post("/start_profile")
    assert reply.status_code == status and text in reply.json()["error"]["message"]
