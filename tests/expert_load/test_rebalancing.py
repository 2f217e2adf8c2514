"""Engines whose experts move while they serve: the same tokens as on one device, whatever is where."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm.device_ops import MoveExperts
from jaxllm.engine.core import EngineCore
from jaxllm.engine.stage_plans import weight_bytes
from jaxllm.errors import ConfigError
from jaxllm.expert_load.balancer import plan_moves, table_of
from jaxllm.layers.build import build_model
from jaxllm.layers.parameters import axes_of, parameters
from jaxllm.loaders.load import load_checkpoint
from jaxllm.model_parts import MoE
from jaxllm.models.load_config import load_model_config
from jaxllm.options.eplb import EplbConfig, tell_unused_keys
from jaxllm.parallel.mesh import make_mesh
from jaxllm.runner.features.expert_slots import ExpertSlots
from tests.expert_load.engines_that_count import check, check_greedy, new_core, run
from tests.helpers import engines, goldens
from tests.helpers.slow import slow_except


def layout(core: EngineCore) -> Any:
    return core._expert_load._layout  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def expected(two_devices: EngineCore) -> list[list[int]]:
    """The tokens of a plain pass on one device."""
    found = run(two_devices)
    check_greedy("deepseek_v3", found)
    return found


@pytest.fixture(params=slow_except([], ["two_devices", "two_ranks"]))
def core(request: pytest.FixtureRequest) -> EngineCore:
    """Their experts lie on two devices, of one data-parallel rank or of two."""
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


def test_tokens_are_those_of_one_device_while_experts_move(core: EngineCore, expected: list[list[int]]) -> None:
    """Counts are of experts, not of copies; sleep keeps places, and what is loaded anew begins with the first ones."""
    first = [np.arange(10) % 8] * 2
    for _ in range(3):
        assert run(core) == expected
    assert not np.array_equal(layout(core).slots, first) and layout(core).num_devices == 2
    check("deepseek_v3", core)
    core.sleep(1)
    core.wake_up()
    assert run(core) == expected
    core.sleep(2)
    np.testing.assert_array_equal(layout(core).slots, first)
    core.wake_up()
    assert run(core) == expected


def test_moves_are_exact_to_the_bit(core: EngineCore) -> None:
    """Random placements, with copies next to each other: each slot then has its expert's weights, in all arrays."""
    core.ops.run_now()
    runner, found = core.runner, layout(core)
    paths = [(path, variable) for path, variable in parameters(runner._source.model)]
    split = [i for i, (path, variable) in enumerate(paths) if "split_experts" in axes_of(variable) and path[1] == 2]
    mixture, experts = found.layers.index(2), {}
    for i in split:
        stored = np.asarray(runner.params[i])
        for slot, expert in enumerate(found.slots[mixture].tolist()):
            experts[i, expert] = stored[slot]
    rng, num_arrays = np.random.default_rng(0), None
    for _ in range(4):
        after_P = rng.permutation(np.concatenate([np.arange(8), rng.choice(8, 2, replace=False)]))
        moves = plan_moves(found.slots[mixture], after_P, 2)
        core.ops.add(MoveExperts(2, moves.tolist(), table_of(after_P, 8, 2).tolist()))
        core.ops.run_now()
        found.slots[mixture] = after_P
        for i in split:
            np.testing.assert_array_equal(np.asarray(runner.params[i]), [experts[i, expert] for expert in after_P.tolist()])
        num_arrays = num_arrays or len(jax.live_arrays())
        assert len(jax.live_arrays()) == num_arrays, "what experts have left stays in memory"
    assert len(split) == 2


def test_a_failure_leaves_experts_where_they_are(core: EngineCore, expected: list[list[int]]) -> None:
    core.loop.start_over()
    assert run(core) == expected


def test_programs_that_move_experts_are_there_after_warm_up(core: EngineCore) -> None:
    kinds = [key.kind for key in core.runner.shapes.common_keys()]
    assert kinds.count("move_experts") == 1, "layers of the same shapes share one"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_devices", "num_redundant", "options"),
    [
        ("qwen3_moe", 2, 0, {"pipeline_parallel_size": 2}),
        ("gpt_oss", 1, 3, {"data_parallel_size": 4}),  # biases, and a tensor of all experts
    ],
)
def test_models(name: str, num_devices: int, num_redundant: int, options: dict[str, Any]) -> None:
    core = new_core(name, num_devices, num_redundant, **options)
    first = [slots.copy() for slots in layout(core).slots]
    expected = run(core)
    check_greedy(name, expected)
    for _ in range(2):
        assert run(core) == expected
    assert any(not np.array_equal(*slots) for slots in zip(first, layout(core).slots, strict=True))
    check(name, core)
    core.shutdown()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"enable_expert_parallel": False}, "no device has whole experts"),
        ({"tensor_parallel_size": 1}, "no device has whole experts"),
        ({"enable_lora": True}, "leave out enable_lora or enable_eplb"),
        ({"expert_load": False}, "expert_load is off"),
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size count different tokens"),
        ({"enable_eplb": False}, "enable_eplb is not"),
        ({"eplb_config": {"window": 3}}, "'window', which is unknown; it takes window_size"),
        ({"eplb_config": {"step_interval": 2.5}}, "step_interval is 2.5, must be int"),
        ({"eplb_config": {"num_redundant_experts": -1}}, "must be at least 0"),
        ({"eplb_config": {"window_size": 9, "step_interval": 8}}, "more than step_interval, 8"),
        ({"eplb_config": {"num_redundant_experts": 10}}, "8 fill 2 devices"),
        ({"eplb_config": {"num_redundant_experts": 1}}, "8 experts with 1 redundant ones"),
        ({"model": "qwen3"}, "Qwen3ForCausalLM has no experts"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], told: str) -> None:
    usual = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "enable_eplb": True, "eplb_config": {}}
    given = {**usual, **options}
    with pytest.raises(ConfigError, match=told):
        engines.make_core(given.pop("model", "qwen3_moe"), **given)


@pytest.mark.parametrize("transform_on_device", [False, True])
@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss"])
@pytest.mark.slow
def test_copies_are_read_like_their_experts(name: str, transform_on_device: bool) -> None:
    """From tensors of single experts and of all, whole on the host and by the slices of two devices, whose border is not the experts'."""
    directory = goldens.golden(name).directory
    plain = load_model_config(directory, expert_parallel=True)
    num_redundant = 4 if name == "deepseek_v3" else 1
    layers = [
        replace(x, mlp=replace(x.mlp, num_redundant=num_redundant)) if isinstance(x.mlp, MoE) else x for x in plain.layers
    ]
    config = replace(plain, layers=tuple(layers)).for_tensor_parallel(2)
    stored = dict(parameters(goldens.load(directory)[1]))
    found = load_checkpoint(config, build_model(config), directory, mesh=make_mesh(2), transform_on_device=transform_on_device)
    num_seen = 0
    for path, variable in parameters(found):
        if "split_experts" in axes_of(variable):
            expected = np.asarray(stored[path].get_value())
            np.testing.assert_array_equal(variable.get_value(), np.concatenate([expected, expected[:num_redundant]]))
            num_seen += 1
    assert num_seen >= 4


def test_the_memory_of_a_move_is_counted_with_the_weights(core: EngineCore) -> None:
    """Twice more a layer, and an expert from and for each device."""
    runner = core.runner
    bytes_of = [array.nbytes // 2 for array in (runner.params[i] for i in runner.shapes.functions.get(ExpertSlots).leaves[2])]
    parallel = core.config.parallel
    weights = weight_bytes(runner._source.model, parallel.tensor_parallel_size, parallel.num_ranks)
    assert core.memory_plan.weight_bytes - weights == sum(2 * n + 2 * 2 * n // 5 for n in bytes_of)


def test_a_short_interval_shortens_the_window() -> None:
    assert EplbConfig.of({"step_interval": 10}).window_size == 10
    assert EplbConfig.of(None) == EplbConfig(window_size=1000, step_interval=3000, num_redundant_experts=0)


def test_keys_of_vllm_that_change_nothing_are_taken(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "jaxllm")
    raw = {"window_size": 8, "use_async": False, "policy": "default", "communicator": None, "enable_migration_batching": True}
    assert EplbConfig.of(raw) == EplbConfig.of({"window_size": 8})
    tell_unused_keys(raw)
    assert "eplb_config.use_async False changes nothing here: a layer moves between two steps" in caplog.text
