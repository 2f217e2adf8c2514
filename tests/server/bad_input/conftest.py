from collections.abc import Iterator

import pytest

from tests.helpers.live_server import LiveServer


@pytest.fixture(scope="session")
def server() -> Iterator[LiveServer]:
    """A server of the demo model without a key."""
    with LiveServer.start() as server:
        yield server


@pytest.fixture(scope="session")
def guarded(server: LiveServer) -> Iterator[LiveServer]:
    """The same engine behind a key, with short patience."""
    with LiveServer.start(engine=server.engine, api_key=["a-key-of-tests"], request_body_timeout=2.0) as guarded:
        yield guarded
