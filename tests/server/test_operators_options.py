"""Options of the server that people coming from vLLM use: middleware, the metrics' prefix, the path under a proxy, the address."""

from typing import Any

import pytest

from jaxllm.async_llm import AsyncLLM
from jaxllm.cli.main import main
from jaxllm.errors import ConfigError
from jaxllm.http_client.scrape import read_scrape
from jaxllm.hub import short_name
from server.app import create_app
from server.middleware import load_middleware
from server.options import ServerOptions
from tests.server.client import Client
from tests.server.conftest import options


class Stamp:
    """Middleware as a class."""

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def stamped(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-class", b"yes")]
            await send(message)

        await self.app(scope, receive, stamped)


async def stamp(request: Any, call_next: Any) -> Any:
    """Middleware as a function."""
    response = await call_next(request)
    response.headers["x-function"] = request.url.path
    return response


def test_middleware_sees_the_requests_that_are_let_in(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    import types

    module = types.ModuleType("operators_own")
    module.Stamp, module.stamp = Stamp, stamp  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "operators_own", module)
    given = options(middleware=["operators_own.Stamp", "operators_own.stamp"], api_key=["k"])
    with Client(create_app(engine, given), {"Authorization": "Bearer k"}) as client:
        answer = client.complete(max_tokens=2)
        assert answer.status_code == 200 and answer.headers["x-class"] == "yes"
        assert answer.headers["x-function"] == "/v1/completions"
        refused = client.get("/v1/models", headers={"Authorization": "Bearer wrong"})
        assert refused.status_code == 401 and "x-class" not in refused.headers


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("json", "must be package.module.name"),
        ("no_such.Thing", "cannot be imported: ModuleNotFoundError"),
        ("json.Nothing", "cannot be imported: AttributeError"),
        ("json.dumps", "is a function, must be a class or a coroutine function"),
    ],
)
def test_middleware_that_cannot_be_used_is_named(path: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=told):
        load_middleware([path])
    assert main(["serve", "demo", "--middleware", path]) == 1
    assert f"error: middleware {'is ' * (path == 'json')}'{path}'" in capsys.readouterr().err


def test_metrics_may_have_the_prefix_of_vllm(engine: AsyncLLM) -> None:
    with Client(create_app(engine, options(metrics_prefix="vllm"))) as client:
        client.complete(max_tokens=2)
        page = client.get("/metrics").text
        assert "\nvllm:num_requests_running{" in page and "jaxllm:" not in page
        assert "\nhttp_requests_total{" in page
        searched = f'mode="streaming",model_name="{short_name(engine.config.model.model)}",outcome="tool_call",request_type="responses"'
        assert f"\nvllm:tool_call_parser_invocations_total{{{searched}}} 0.0" in page
        for name in ("prompt_tokens_cached_by_source", "external_prefix_cache_hits", "mm_cache_queries"):
            assert f"\nvllm:{name}_total{{" in page
        assert read_scrape(page, 0.0).values["generation_tokens"] > 0


def test_the_description_names_the_path_under_which_a_proxy_serves(engine: AsyncLLM, client: Client) -> None:
    assert "servers" not in client.get("/openapi.json").json()
    with Client(create_app(engine, options(root_path="/below"))) as below:
        assert below.get("/openapi.json").json()["servers"] == [{"url": "/below"}]


def test_a_server_listens_to_this_machine_alone_unless_it_is_told_otherwise() -> None:
    assert ServerOptions.from_options().network.host == "127.0.0.1"


def test_paths_without_access_log_may_come_with_commas() -> None:
    given = ServerOptions.from_options(disable_access_log_for_endpoints=["/health,/metrics", "/ping"])
    assert given.logging.disable_access_log_for_endpoints == ["/health", "/metrics", "/ping"]
