from collections.abc import Iterator

import pytest

from tests.helpers.live_server import PLAIN, LiveServer


@pytest.fixture(scope="session")
def server() -> Iterator[LiveServer]:
    """A server of the demo model without a key."""
    with LiveServer.start() as server:
        long = {**PLAIN, "prompt": "import " * 50, "max_tokens": 4, "ignore_eos": True}
        assert server.client.post("/v1/completions", json=long).status_code == 200  # compiles, so that no case takes long
        server.assert_unharmed()
        yield server


@pytest.fixture(scope="session")
def guarded(server: LiveServer) -> Iterator[LiveServer]:
    """The engine behind a key."""
    with LiveServer.start(engine=server.engine, api_key=["a-key-of-tests"]) as guarded:
        yield guarded
