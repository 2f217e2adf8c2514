"""Answers by Host, Origin and Sec-Fetch headers, through the application without a socket."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from jaxllm.async_llm import AsyncLLM
from jaxllm.errors import ConfigError
from server.app import create_app
from server.browser_access import MAX_LOGGED, BrowserAccess
from server.errors import ApiError
from server.gate import Gate
from server.options import ServerOptions
from server.routes.page import page_replies
from tests.helpers.fake_engine_core import FakeEngineCore
from tests.helpers.live_server import LiveServer
from tests.server.bad_input.test_http_layer import exchange, status_of
from tests.server.client import Client
from tests.server.conftest import options

LOCAL: dict[str, Any] = {}
KEY = {"api_key": ["k"]}
EVERYWHERE = {"host": "0.0.0.0"}
PAGE = "http://page.example"
SITES = ("cross-site", "same-site")


@pytest.fixture(scope="module")
def ask(engine: AsyncLLM, core: FakeEngineCore) -> Iterator[Any]:
    """Send a request without a body to a server with these options; returns the answer."""
    with Client(None) as client:

        def ask(given: dict[str, Any], method: str, path: str, **headers: str) -> Any:
            client.app = create_app(engine, options(enable_dev_endpoints=True, **given))
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            return client.request(method, path, headers={"host": "localhost:8000", **named})

        yield ask
    core.wake_up()


@pytest.mark.parametrize(
    ("given", "hosts", "status"),
    [
        (LOCAL, "localhost localhost:1 LOCALHOST:8000 localhost. llm.localhost 127.0.0.1:8000 127.0.0.2 192.168.1.5:80", 200),
        (LOCAL, "[::1] [::1]:8000 [FE80::1]:8000 [::ffff:127.0.0.1] localhost: 0.0.0.0:8000 127.0.0.1.", 200),
        (LOCAL, "attacker.example attacker.example:8000 127.0.0.1.attacker.example localhost.attacker.example box", 403),
        (LOCAL, f"notlocalhost {'x' * 999} xn--mller-kva.example 2130706433 0x7f.1 0177.0.0.1 127.1 127.0.0.01 1.2.3.4.5", 403),
        (LOCAL, "[127.0.0.1] [::1 ::1 [::1]x localhost:8000:1 localhost:x localhost.. . : localhost:123456", 403),
        (LOCAL, "a/b a@b a,b [fe80::1%25eth0]", 400),
        ({"host": "127.9.9.9"}, "attacker.example", 403),
        ({"host": "::1"}, "attacker.example", 403),
        ({"host": "::ffff:127.0.0.1"}, "attacker.example", 403),
        ({"host": "localhost"}, "attacker.example", 403),
        ({"admin_api_key": "boss"}, "attacker.example", 403),
        ({"allowed_origins": ["*"]}, "attacker.example", 403),
        (EVERYWHERE, "llm.svc.cluster.local llm:80 10.0.0.1", 200),
        ({"host": "::"}, "llm.svc.cluster.local", 200),
        ({"uds": "/tmp/socket"}, "upstream", 200),
        ({"allowed_hosts": ["llm.Example", "*.lan"]}, "llm.example LLM.example:443 llm.example. a.lan a.b.lan localhost", 200),
        ({"allowed_hosts": ["llm.Example", "*.lan"]}, "lan a.llm.example b.example xlan", 403),
        ({"allowed_hosts": ["*"]}, "attacker.example", 200),
        ({**EVERYWHERE, "allowed_hosts": ["llm.lan"]}, "llm.lan 10.0.0.1:8000", 200),
        ({**EVERYWHERE, "allowed_hosts": ["llm.lan"]}, "attacker.example", 403),
    ],
)
def test_hosts_that_are_answered(ask: Any, given: dict[str, Any], hosts: str, status: int) -> None:
    found = {host: ask(given, "GET", "/v1/models", host=host).status_code for host in hosts.split()}
    assert found == dict.fromkeys(hosts.split(), status)


def test_a_key_answers_for_the_host_unless_hosts_are_listed(ask: Any) -> None:
    bearer = {"authorization": "Bearer k", "host": "llm.example"}
    assert ask(KEY, "GET", "/v1/models", **bearer).status_code == 200
    assert ask({**KEY, "allowed_hosts": ["other.example"]}, "GET", "/v1/models", **bearer).status_code == 403


def test_every_path_is_refused_to_a_rebound_name_in_its_own_shape(ask: Any) -> None:
    paths = ("/", "/live", "/health", "/metrics", "/docs", "/v1/models", "/v1/messages", "/api/tags", "/none")
    replies = {path: ask(LOCAL, "GET", path, host="evil.example", x_forwarded_host="localhost") for path in paths}
    assert {reply.status_code for reply in replies.values()} == {403}
    error = replies["/v1/models"].json()["error"]
    assert error["code"] == "host_not_allowed" and "'evil.example'" in error["message"]
    assert "--allowed-hosts evil.example" in error["message"]
    assert "evil.example" in replies["/api/tags"].json()["error"] and replies["/v1/messages"].json()["type"] == "error"


FOREIGN = {"origin": PAGE}


@pytest.mark.parametrize(
    ("given", "method", "path", "headers", "status"),
    [
        (LOCAL, "POST", "/sleep", {}, 200),
        (LOCAL, "POST", "/sleep", FOREIGN, 403),
        (LOCAL, "POST", "/sleep", {**FOREIGN, "content_type": "text/plain"}, 403),
        (LOCAL, "POST", "/sleep", {"origin": "null"}, 403),
        (LOCAL, "POST", "/sleep", {"origin": "http://localhost:3000"}, 403),
        (LOCAL, "POST", "/sleep", {"origin": "http://localhost"}, 403),
        (LOCAL, "POST", "/sleep", {"origin": "http://127.0.0.1:8000"}, 403),
        (LOCAL, "POST", "/sleep", {"origin": "vscode-webview://localhost:8000"}, 403),
        (LOCAL, "POST", "/sleep", {"origin": ""}, 403),
        (LOCAL, "POST", "/sleep", {"origin": "http://localhost:8000"}, 200),
        (LOCAL, "POST", "/sleep", {"origin": "https://LOCALHOST:8000"}, 200),
        *((LOCAL, "POST", "/sleep", {"sec_fetch_site": site}, 403) for site in SITES),
        *((LOCAL, "POST", "/sleep", {"sec_fetch_site": site, "sec_fetch_mode": "navigate"}, 403) for site in SITES),
        *((LOCAL, "POST", "/sleep", {"sec_fetch_site": site, "origin": "http://localhost:8000"}, 403) for site in SITES),
        (LOCAL, "POST", "/sleep", {"sec_fetch_site": "same-origin", "origin": "http://localhost:8000"}, 200),
        (LOCAL, "POST", "/sleep", {"sec_fetch_site": "none"}, 200),
        (LOCAL, "OPTIONS", "/v1/completions", {**FOREIGN, "access_control_request_method": "POST"}, 403),
        (LOCAL, "GET", "/v1/models", FOREIGN, 403),
        (LOCAL, "GET", "/v1/models", {"sec_fetch_site": "cross-site", "sec_fetch_mode": "no-cors"}, 403),
        (LOCAL, "GET", "/metrics", {"sec_fetch_site": "cross-site", "sec_fetch_mode": "cors"}, 403),
        (LOCAL, "GET", "/", {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "iframe"}, 403),
        (LOCAL, "GET", "/", {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "document"}, 200),
        (LOCAL, "GET", "/docs", {"sec_fetch_site": "same-site", "sec_fetch_mode": "navigate"}, 200),
        (LOCAL, "GET", "/v1/models", {"upgrade": "websocket", "connection": "upgrade", **FOREIGN}, 403),
        (EVERYWHERE, "POST", "/sleep", {"host": "10.0.0.1:8000", **FOREIGN}, 403),
        (EVERYWHERE, "POST", "/sleep", {"host": "page.example:80", **FOREIGN}, 200),
        (EVERYWHERE, "POST", "/sleep", {"host": "[::1]:80", "origin": "http://[::1]"}, 200),
        # a reverse proxy: it ended TLS and kept the Host, kept the port, or replaced the Host by its upstream's
        (EVERYWHERE, "POST", "/sleep", {"host": "llm.example", "origin": "https://llm.example"}, 200),
        (EVERYWHERE, "POST", "/sleep", {"host": "llm.example:8443", "origin": "https://llm.example:8443"}, 200),
        (EVERYWHERE, "POST", "/sleep", {"host": "llm.example", "origin": "https://llm.example:8443"}, 403),
        (LOCAL, "POST", "/sleep", {"host": "127.0.0.1:8000", "origin": "https://llm.example"}, 403),
        (
            LOCAL,
            "POST",
            "/sleep",
            {"host": "127.0.0.1:8000", "origin": "https://llm.example", "sec_fetch_site": "same-origin"},
            200,
        ),
        ({"uds": "/tmp/socket"}, "POST", "/sleep", {"host": "upstream", **FOREIGN}, 403),
        ({"allowed_origins": [PAGE]}, "POST", "/sleep", {**FOREIGN, "sec_fetch_site": "cross-site"}, 200),
        ({"allowed_origins": [PAGE]}, "POST", "/sleep", {"origin": "http://page.example:81"}, 403),
        ({"allowed_origins": [PAGE]}, "POST", "/sleep", {"sec_fetch_site": "cross-site"}, 403),
        ({"allowed_origins": [PAGE]}, "OPTIONS", "/sleep", {**FOREIGN, "access_control_request_method": "POST"}, 200),
        ({"allowed_origins": ["tauri://localhost", "null"]}, "POST", "/sleep", {"origin": "tauri://localhost"}, 200),
        ({"allowed_origins": ["tauri://localhost", "null"]}, "POST", "/sleep", {"origin": "null"}, 200),
        ({"allowed_origins": ["*"]}, "POST", "/sleep", {**FOREIGN, "sec_fetch_site": "cross-site"}, 200),
        ({"allowed_origins": ["*"]}, "GET", "/v1/models", {"sec_fetch_site": "cross-site"}, 200),
        (KEY, "POST", "/sleep", {**FOREIGN, "authorization": "Bearer k"}, 200),
        (KEY, "POST", "/sleep", FOREIGN, 401),
        (KEY, "GET", "/metrics", FOREIGN, 200),
        ({"admin_api_key": "boss"}, "POST", "/v1/completions", FOREIGN, 403),
    ],
)
def test_requests_of_pages(
    ask: Any, given: dict[str, Any], method: str, path: str, headers: dict[str, str], status: int
) -> None:
    reply = ask(given, method, path, **headers)
    assert reply.status_code == status, reply.text
    if status == 403:
        assert "--allowed-origins" in reply.text and "access-control-allow-origin" not in reply.headers


def test_no_route_is_left_out(engine: AsyncLLM) -> None:
    names = ("dev_endpoints", "scale_out", "tokenizer_info_endpoint")
    app = create_app(engine, options(**{f"enable_{name}": True for name in names}))
    routes = [
        (method, str(getattr(route, "path", ""))) for route in app.routes for method in getattr(route, "methods", None) or ()
    ]
    assert len(routes) > 50
    with Client(app) as client:
        for headers in (FOREIGN, {"host": "evil.example"}, {"sec-fetch-site": "cross-site"}):
            open_ = [route for route in routes if client.request(*route, headers=headers).status_code != 403]
            assert not open_, headers


@pytest.mark.parametrize("stops", [False, True])
def test_a_server_that_loads_or_stops_refuses_as_one_that_runs(stops: bool) -> None:
    gate = Gate(lambda: None, page=page_replies(), browsers=BrowserAccess(options()))
    if stops:
        gate.drain(5)
    with Client(gate) as client:
        for path in ("/", "/live", "/v1/models"):
            if not (stops and path == "/live"):
                assert client.get(path, headers={"host": "evil.example"}).status_code == 403, path
                assert client.get(path, headers=FOREIGN).status_code == 403
        assert client.get("/api/tags", headers={"host": "evil.example"}).json()["error"].startswith("this server does not")
        assert client.get("/v1/models").status_code == 503


def test_clients_without_a_host_are_no_browsers() -> None:
    BrowserAccess(options()).check("GET", {})  # HTTP/1.0
    with pytest.raises(ApiError, match="--allowed-origins http://page.example"):
        BrowserAccess(options()).check("GET", {b"origin": PAGE.encode()})


def test_each_refusal_is_logged_once_and_pages_cannot_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "jaxllm"):
        access = BrowserAccess(options())
        for _ in range(3):
            for headers in ({b"host": b"evil.example:1"}, {b"host": b"localhost", b"origin": b"http://evil\x1b.example"}):
                with pytest.raises(ApiError):
                    access.check("POST", headers)
        first, second = caplog.messages
        assert "--allowed-hosts evil.example" in first and "--allowed-origins http://evil\\u001b.example" in second
        for number in range(3 * MAX_LOGGED):
            with pytest.raises(ApiError, match="--allowed-hosts"):
                access.check("GET", {b"host": b"a%d.example" % number})
    assert len(caplog.messages) == MAX_LOGGED


def test_the_host_of_the_url_counts_where_it_has_one(engine: AsyncLLM) -> None:
    with LiveServer.start(engine) as server:
        for url, host, status in (
            ("http://evil.example/v1/models", "localhost", 403),
            ("http://localhost@evil.example/v1/models", "localhost", 403),
            ("http://127.0.0.1:1/v1/models", "evil.example", 200),
            ("/v1/models?http://localhost/", "evil.example", 403),
            ("http://localhost/v1/models", "", 200),
        ):
            data = f"GET {url} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
            assert status_of(exchange(server, data)) == status, url


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"allowed_hosts": ["llm.example:8000"]}, "allowed_hosts"),
        ({"allowed_hosts": ["http://llm.example"]}, "allowed_hosts"),
        ({"allowed_hosts": [".example"]}, r"\*\.NAME"),
        ({"allowed_hosts": ["müller.example"]}, "allowed_hosts"),
        ({"allowed_origins": ["http://page.example/"]}, "without a path"),
        ({"allowed_origins": ["page.example"]}, "allowed_origins"),
        ({"allowed_origins": ["http://Page.example"]}, "small letters"),
        ({"metrics_require_key": True}, "metrics_require_key needs api_key"),
    ],
)
def test_values_that_could_never_match_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ServerOptions.from_options(**given)


def test_metrics_need_the_key_if_the_operator_says_so(ask: Any) -> None:
    given = {**KEY, "metrics_require_key": True}
    statuses = [ask(given, "GET", path).status_code for path in ("/metrics", "/health", "/")]
    assert [*statuses, ask(given, "GET", "/metrics", authorization="Bearer k").status_code] == [401, 200, 200, 200]
    assert "model_name=" in ask(KEY, "GET", "/metrics").text
