from collections.abc import Iterator

import pytest

from jaxllm.async_llm import AsyncLLM
from server.app import create_app
from tests.server.client import Client
from tests.server.conftest import options

DEV = ["/reset_prefix_cache", "/sleep", "/wake_up", "/is_sleeping", "/server_info", "/start_profile", "/stop_profile"]


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
        method = "GET" if path in ("/is_sleeping", "/server_info") else "POST"
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
