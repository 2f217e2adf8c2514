"""The tokens that an engine counts for each expert are those that a plain pass over its requests chooses experts for."""

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jaxllm.config import EngineConfig
from jaxllm.engine import prepare
from jaxllm.engine.core import EngineCore
from jaxllm.errors import ConfigError, EngineSleepingError
from jaxllm.expert_load import reader
from jaxllm.layers.build import build_model
from jaxllm.layers.dense_attention import dense_step
from jaxllm.models.load_config import load_model_config
from jaxllm.runner.step_programs import ProgramKey
from pallas_kernels.expert_choice import reference
from tests.helpers import engines, goldens

PROMPTS = [[5, 9, 2, 31, 7], [40] * 11, [3, 77], [8, 1, 60, 12, 33, 90, 4], [17, 18, 19]]
NUM_TOKENS = 9
OPTIONS = {"enable_prefix_caching": False, "expert_load": True}


def run(core: EngineCore) -> list[list[int]]:
    """All tokens that the engine computes for the prompts: all but the last that it draws."""
    answers = engines.run(core, [engines.request(str(i), p, max_tokens=NUM_TOKENS) for i, p in enumerate(PROMPTS)])
    return [prompt + answers[str(i)].tokens[:-1] for i, prompt in enumerate(PROMPTS)]


def chosen_by_hand(name: str, sequences: list[list[int]]) -> np.ndarray:
    """The tokens of each expert [mixtures, experts], chosen by NumPy from the logits of a plain pass."""
    config, state = goldens.load(goldens.golden(name).directory)
    rules = []

    @functools.partial(jax.jit, static_argnums=1)
    def logits_of_routers(state: Any, length: int, token_ids_T: jax.Array) -> list[Any]:
        step, seen = dense_step(token_ids_T, np.arange(length)), []
        choose = step.choose_experts

        def watch(logits_TE: jax.Array, bias_E: Any, is_real_T: Any, *, rule: Any) -> Any:
            seen.append((logits_TE, bias_E))
            rules.append(rule)
            return choose(logits_TE, bias_E, is_real_T, rule=rule)

        step.choose_experts = watch
        nnx.merge(nnx.graphdef(build_model(config)), state)(step)
        return seen

    longest = max(map(len, sequences))
    total = 0
    for sequence in sequences:
        padded = np.zeros(longest, np.int32)
        padded[: len(sequence)] = sequence
        total += np.stack(
            [
                np.bincount(reference.choose_experts(x[: len(sequence)], bias, rule=rule)[0].reshape(-1), minlength=x.shape[1])
                for (x, bias), rule in zip(logits_of_routers(state, longest, padded), rules, strict=False)
            ]
        )
    return total


@pytest.fixture(scope="module")
def two_devices() -> Iterator[EngineCore]:
    core = engines.make_core("deepseek_v3", **OPTIONS, tensor_parallel_size=2, enable_expert_parallel=True)
    yield core
    core.shutdown()


def check(name: str, core: EngineCore) -> np.ndarray:
    before = np.array(core.expert_load()["tokens"])
    sequences = run(core)
    found = np.array(core.expert_load()["tokens"]) - before
    np.testing.assert_array_equal(found, chosen_by_hand(name, sequences))
    return found


def test_tokens_of_each_expert_on_two_devices(two_devices: EngineCore) -> None:
    """The first layer has no mixture. Stats, and what they are made of, come when all work is done."""
    earlier = two_devices.stats()
    found = check("deepseek_v3", two_devices)
    assert two_devices.expert_load()["layers"] == [1, 2]
    load = two_devices.stats()
    even, busiest = (
        np.subtract(getattr(load, name), getattr(earlier, name) or 0) for name in ("even_expert_load", "busiest_expert_load")
    )
    by_device = found.reshape(2, 2, -1).sum(2)
    np.testing.assert_array_equal(even, [0, *by_device.mean(1)])
    np.testing.assert_array_equal(busiest, [0, *by_device.max(1)])
    assert load.expert_balance == pytest.approx(by_device.mean(1).sum() / by_device.max(1).sum())


def test_readings_while_the_engine_computes_lose_nothing(two_devices: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that warm-up makes reads the counts."""
    monkeypatch.setattr(reader, "INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr(reader, "IDLE_SECONDS", 0.0)
    taken, take = [], two_devices.executor.take_expert_tokens
    monkeypatch.setattr(two_devices.executor, "take_expert_tokens", lambda: taken.append(1) or take())
    check("deepseek_v3", two_devices)
    assert len(taken) > 5
    assert ProgramKey("take_expert_tokens") in two_devices.runner.shapes.common_keys()


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
@pytest.mark.parametrize(
    ("name", "options"), [("qwen3_moe", {"pipeline_parallel_size": 2}), ("gpt_oss", {"token_buckets": (8, 112)})]
)
def test_stages_and_chunks(name: str, options: dict[str, Any]) -> None:
    core = engines.make_core(name, **OPTIONS, **options)
    check(name, core)
    core.shutdown()


def test_models_whose_experts_cannot_be_counted() -> None:
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM has no experts"):
        engines.make_core("qwen3", expert_load=True)
    elsewhere = replace(load_model_config(goldens.golden("mixtral").directory), model_class="elsewhere:Model")
    with pytest.raises(ConfigError, match="only jaxllm's own decoder counts"):
        prepare.counts_experts(EngineConfig.from_options(expert_load=True), elsewhere)


def test_nothing_is_counted_unless_devices_have_whole_experts() -> None:
    """Programs and arrays are then what they were."""
    core = engines.make_core("mixtral", decode_buckets=(1,), token_buckets=(8,))
    assert core.config.observe.expert_load is False
    assert core.runner.row_arrays.expert_tokens_LE is None and not core.runner.shapes.counting_keys()
    with pytest.raises(ConfigError, match="start it with expert_load"):
        core.expert_load()
    core.shutdown()
