"""Which layers the stages of a pipeline have, and what is said where they cannot be."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest

from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError
from jaxllm.models.load_config import load_model_config
from jaxllm.parallel.mesh import meshes_of
from jaxllm.parallel.topology import Topology
from jaxllm.pipeline.lost_peers import LostPeers
from jaxllm.pipeline.split import layers_of_stages
from jaxllm.scheduler_output import NOT_FINITE, ModelRunnerOutput
from tests.helpers import goldens


def split(num_layers, **options):
    model = load_model_config(goldens.golden("llama_gqa").directory)
    return layers_of_stages(EngineConfig.from_options(**options), replace(model, layers=model.layers[:1] * num_layers))


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "expected"),
    [(7, 1, [7]), (8, 4, [2, 2, 2, 2]), (32, 3, [11, 11, 10]), (5, 4, [1, 1, 2, 1]), (7, 4, [2, 2, 2, 1]), (2, 2, [1, 1])],
)
def test_what_is_left_over_goes_to_the_stages_before_the_last(num_layers, num_stages, expected):
    stages = split(num_layers, pipeline_parallel_size=num_stages)
    assert [len(layers) for layers in stages] == expected
    assert [layer for layers in stages for layer in layers] == list(range(num_layers))


def test_a_list_of_layers_is_followed():
    assert split(5, pipeline_parallel_size=2, pipeline_parallel_layers=(4, 1)) == (range(4), range(4, 5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_parallel_size": 6}, "pipeline_parallel_size is 6, but LlamaForCausalLM has 5 layers.*choose 1 to 5"),
        (
            {"pipeline_parallel_size": 2, "pipeline_parallel_layers": (4, 2)},
            "pipeline_parallel_layers is 4,2: 6 layers in 2 stages, but the model has 5 and pipeline_parallel_size is 2",
        ),
        ({"pipeline_parallel_layers": (2, 3)}, "5 layers in 2 stages, but .* pipeline_parallel_size is 1"),
        (
            {"pipeline_parallel_size": 2, "speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "speculative_config is set, but drafts are not divided",
        ),
        (
            {"pipeline_parallel_size": 2, "compiled_artifact": "x"},
            "compiled_artifact is set, but an artifact has the programs of one",
        ),
    ],
)
def test_impossible_stages_are_refused_with_the_way_out(options, message):
    with pytest.raises(ConfigError, match=message):
        split(5, **options)


def test_a_model_class_from_elsewhere_is_refused():
    model = replace(load_model_config(goldens.golden("llama_gqa").directory), model_class="elsewhere:Model")
    with pytest.raises(ConfigError, match="is computed by elsewhere:Model, but only jaxllm's own decoder"):
        layers_of_stages(EngineConfig.from_options(pipeline_parallel_size=2), model)


def test_a_stage_does_not_begin_with_a_layer_that_takes_the_choice_of_tokens_of_another():
    model = load_model_config(goldens.golden("glm_moe_dsa").directory, max_model_len=100)
    options = {"pipeline_parallel_size": 2}
    told = "layer 2 would be the first of a stage, .* --pipeline-parallel-layers .* begins with one of the layers 0, 1"
    with pytest.raises(ConfigError, match=told):
        layers_of_stages(EngineConfig.from_options(**options, pipeline_parallel_layers=(2, 1)), model)
    config = EngineConfig.from_options(**options, pipeline_parallel_layers=(1, 2))
    assert layers_of_stages(config, model) == (range(1), range(1, 3))


def test_stages_have_devices_of_their_own_in_a_row():
    first, second = meshes_of(Topology(tensor=2, stage=2))
    assert first.axis_names == second.axis_names == ("tensor",)
    assert [*first.devices, *second.devices] == jax.devices()[:4]


@pytest.mark.parametrize(("count", "way_out"), [(3, "choose sizes whose product is 3 or less"), (1, "leave both out")])
def test_too_few_devices_are_told_with_both_sizes(count, way_out):
    asked = "pipeline_parallel_size is 2 and tensor_parallel_size 2, which takes 4 devices, this machine has"
    with pytest.raises(ConfigError, match=f"{asked} {count} device.*{way_out}"):
        meshes_of(Topology(tensor=2, stage=2), jax.devices()[:count])


@pytest.mark.parametrize(("not_finite", "failed", "is_lost"), [(True, True, True), (True, False, False), (False, True, False)])
def test_numbers_that_an_earlier_stage_lost_are_no_fault_of_the_model(not_finite, failed, is_lost):
    stages = [SimpleNamespace(peers=None), SimpleNamespace(peers=SimpleNamespace(failed=lambda: failed))]
    consumer = LostPeers(stages)
    assert consumer.select([]) == stages[1:] and not LostPeers(stages[:1]).select([])
    output = ModelRunnerOutput({"a": [NOT_FINITE if not_finite else 3]}, not_finite={"a"} if not_finite else set())
    with pytest.raises(RuntimeError, match="results are lost") if is_lost else contextlib.nullcontext():
        consumer.collect(output)
