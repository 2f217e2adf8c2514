"""The tokens that an engine counts for each expert are those that a plain pass over its requests chooses experts for."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxllm.config import EngineConfig
from jaxllm.device_ops import TakeCounts
from jaxllm.engine.core import EngineCore
from jaxllm.engine.prepare import Prepared
from jaxllm.engine.resolve import counts_experts
from jaxllm.errors import ConfigError, EngineSleepingError
from jaxllm.expert_load import reader
from jaxllm.models.load_config import load_model_config
from jaxllm.runner.programs.key import ProgramKey
from jaxllm.start_times import StartTimes
from tests.expert_load.engines_that_count import OPTIONS, check, run
from tests.helpers import engines, goldens


@pytest.mark.slow
def test_tokens_of_each_expert_on_two_devices(two_devices: EngineCore) -> None:
    """The first layer has no mixture. Stats, and what they are made of, come when all work is done."""
    earlier = two_devices.stats()
    found = check("deepseek_v3", two_devices)
    assert two_devices.expert_load()["layers"] == [1, 2]
    load = two_devices.stats()
    even, busiest = (
        np.subtract(getattr(load, name), getattr(earlier, name) or 0) for name in ("even_expert_load", "busiest_expert_load")
    )
    np.testing.assert_allclose(even, [0, *found.sum(1) / 2])
    assert even.sum() < busiest.sum() < 2 * even.sum() and 0.5 < load.expert_balance < 1


@pytest.mark.slow
def test_readings_while_the_engine_computes_lose_nothing(two_devices: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that warm-up makes reads the counts."""
    monkeypatch.setattr(reader, "INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr(reader, "IDLE_SECONDS", 0.0)
    taken, run_op = [], two_devices.runner.run_op
    monkeypatch.setattr(two_devices.runner, "run_op", lambda op: taken.append(op) or run_op(op))
    check("deepseek_v3", two_devices)
    assert taken.count(TakeCounts()) > 5
    assert ProgramKey("take_expert_tokens") in two_devices.runner.shapes.common_keys()


@pytest.mark.slow
def test_totals_outlive_sleep_and_failures(two_devices: EngineCore) -> None:
    run(two_devices)
    before = two_devices.expert_load()
    two_devices.sleep(1)
    with pytest.raises(EngineSleepingError):
        two_devices.expert_load()
    two_devices.wake_up()
    assert two_devices.expert_load() == before
    two_devices.loop.start_over()
    assert two_devices.expert_load() == before
    check("deepseek_v3", two_devices)


@pytest.mark.slow
def test_chunks() -> None:
    """Stages, context parallelism and more devices: test_rebalancing.py, tests/context/test_engines.py."""
    core = engines.make_core("gpt_oss", **OPTIONS, token_buckets=(8, 112))
    check("gpt_oss", core)
    core.shutdown()


def test_models_whose_experts_cannot_be_counted() -> None:
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM has no experts"):
        engines.make_core("qwen3", expert_load=True)
    elsewhere = replace(load_model_config(goldens.golden("mixtral").directory), model_class="elsewhere:Model")
    with pytest.raises(ConfigError, match="only jaxllm's own decoder counts"):
        counts_experts(EngineConfig.from_options(expert_load=True), elsewhere)


def test_nothing_is_counted_unless_devices_have_whole_experts() -> None:
    """Programs and arrays are then what they were."""
    options = EngineConfig.from_options(**{**engines.SMALL, "model": str(goldens.golden("mixtral").directory)})
    prepared = Prepared.of(options, goldens.golden("mixtral").directory, (), StartTimes())
    runner: Any = prepared.runner
    assert prepared.config.observe.expert_load is False and prepared.features.expert_load is None
    assert not runner.row_arrays.of_features and "take_expert_tokens" not in runner.shapes.kinds
    runner.close()
