"""Heads of block diffusion against float64 NumPy, in steps as an engine makes them."""

import json

import numpy as np
import pytest

from jaxllm.errors import ConfigError, ModelLoadError
from jaxllm.layers.parameters import parameters
from jaxllm.parallel.mesh import make_mesh
from jaxllm.progress import SILENT
from jaxllm.speculative import dflash
from tests.helpers import goldens
from tests.speculative.block_diffusion import CONFIG, WINDOW, BlockOracle, head_tensors
from tests.speculative.by_hand import MAX_LENGTH, ByHand, target_hidden_states
from tests.speculative.checkpoints import TARGET, H, V, write

HEAD = head_tensors()
WINDOWED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW, "use_sliding_window": True}
NESTED = {
    "architectures": ["DFlashSpeculator"],
    "speculators_model_type": "dflash",
    "transformer_layer_config": {
        name: value for name, value in CONFIG.items() if name not in ("architectures", "dflash_config")
    },
    "aux_hidden_state_layer_ids": [0, 1],
    "mask_token_id": 127,
    "block_size": 8,
    "draft_vocab_size": 40,
}


@pytest.mark.parametrize(
    ("config", "weights", "size", "is_drawn"),
    [
        (CONFIG, HEAD, 1, False),
        pytest.param({**CONFIG, **WINDOWED}, HEAD, 2, True, marks=pytest.mark.slow),
        pytest.param(NESTED, head_tensors(draft_vocab=40), 1, True, marks=pytest.mark.slow),
    ],
    ids=["plain", "windows tp2 drawn", "speculators"],
)
@pytest.mark.slow
def test_drafts_are_those_of_the_head_alone(tmp_path, config, weights, size, is_drawn):
    directory = write(tmp_path / "head", config, weights)
    target = goldens.load(TARGET, tensor_parallel_size=size)[0]
    options = {"num_drafts": 3, "is_drawn": is_drawn, "tensor_parallel_size": size}
    drafter = dflash.make(directory, target, **options)
    assert drafter.num_lookahead == 4 and drafter.feature_layers == ((0, 1) if "block_size" in config else (1,))
    noise = np.random.default_rng(9).gumbel(size=(MAX_LENGTH, V)) * 3 if is_drawn else None
    states, oracle = target_hidden_states(*goldens.load(TARGET), drafter.feature_layers), BlockOracle(weights, config)
    engine = ByHand(drafter, *goldens.load(TARGET, tensor_parallel_size=size), states, size, noise)
    engine.compare(lambda tokens: oracle.drafts(tokens, states, 3, noise))


@pytest.mark.parametrize(
    ("config", "weights", "told"),
    [
        ({"vocab_size": 100}, {}, "vocab_size is 100, must be the target's 128"),
        ({"hidden_size": 32}, {}, "hidden_size is 32, must be the target's 64"),
        ({"architectures": ["DSparkDraftModel"]}, {}, "architectures has DSparkDraftModel, supported: DFlashDraftModel"),
        ({"model_type": "llama"}, {}, "model_type is 'llama', supported: 'qwen3'"),
        (
            {"dflash_config": {"mask_token_id": 3}},
            {},
            "target_layer_ids is null, must be a list of layers of the target, 0 to 0",
        ),
        (
            {"dflash_config": {"target_layer_ids": [1]}},
            {},
            r"target_layer_ids is \[1\], .*mask_token_id is missing",
        ),
        ({"dflash_config": {"markov_rank": 3}}, {}, "dflash_config has markov_rank, which is not known"),
        ({"dflash_config": {"use_swa": True}}, {}, "use_swa is True, supported: False"),
        ({**WINDOWED, "is_causal": False}, {}, "causal is false with layers that have windows"),
        (
            {"layer_types": ["full_attention"]},
            {},
            "layer_types is .*, must name full_attention or sliding_attention for each of 2",
        ),
        ({"block_size": 3}, {}, "num_speculative_tokens is 3, the draft head .* proposes at most 2: its block_size is 3"),
        (
            {},
            {"fc.weight": np.zeros((H, 2 * H), np.float32)},
            r"fc.weight in .* is \[64, 128\], must be \[64, 64\] for 1 hidden states",
        ),
        ({}, {"hidden_norm.weight": None}, "1 missing: hidden_norm.weight"),
        ({}, {"mask_embedding": np.zeros(H, np.float32)}, "mask_embedding"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_with_names_and_sizes(tmp_path, config, weights, told):
    weights = {name: value for name, value in {**HEAD, **weights}.items() if value is not None}
    directory = write(tmp_path / "head", {**CONFIG, **config}, weights)
    with pytest.raises((ConfigError, ModelLoadError), match=told):
        dflash.make(directory, goldens.load(TARGET)[0], num_drafts=3).load(make_mesh(1), SILENT)


@pytest.mark.slow
def test_random_weights_have_the_shapes_of_a_head(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    target = goldens.load(TARGET, tensor_parallel_size=2)[0]
    options = {"num_drafts": 2, "tensor_parallel_size": 2}
    dummy = dflash.make(tmp_path, target, load_format="dummy", **options)
    real = dflash.make(write(tmp_path / "head", CONFIG, HEAD), target, **options)
    found, expected = ({path: leaf.shape for path, leaf in parameters(d.load(make_mesh(2), SILENT))} for d in (dummy, real))
    assert found == expected
