"""params.json, the config in Mistral's own form."""

import json

import pytest

from jaxllm.errors import ModelLoadError
from jaxllm.model_parts import MoE, QueryScale
from jaxllm.models.load_config import load_model_config, read_config_json

LARGE_3 = {
    "dim": 7168,
    "n_layers": 61,
    "head_dim": 192,
    "hidden_dim": 16384,
    "n_heads": 128,
    "n_kv_heads": 128,
    "rope_theta": 10000.0,
    "norm_eps": 1e-06,
    "vocab_size": 131072,
    "tied_embeddings": False,
    "max_position_embeddings": 294912,
    "max_seq_len": 1000,
    "llama_4_scaling": {"original_max_position_embeddings": 4096, "beta": 0.1},
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "kv_lora_rank": 512,
    "v_head_dim": 128,
    "yarn": {"original_max_position_embeddings": 8192, "factor": 36, "apply_scale": False, "beta": 32, "alpha": 1},
    "moe": {
        "expert_parallel": 1,
        "route_every_n": 1,
        "first_k_dense_replace": 3,
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "num_expert_groups": 1,
        "num_expert_groups_per_tok": 1,
        "routed_scale": 1.0,
        "expert_hidden_dim": 4096,
        "num_shared_experts": 1,
    },
    "vision_encoder": {"hidden_size": 1664},
}


@pytest.fixture
def read(tmp_path):
    def read_changed(moe=(), yarn=(), **changes):
        yarn = {**LARGE_3["yarn"], **dict(yarn)} if isinstance(yarn, dict | tuple) else yarn
        params = {**LARGE_3, "moe": {**LARGE_3["moe"], **dict(moe)}, "yarn": yarn, **changes}
        (tmp_path / "params.json").write_text(json.dumps(params))
        return load_model_config(tmp_path)

    return read_changed


def test_mistral_large_3(read):
    config = read()
    assert (config.architecture, config.hidden_size, config.vocab_size) == ("MistralLarge3ForCausalLM", 7168, 131072)
    assert (config.bos_token_id, config.eos_token_ids, config.max_position) == (1, (2,), 294912)
    assert [isinstance(layer.mlp, MoE) for layer in config.layers] == [False] * 3 + [True] * 58
    attention, moe = config.layers[-1].attention, config.layers[-1].mlp
    assert attention.query_scale == QueryScale(0.1, 4096, offset=0) and attention.score_scale == 192**-0.5
    assert (attention.num_heads, attention.query_dim, attention.latent_dim, attention.value_dim) == (128, 1536, 512, 128)
    assert attention.rope.interleaved and (attention.rope.factor, attention.rope.attention_factor) == (36, 1.0)
    assert (moe.routing.num_experts, moe.routing.top_k, moe.routing.scoring) == (128, 4, "softmax")
    assert (moe.width, moe.shared.width, config.layers[0].mlp.width) == (4096, 4096, 16384)
    named = {
        name: config.names.named(name)
        for name in ("output.weight", "layers.0.attention.wkv_b.qscale_weight", "layers.4.gate.weight")
    }
    assert list(named.values()) == [
        "lm_head.weight",
        "model.layers.0.self_attn.kv_b_proj.weight_scale",
        "model.layers.4.mlp.gate.weight",
    ]
    others = ("vision_encoder.transformer.layers.0.attention.wq.weight", "layers.0.attention.k_fake_quantizer.qscale_act")
    assert all(config.names.is_other(config.names.named(name)) for name in others)


def test_yarn_multiplies_scores_unless_apply_scale_is_false(read):
    magnitude = 0.1 * 3.58351893845611 + 1  # of the logarithm of 36
    for changes in ({"apply_scale": True}, {"apply_scale": True, "factor": 36.0}):
        attention = read(yarn=changes).layers[0].attention
        assert attention.score_scale == pytest.approx(192**-0.5 * magnitude**2) and attention.rope.attention_factor == 1
    assert read(llama_4_scaling=None).layers[0].attention.query_scale is None


def test_config_json_counts_where_there_is_one(read, tmp_path):
    read()
    (tmp_path / "config.json").write_text("{}")
    assert read_config_json(tmp_path) == {}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"moe": {"num_expert_groups": 8}}, "n_group is 8, supported: 1"),
        ({"moe": {"use_load_balancing_bias": True}}, "use_load_balancing_bias is True"),
        ({"moe": {"num_experts": "many"}}, "n_routed_experts is 'many', must be a positive integer"),
        ({"llama_4_scaling": {"beta": 0.1}}, "original_max_position_embeddings is missing"),
        (
            {"quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": ["TENSOR"]}},
            r"quantization is .*, supported: qformat_weight",
        ),
        ({"quantization": {"qformat_weight": "int3"}}, "quantization is .*, supported: qformat_weight"),
        ({"dim": None}, "params.json: hidden_size is missing"),
        ({"yarn": "linear"}, "params.json: yarn is 'linear', must be an object"),
        ({"yarn": [36]}, "params.json: yarn is .*, must be an object"),
        ({"yarn": {"apply_scale": "false"}}, "params.json: apply_scale is 'false', must be true or false"),
    ],
)
def test_what_is_not_computed_is_refused(read, changes, told):
    with pytest.raises(ModelLoadError, match=told):
        read(**changes)


def test_weights_may_be_quantised_as_others_name_it(read):
    given = {"quant_method": "compressed_tensors", "config_groups": {}, "ignore": ["lm_head"]}
    with pytest.raises(ModelLoadError, match="config_groups|compressed-tensors"):
        read(quantization=given)
    config = read(quantization={"qformat_weight": "fp8_e4m3", "qscheme_act": "NO_SCALES"})
    assert config.formats[0].scale_name == "weight_scale" and not config.formats[0].static_activations
