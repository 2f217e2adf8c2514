"""Each stage has slots for what it computes, and takes its part of an adapter. Answers are compared in tests/lora and tests/hosts."""

import numpy as np
import pytest

from jaxllm.config import EngineConfig
from jaxllm.engine.features import Features
from jaxllm.engine.resolve import resolve_sizes
from jaxllm.engine.stage_plans import lay_out
from jaxllm.layers.build import build_model
from jaxllm.lora.device import DeviceSlots
from jaxllm.models.load_config import load_model_config
from jaxllm.parallel.mesh import meshes_of
from jaxllm.parallel.topology import Topology
from jaxllm.runner.memory import memory_plan
from tests.helpers import engines, goldens, peft_files

TIED, MIXED = "llama_tied", "qwen3_moe"


def slots_of(name, names):
    """Slots of a model of two layers, and of its stages."""
    model = load_model_config(goldens.golden(name).directory).for_tensor_parallel(2)
    (mesh,) = meshes_of(Topology(tensor=2))
    whole = DeviceSlots(build_model(model), mesh, num_slots=2, rank=8, dtype="float32", names=names)
    return whole, [whole.of_stage(build_model(model, range(i, i + 1))) for i in range(2)]


@pytest.mark.parametrize("name", [TIED, MIXED])
def test_each_stage_takes_its_part_of_a_packed_adapter(name):
    last_names = {target.rpartition(".")[2] for target in peft_files.targets_of(goldens.golden(name).directory)}
    whole, stages = slots_of(name, sorted(last_names))
    assert whole.of_stage(build_model(load_model_config(goldens.golden(name).directory))) is whole
    first, last = (set(stage.targets) for stage in stages)
    assert not first & last and first | last == set(whole.targets)
    assert {target for target in first if ".layers." not in target} == {"model.embed_tokens"}
    assert {target for target in last if ".layers." not in target} == {"lm_head"}
    assert [stage.changes_logits for stage in stages] == [False, True]

    rng, tensors = np.random.default_rng(0), {}
    for target, shape in whole.targets.items():
        tensors[f"{target}.lora_A.weight"] = rng.standard_normal((8, shape.inputs), np.float32)
        tensors[f"{target}.lora_B.weight"] = rng.standard_normal((shape.outputs, 8), np.float32)
    packed = whole.pack(tensors.__getitem__)
    assert whole.own(packed) is packed
    for stage in stages:
        np.testing.assert_array_equal(stage.own(packed), stage.pack(tensors.__getitem__))


def test_a_stage_that_adapters_do_not_change_has_no_slots():
    assert [stage is not None for stage in slots_of(TIED, ["embed_tokens"])[1]] == [True, False]
    assert [stage is not None for stage in slots_of(TIED, ["lm_head"])[1]] == [False, True]


def test_the_plan_of_each_stage_counts_its_own_slots_and_a_part_on_its_way():
    lora = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8, "lora_target_modules": ["o_proj", "lm_head"]}
    directory = str(goldens.golden(TIED).directory)
    config = EngineConfig.from_options(model=directory, pipeline_parallel_size=2, **engines.SMALL, **lora)
    config, model = resolve_sizes(config, goldens.golden(TIED).directory)
    features = Features.of(config, model, build_model(model), meshes_of(Topology())[0])

    def sizes(*features):
        stages = lay_out(config, model, lambda **known: memory_plan(config, model, **known), *features)
        return [stage.plan.weight_bytes for stage in stages]

    width, heads = model.hidden_size, model.layers[0].attention.num_heads * model.layers[0].attention.head_dim
    of_layer, of_head = 8 * (width + heads), 8 * (width + model.padded_vocab_size)
    more = [found - without for found, without in zip(sizes(features), sizes(), strict=True)]
    assert more == [(3 + 1) * 4 * of_layer, (3 + 1) * 4 * (of_layer + of_head)]
