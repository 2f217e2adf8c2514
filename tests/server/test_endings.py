"""The errors of requests that failed in the engine, as clients see them."""

import pytest

from jaxllm.request import ErrorKind
from server.endings import failure


@pytest.mark.parametrize("kind", ErrorKind)
def test_every_kind_of_failure_has_its_error(kind: ErrorKind) -> None:
    found = failure(kind)
    assert found.status in (400, 408, 500, 503)
    assert (found.code == "engine_error") == (kind is ErrorKind.INTERNAL)


def test_blocks_that_did_not_come_are_named() -> None:
    found = failure(ErrorKind.KV_TRANSFER)
    assert found.status == 500 and found.code == "kv_transfer" and "without kv_transfer_params" in str(found)
