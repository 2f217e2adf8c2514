from collections.abc import Iterator

import pytest

from tests.helpers.stub_server import Stub, running_stub


@pytest.fixture(scope="module")
def running() -> Iterator[Stub]:
    with running_stub() as stub:
        yield stub


@pytest.fixture
def stub(running: Stub) -> Stub:
    """A well-behaved server that was asked nothing yet."""
    running.reset()
    return running
