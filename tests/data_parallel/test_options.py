"""Options that data-parallel ranks refuse, and their plans."""

from dataclasses import replace

import pytest
from jax.sharding import PartitionSpec

from jaxllm.config import EngineConfig
from jaxllm.data_parallel.options import check_ranks
from jaxllm.engine.compile import compile_artifact
from jaxllm.engine.features import Features
from jaxllm.engine.prepare import Prepared
from jaxllm.engine.resolve import resolve_sizes
from jaxllm.engine.stage_plans import lay_out
from jaxllm.errors import ConfigError
from jaxllm.layers.build import build_model
from jaxllm.model_parts import MoE
from jaxllm.parallel.axes import num_parts, partition_spec
from jaxllm.parallel.mesh import make_mesh, meshes_of
from jaxllm.parallel.topology import Topology
from jaxllm.progress import Progress
from jaxllm.replicas.devices import environments
from jaxllm.runner.memory import memory_plan
from jaxllm.start_times import StartTimes
from tests.helpers import engines, goldens

RANKS = {"data_parallel_size": 2, "enable_expert_parallel": True}
EPLB = {"enable_eplb": True}


def config_of(name, **options):
    return EngineConfig.from_options(**{**engines.SMALL, "model": str(goldens.golden(name).directory), **RANKS, **options})


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("mixtral", {}, "5 experts cannot be shared equally by 2 devices"),
        ("mixtral", {**EPLB, "eplb_config": {"num_redundant_experts": 2}}, "5 experts with 2 redundant ones .* divides 7, or"),
        ("qwen3_moe", {**EPLB, "eplb_config": {"num_redundant_experts": 10}}, "10, but 8 fill 2 devices"),
        ("qwen3_moe", {**EPLB, "enable_expert_parallel": False}, "no device has whole experts"),
        ("qwen3_moe", {"data_parallel_size": 4, "tensor_parallel_size": 4}, "8 experts cannot be shared equally by 16 devices"),
        ("qwen3", {}, "Qwen3ForCausalLM has no experts"),
        ("qwen3_moe", {"enable_lora": True}, "enable_lora is set, but adapters are not"),
        ("qwen3_moe", {"pipeline_parallel_size": 2}, "ranks have no stages"),
        ("qwen3_moe", {"prefill_context_parallel_size": 2}, "devices do not split tokens"),
        ("qwen3_moe", {"compiled_artifact": "somewhere"}, "an artifact has the programs of one rank"),
    ],
)
def test_refused(name, options, told):
    with pytest.raises(ConfigError, match=told):
        resolve_sizes(config_of(name, **options), goldens.golden(name).directory)


def test_copies_may_make_up_for_experts_that_are_too_few():
    config = config_of("mixtral", **EPLB, eplb_config={"num_redundant_experts": 1})
    _, model = resolve_sizes(config, goldens.golden("mixtral").directory)
    assert model.mixtures[0].slots == (0, 1, 2, 3, 4, 0)


def test_classes_from_elsewhere_and_artifacts_are_refused(tmp_path):
    config = config_of("qwen3_moe")
    _, model = resolve_sizes(config, goldens.golden("qwen3_moe").directory)
    with pytest.raises(ConfigError, match="is computed by some:Model"):
        check_ranks(config, replace(model, model_class="some:Model"))
    with pytest.raises(ConfigError, match="an artifact has the programs of one data-parallel rank"):
        compile_artifact(config, goldens.golden("qwen3_moe").directory, tmp_path / "artifact", Progress())


def test_too_few_devices_are_refused_with_the_numbers():
    with pytest.raises(ConfigError, match="data_parallel_size is 8 and tensor_parallel_size 2, which takes 16 devices"):
        meshes_of(Topology(2, has_expert_parallel=True, data=8))


def test_ranks_are_one_engine_and_without_experts_spread_they_are_replicas():
    parallel = config_of("qwen3_moe").parallel
    assert (parallel.num_ranks, parallel.num_replicas, len(environments(parallel))) == (2, 1, 1)
    parallel = replace(parallel, enable_expert_parallel=False)
    assert (parallel.num_ranks, parallel.num_replicas, len(environments(parallel))) == (1, 2, 2)


def test_experts_are_split_over_both_axes_of_a_mesh_that_has_them():
    axes = ("split_experts", "embed", "heads")
    assert partition_spec(axes) == PartitionSpec("tensor", None, "tensor")
    assert partition_spec(axes, ("data", "tensor")) == PartitionSpec(("data", "tensor"), None, "tensor")
    assert num_parts(("split_experts", "embed"), {"data": 4, "tensor": 2}) == 8
    assert num_parts(("vocab", "embed"), {"data": 4, "tensor": 2}) == 2


def test_each_device_is_planned_to_hold_its_experts_and_a_copy_of_the_rest():
    sizes = {}
    for num_ranks in (1, 2, 4):
        directory = goldens.golden("qwen3_moe").directory
        config, model = resolve_sizes(config_of("qwen3_moe", data_parallel_size=num_ranks), directory)
        (stage,) = lay_out(config, model, lambda **known: memory_plan(config, model, **known))  # noqa: B023
        sizes[num_ranks] = stage.plan.weight_bytes
        assert stage.plan.num_ranks == num_ranks
    experts = 2 * 3 * 8 * model.mixtures[0].width * model.hidden_size * 4  # two layers, gate, up and down, 8 experts
    assert sizes[1] - sizes[2] == experts // 2 and sizes[2] - sizes[4] == experts // 4


def test_a_drafters_experts_are_planned_to_be_shared_too():
    sizes, directory = {}, goldens.golden("deepseek_v3").directory
    for num_ranks in (1, 2):
        options = {"data_parallel_size": num_ranks, "speculative_config": {"method": "mtp"}}
        config, model = resolve_sizes(config_of("deepseek_v3", **options), directory)
        features = Features.of(config, model, build_model(model), make_mesh(1))
        (stage,) = lay_out(config, model, lambda **known: memory_plan(config, model, **known), features)  # noqa: B023
        sizes[num_ranks] = stage.plan.weight_bytes
    mixture, num_layers = model.mixtures[0], sum(isinstance(layer.mlp, MoE) for layer in model.layers) + 1
    experts = num_layers * 3 * mixture.routing.num_experts * mixture.width * model.hidden_size * 4
    assert sizes[1] - sizes[2] == experts // 2


def test_programs_are_those_of_so_many_ranks():
    def fingerprint(**options):
        directory = goldens.golden("qwen3_moe").directory
        return Prepared.of(config_of("qwen3_moe", **options), directory, (), StartTimes()).fingerprint()

    two, four = fingerprint(), fingerprint(data_parallel_size=4)
    assert {name for name in two if two[name] != four[name]} == {"ranks"}
