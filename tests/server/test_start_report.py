import socket
from collections.abc import Iterator

import pytest

from jaxllm.config import EngineConfig
from server.options import ServerOptions
from server.serve import Serving
from server.start_report import start_report


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("0.0.0.0", 0)) as server:
        yield server


def report(listening: socket.socket, offers: str = "chat", **options: object) -> str:
    config = EngineConfig.from_options(model="owner/name")
    parts = {"weights": 2.04, "kernels": 0.01}
    return start_report(Serving(config, ServerOptions.from_options(**options), listening, parts, 3.21, offers))


def test_the_model_the_address_and_two_examples_are_told(listening: socket.socket) -> None:
    told = report(listening, host="0.0.0.0")
    port = listening.getsockname()[1]
    assert "ready in 3.2 s (weights 2.0; some at the same time)" in told
    assert f":{port}/v1, with a page at http://" in told
    assert "whoever reaches this machine can use it" in told
    assert f":{port}/v1/chat/completions -H 'Content-Type: application/json'" in told
    assert 'reply = client.chat.completions.create(model="owner/name", messages=' in told


def test_a_key_goes_into_the_examples_without_its_value(listening: socket.socket) -> None:
    told = report(listening, api_key=["hush"])
    assert "Bearer $API_KEY" in told and 'api_key="API_KEY"' in told
    assert "hush" not in told and "whoever" not in told


def test_a_unix_socket_has_an_example_for_curl_alone(listening: socket.socket) -> None:
    told = report(listening, uds="/run/a b.sock", offers="token ids")
    assert "owner/name is served at the Unix socket /run/a b.sock" in told
    assert "curl --unix-socket '/run/a b.sock' http://localhost/v1/completions" in told
    assert '"return_token_ids": true' in told and "openai" not in told
