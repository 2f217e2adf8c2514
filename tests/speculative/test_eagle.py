"""EAGLE heads against float64 NumPy, in steps as an engine makes them."""

import json

import numpy as np
import pytest

from jaxllm.errors import ConfigError, ModelLoadError
from jaxllm.layers.parameters import parameters
from jaxllm.parallel.mesh import make_mesh
from jaxllm.progress import SILENT
from jaxllm.speculative import eagle
from tests.helpers import goldens
from tests.speculative.by_hand import MAX_LENGTH, ByHand, target_hidden_states
from tests.speculative.checkpoints import CONFIG, CONFIG_3, TARGET, EagleOracle, H, V, head_tensors, write

THIRD = head_tensors(is_third=True)
FIRST = head_tensors(is_third=False, layer="layers.0")
NESTED = {
    "architectures": ["Eagle3Speculator"],
    "transformer_layer_config": {key: value for key, value in CONFIG.items() if key != "architectures"},
    "eagle_aux_hidden_state_layer_ids": CONFIG_3["eagle_aux_hidden_state_layer_ids"],
    "norm_before_residual": True,
    "target_hidden_size": None,
}
LATER = {"is_third": True, "layer": "layers.0", "num_layers": 2}
EMBEDDING = np.random.default_rng(5).standard_normal((V, H)).astype(np.float32)


@pytest.mark.parametrize(
    ("config", "weights", "size", "is_drawn"),
    [
        (CONFIG_3, THIRD, 1, False),
        pytest.param({**CONFIG_3, "architectures": ["LlamaForCausalLMEagle3"]}, THIRD, 2, True, marks=pytest.mark.slow),
        pytest.param(
            NESTED,
            head_tensors(is_third=True, layer="layers.0", draft_vocab=V, **{"embed_tokens.weight": EMBEDDING}),
            4,
            False,
            marks=pytest.mark.slow,
        ),
        pytest.param({**CONFIG, "bias": True}, {**FIRST, "fc.bias": THIRD["norm.weight"]}, 1, True, marks=pytest.mark.slow),
        pytest.param(
            CONFIG,
            {**FIRST, "lm_head.weight": EMBEDDING, "embed_tokens.weight": EMBEDDING[::-1].copy()},
            2,
            False,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {**CONFIG_3, "num_hidden_layers": 2, "fc_norm": True, "norm_output": True},
            head_tensors(**LATER, norms={f"fc_norm.{i}": H for i in range(3)}),
            2,
            False,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {**CONFIG_3, "norm_before_fc": True, "norm_before_residual": True},
            head_tensors(is_third=True, norms={"input_norm": 3 * H}),
            1,
            False,
            marks=pytest.mark.slow,
        ),
    ],
    ids=[
        "eagle3",
        "eagle3 tp2 drawn",
        "eagle3 whole vocabulary tp4",
        "eagle drawn",
        "eagle own head tp2",
        "eagle3 two layers tp2",
        "eagle3 norm",
    ],
)
def test_drafts_are_those_of_the_head_alone(tmp_path, config, weights, size, is_drawn):
    directory = write(tmp_path / "head", config, weights)
    target = goldens.load(TARGET, tensor_parallel_size=size)[0]
    options = {"num_drafts": 3, "is_drawn": is_drawn, "tensor_parallel_size": size}
    drafter = eagle.make(directory, target, is_third="norm.weight" in weights, **options)
    assert drafter.num_lookahead == 2 and len(drafter.feature_layers) == (3 if "norm.weight" in weights else 0)
    noise = np.random.default_rng(9).gumbel(size=(MAX_LENGTH, V)) * 3 if is_drawn else None
    states, oracle = target_hidden_states(*goldens.load(TARGET), drafter.feature_layers), EagleOracle(weights, config)
    engine = ByHand(drafter, *goldens.load(TARGET, tensor_parallel_size=size), states, size, noise)
    engine.compare(lambda tokens: oracle.drafts(tokens, states, 3, noise))


@pytest.mark.parametrize(
    ("config", "weights", "told"),
    [
        ({"vocab_size": 100}, {}, "vocab_size is 100, must be the target's 128"),
        ({"num_hidden_layers": 2}, {}, "missing: layers.0.hidden_norm.weight"),
        ({"eagle_config": {"norm_before_fc": True}}, {}, "1 missing: input_norm.weight"),
        ({"norm_before_fc": True, "fc_norm": True}, {}, "fc_norm is True, supported: False"),
        ({"target_hidden_size": 32}, {}, "target_hidden_size is 32, the target's hidden_size is 64"),
        (
            {"eagle_aux_hidden_state_layer_ids": None},
            {},
            r"layer_ids is \[2, 1, -1\], must be a list of layers of the target, 0 to 2",
        ),
        ({"architectures": ["Eagle3DeepseekV3ForCausalLM"]}, {}, "DeepseekV3ForCausalLM"),
        (
            {},
            {"fc.weight": np.zeros((H, 2 * H), np.float32)},
            r"fc.weight in .* is \[64, 128\], must be \[64, 192\] for 3 hidden states",
        ),
        ({}, {"d2t": THIRD["d2t"] + 90}, "d2t in .* gives the token ids .*, must be those of the target's 128 tokens"),
        ({}, {"d2t": None}, "d2t in .* is missing, must be 40 integers"),
        ({}, {"midlayer.hidden_norm.weight": None}, "1 missing: midlayer.hidden_norm.weight"),
        ({}, {"norm.weight": np.zeros(32, np.float32)}, r"norm.weight is \[32\], must be \[64\]"),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8},
            {},
            "the draft head .*: tensor_parallel_size is 2",
        ),
    ],
)
def test_a_head_that_does_not_fit_is_refused_with_names_and_sizes(tmp_path, config, weights, told):
    weights = {name: value for name, value in {**THIRD, **weights}.items() if value is not None}
    directory = write(tmp_path / "head", {**CONFIG_3, **config}, weights)
    target = goldens.load(TARGET, tensor_parallel_size=2)[0]
    with pytest.raises((ConfigError, ModelLoadError), match=told):
        eagle.make(directory, target, is_third=True, num_drafts=3, tensor_parallel_size=2).load(make_mesh(2), SILENT)


@pytest.mark.slow
def test_random_weights_have_the_shapes_of_a_head(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG_3))
    target = goldens.load(TARGET, tensor_parallel_size=2)[0]
    options = {"num_drafts": 2, "tensor_parallel_size": 2}
    dummy = eagle.make(tmp_path, target, is_third=True, load_format="dummy", **options)
    real = eagle.make(write(tmp_path / "head", CONFIG_3, THIRD), target, is_third=True, **options)
    found, expected = ({path: leaf.shape for path, leaf in parameters(d.load(make_mesh(2), SILENT))} for d in (dummy, real))
    assert found == expected
