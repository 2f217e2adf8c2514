"""Registration of parallel backends, the ways to divide an engine over devices."""

import dataclasses

import pytest

from jaxllm.config import EngineConfig
from jaxllm.engine import parallel_backends
from jaxllm.errors import ConfigError

REQUESTED = {
    "stages": {"pipeline_parallel_size": 2},
    "ranks": {"data_parallel_size": 2, "enable_expert_parallel": True},
    "context": {"prefill_context_parallel_size": 2},
}


def test_every_entry_is_asked_for_by_its_options_and_names_what_is_there():
    assert set(REQUESTED) == set(parallel_backends.BACKENDS) == set(parallel_backends.OPTIONS)
    for name, options in REQUESTED.items():
        assert parallel_backends._requested(EngineConfig.from_options(**options).parallel) == [parallel_backends.BACKENDS[name]]
    for backend in parallel_backends.BACKENDS.values():
        assert all(callable(parallel_backends._load(part)) for part in dataclasses.astuple(backend) if part is not None)


@pytest.mark.parametrize("name", REQUESTED)
def test_a_build_without_a_package_refuses_its_options_and_serves_without_them(name, monkeypatch):
    monkeypatch.delitem(parallel_backends.BACKENDS, name)
    with pytest.raises(ConfigError, match=f"this build has no {parallel_backends.OPTIONS[name]}; leave it out"):
        parallel_backends.check_backend(EngineConfig.from_options(**REQUESTED[name]), None)  # type: ignore[arg-type]
    parallel_backends.check_backend(EngineConfig(), None)  # type: ignore[arg-type]
