"""Registration of parallel backends, the ways to divide an engine over devices."""

import dataclasses

import pytest

from jaxllm.config import EngineConfig
from jaxllm.engine import divisions
from jaxllm.errors import ConfigError

ASKED = {
    "stages": {"pipeline_parallel_size": 2},
    "ranks": {"data_parallel_size": 2, "enable_expert_parallel": True},
    "context": {"prefill_context_parallel_size": 2},
}


def test_every_entry_is_asked_for_by_its_options_and_names_what_is_there():
    assert set(ASKED) == set(divisions.DIVISIONS) == set(divisions.OPTIONS)
    for name, options in ASKED.items():
        assert divisions._asked(EngineConfig.from_options(**options).parallel) == [divisions.DIVISIONS[name]]
    for division in divisions.DIVISIONS.values():
        assert all(callable(divisions._load(part)) for part in dataclasses.astuple(division) if part is not None)


@pytest.mark.parametrize("name", ASKED)
def test_a_build_without_a_package_refuses_its_options_and_serves_without_them(name, monkeypatch):
    monkeypatch.delitem(divisions.DIVISIONS, name)
    with pytest.raises(ConfigError, match=f"this build has no {divisions.OPTIONS[name]}; leave it out"):
        divisions.check_division(EngineConfig.from_options(**ASKED[name]), None)  # type: ignore[arg-type]
    divisions.check_division(EngineConfig(), None)  # type: ignore[arg-type]
