"""Layers for multi-token prediction: around them NumPy, they themselves by dense attention over whole sequences."""

import dataclasses
import json

import pytest
from flax import nnx

from jaxllm.errors import ConfigError, ModelLoadError
from jaxllm.models.load_config import load_model_config
from jaxllm.parallel.mesh import make_mesh
from jaxllm.progress import SILENT
from jaxllm.speculative import mtp, mtp_modules
from tests.helpers import goldens
from tests.speculative import next_token
from tests.speculative.by_hand import ByHand, target_hidden_states
from tests.speculative.checkpoints import (
    MTP_TARGET,
    NextTokenOracle,
    write_with_next_token_layer,
    write_with_next_token_layer_apart,
)
from tests.speculative.next_token import SPELLINGS, ModuleOracle


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_with_next_token_layer(tmp_path_factory.mktemp("mtp"))


@pytest.mark.slow
def test_a_layer_chooses_its_own_tokens_behind_one_that_takes_the_choice_of_another(tmp_path):
    directory = write_with_next_token_layer(tmp_path, goldens.FOLDER / "glm_moe_dsa", index_of=1)
    drafter = mtp.make(directory, goldens.load(directory)[0], num_drafts=2)
    assert drafter.num_lookahead == 1 and drafter.feature_layers == ()
    states, oracle = target_hidden_states(*goldens.load(directory), ()), NextTokenOracle(directory, index_of=1)
    engine = ByHand(drafter, *goldens.load(directory), states)
    engine.compare(lambda tokens: oracle.drafts(tokens, states, 2), rounds=3)


@pytest.mark.slow
def test_drafts_of_a_layer_beside_a_hybrid_model_are_those_of_the_layer_alone(tmp_path):
    """As Qwen 3.5 has it: like the target's last layer with attention, norms with weights from zero, a tied head."""
    directory, as_behind = write_with_next_token_layer_apart(tmp_path)
    drafter = mtp.make(directory, goldens.load(directory, tensor_parallel_size=2)[0], num_drafts=2)
    states, oracle = target_hidden_states(*goldens.load(directory), ()), NextTokenOracle(as_behind, last=3, offset=1.0)
    engine = ByHand(drafter, *goldens.load(directory, tensor_parallel_size=2), states, 2)
    engine.compare(lambda tokens: oracle.drafts(tokens, states, 2), rounds=2)


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in SPELLINGS if name != "nemotron_h"])
def test_modules_are_read_by_the_names_of_each_family(family, tmp_path):
    """All tensors are there, and have the shapes of its layers."""
    directory = next_token.write(SPELLINGS[family], tmp_path)
    config = goldens.load(directory)[0]
    mtp.make(directory, config, num_drafts=1).load(make_mesh(1), SILENT)


@pytest.mark.slow
def test_drafts_of_a_module_of_several_layers_are_those_of_the_module_alone(tmp_path):
    """Over two devices: attention, then experts, in one layer each."""
    spelling = SPELLINGS["nemotron_h"]
    directory = next_token.write(spelling, tmp_path)
    target, state = goldens.load(directory, tensor_parallel_size=2)
    drafter = mtp.make(directory, target, num_drafts=2, tensor_parallel_size=2)
    states, oracle = target_hidden_states(*goldens.load(directory), ()), ModuleOracle(spelling, directory)
    engine = ByHand(drafter, target, state, states, 2)
    engine.compare(lambda tokens: oracle.drafts(tokens, states, 2), rounds=1)


@pytest.mark.slow
@pytest.mark.parametrize("family, count", [("mimo_v2_flash", 2), ("ernie4_5_moe", 2)])
def test_each_of_several_modules_makes_a_draft(family, count, tmp_path):
    """Of MiMo all take the model's hidden states, of others those of the module before; there is one draft more than modules."""
    spelling, num_drafts = SPELLINGS[family], count + 1
    directory = next_token.write(spelling, tmp_path, count)
    target, state = goldens.load(directory)
    drafter = mtp_modules.make(directory, target, num_drafts=num_drafts)
    states = target_hidden_states(target, state, ())
    oracles = [ModuleOracle(spelling, directory, module) for module in range(count)]
    engine, chains = ByHand(drafter, target, state, states), family != "mimo_v2_flash"
    engine.compare(lambda tokens: next_token.in_turn(oracles, tokens, states, num_drafts, chains=chains))


def test_a_module_with_states_is_refused():
    target = load_model_config(goldens.FOLDER / "nemotron_h", max_model_len=112)
    module = dataclasses.replace(target.next_token, layers=target.layers[:1], layer="mtp.layers.{}")
    target = dataclasses.replace(target, next_token=module, num_spare_layers=1)
    with pytest.raises(ConfigError, match="NemotronHForCausalLM has layers for multi-token prediction with states by row"):
        mtp.make(goldens.FOLDER / "nemotron_h", target, num_drafts=1)


def test_a_target_without_the_layer_is_refused(tmp_path):
    target = goldens.load(goldens.FOLDER / "llama_gqa")[0]
    with pytest.raises(ConfigError, match="llama_gqa .LlamaForCausalLM. has no layers for multi-token prediction"):
        mtp.make(goldens.FOLDER / "llama_gqa", target, num_drafts=1)
    with pytest.raises(ConfigError, match="load_format is orbax, whose checkpoints have no layers for multi-token prediction"):
        mtp.make(MTP_TARGET, goldens.load(MTP_TARGET)[0], load_format="orbax")
    target = goldens.load(MTP_TARGET)[0]  # its config.json has the layer, its weights have not
    with pytest.raises(ModelLoadError, match=r"missing: model.layers.3.eh_proj.weight, model.layers.3.enorm.weight"):
        mtp.make(MTP_TARGET, target, num_drafts=1).load(make_mesh(1), SILENT)
    assert json.loads((MTP_TARGET / "config.json").read_text())["num_nextn_predict_layers"] == 1


@pytest.mark.slow
def test_random_weights_have_the_shapes_of_the_layer(directory):
    config = goldens.load(directory, tensor_parallel_size=2)[0]
    shapes = []
    for load_format in ("dummy", "auto"):
        state = mtp.make(directory, config, num_drafts=1, load_format=load_format).load(make_mesh(2), SILENT)
        shapes.append([leaf.shape for _, leaf in nnx.to_flat_state(state)])
    assert shapes[0] == shapes[1]
