"""Tests of engines with host memory, in folders that stay where a build has no tiers."""

import pytest

from jaxllm.engine import features


def need_tiers() -> None:
    """Skip the test in such a build."""
    if features.KV_TIERS is None:
        pytest.skip("this build has no tiers")
