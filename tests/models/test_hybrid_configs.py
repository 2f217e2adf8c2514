"""Reading config.json files as the publishers of hybrid models write them."""

import json

import pytest

from jaxllm.errors import ConfigError, ModelLoadError
from jaxllm.model_parts import MLP, Attention, KimiDeltaAttention, LatentAttention, Mamba2, MoE, ShortConv
from jaxllm.models.load_config import load_model_config
from jaxllm.quantization.formats.fp8 import Fp8
from jaxllm.quantization.formats.fp8_experts import Fp8Experts

LFM2 = {
    "architectures": ["Lfm2ForCausalLM"],
    "block_ff_dim": 12288,
    "full_attn_idxs": [2, 5],
    "hidden_size": 2048,
    "norm_eps": 1e-5,
    "num_attention_heads": 32,
    "num_hidden_layers": 6,
    "num_key_value_heads": 8,
    "vocab_size": 65536,
}
GRANITE = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "hidden_size": 1536,
    "intermediate_size": 512,
    "layer_types": ["mamba", "attention", "mamba"],
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_heads": 48,
    "num_attention_heads": 12,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "num_local_experts": 64,
    "position_embedding_type": "nope",
    "vocab_size": 100352,
}
NEMOTRON = {
    "architectures": ["NemotronHForCausalLM"],
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEM*E-",
    "mamba_num_heads": 64,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_routed_experts": 128,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 6,
    "num_key_value_heads": 2,
    "time_step_limit": [0.0, float("inf")],
    "vocab_size": 131072,
}

KIMI = {
    "architectures": ["KimiLinearForCausalLM"],
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {"full_attn_layers": [4], "head_dim": 128, "kda_layers": [1, 2, 3], "num_heads": 32},
    "mla_use_nope": True,
    "model_max_length": 4096,
    "moe_intermediate_size": 1024,
    "num_attention_heads": 32,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 4,
    "num_shared_experts": 1,
    "q_lora_rank": None,
    "rope_theta": 10000.0,
    "vocab_size": 163840,
}
LING_3 = {
    "architectures": ["BailingMoeV3ForCausalLM"],
    "gated_attention_proj_granularity_type": "head_wise",
    "head_dim": 128,
    "hidden_size": 1536,
    "intermediate_size": 4608,
    "kda_lower_bound": -5,
    "layer_group_size": 4,
    "moe_intermediate_size": 512,
    "no_kda_lora": True,
    "num_attention_heads": 16,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 6,
    "num_shared_experts": 1,
    "partial_rotary_factor": 0.5,
    "q_lora_rank": 256,
    "vocab_size": 157184,
}


@pytest.fixture
def read(tmp_path):
    def load(config, **changes):
        (tmp_path / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")
        return load_model_config(tmp_path)

    return load


def test_lfm2(read):
    config = read(LFM2)
    assert [type(layer.attention) for layer in config.layers] == [ShortConv, ShortConv, Attention] * 2
    assert {layer.mlp.width for layer in config.layers} == {8192} and config.tie_word_embeddings
    assert config.layers[2].attention.rope.theta == 1e6
    with pytest.raises(ModelLoadError, match="conv_L_cache is 1, must be at least 2"):
        read(LFM2, conv_L_cache=1)
    with pytest.raises(ModelLoadError, match="layer_types is .*must be 6 of conv or full_attention"):
        read(LFM2, layer_types=["mamba"] * 6)


def test_granite_4(read):
    config = read(GRANITE)
    mamba, attention, _ = (layer.attention for layer in config.layers)
    assert isinstance(mamba, Mamba2) and mamba.num_groups == 1 and mamba.time_step_limit is None
    assert attention.rope is None and read(GRANITE, position_embedding_type="rope").layers[1].attention.rope is not None
    assert all(isinstance(layer.mlp, MoE) and layer.mlp.shared.width == 1024 for layer in config.layers)
    assert config.for_tensor_parallel(4).layers[0].attention.state_shapes == ((3, 12 * 64 + 256), (12, 64, 128))
    with pytest.raises(ConfigError, match="does not divide .*48 heads of Mamba-2"):
        config.for_tensor_parallel(5)
    with pytest.raises(ModelLoadError, match="time_step_limit is .*must be two numbers"):
        read(GRANITE, time_step_limit=[0.1])


def test_nemotron(read):
    config = read(NEMOTRON)
    parts = [next(iter(layer.parts.values())) for layer in config.layers]
    assert [type(part) for part in parts] == [Mamba2, MoE, Mamba2, Attention, MoE, MLP]
    assert parts[0].time_step_limit is None and parts[3].rope is None and not parts[5].gated
    module = read(NEMOTRON, num_nextn_predict_layers=1, mtp_hybrid_override_pattern="*-").next_token
    assert [type(layer.attention or layer.mlp) for layer in module.layers] == [Attention, MLP]
    assert module.norm == "mtp.layers.1.final_layernorm"
    with pytest.raises(ConfigError, match="does not divide .*8 groups of Mamba-2"):
        config.for_tensor_parallel(16)
    with pytest.raises(ModelLoadError, match="hybrid_override_pattern or layers_block_type is 'MX', must consist of M, mamba"):
        read(NEMOTRON, hybrid_override_pattern="MX")
    stored = read(NEMOTRON, quantization_config={"quant_method": "modelopt", "quant_algo": "FP8"})
    assert [type(format) for format in stored.formats] == [Fp8, Fp8Experts]


def test_kimi_linear(read, tmp_path):
    config = read(KIMI)
    assert load_model_config(tmp_path, quantization="int8").formats, (
        "modules that decay states stay plain, each a product of its own"
    )
    linear, *_, latent = (layer.attention for layer in config.layers)
    assert [type(layer.attention) for layer in config.layers] == [KimiDeltaAttention] * 3 + [LatentAttention]
    assert linear.state_shapes == ((3, 384), (128, 128)) and linear.narrow_dim == 128 and linear.lower_bound is None
    assert latent.rope is None and [isinstance(layer.mlp, MoE) for layer in config.layers] == [False, True, True, True]
    assert config.max_position == 4096
    with pytest.raises(ConfigError, match="does not divide .*32 heads of linear attention"):
        config.for_tensor_parallel(3)
    of_k3 = {**KIMI["linear_attn_config"], "gate_lower_bound": -5.0, "use_full_rank_gate": True}
    with pytest.raises(ModelLoadError, match=r"(?s)gate_lower_bound is -5.0.*use_full_rank_gate is True"):
        read(KIMI, linear_attn_config=of_k3)
    with pytest.raises(ModelLoadError, match="routed_expert_hidden_size is 3584, supported: None"):
        read(KIMI, routed_expert_hidden_size=3584)
    with pytest.raises(ModelLoadError, match="layer_types and kda_layers in linear_attn_config are missing"):
        read(KIMI, linear_attn_config={})


def test_ling_3(read):
    config = read(LING_3)
    kinds = [isinstance(layer.attention, KimiDeltaAttention) for layer in config.layers]
    assert kinds == [True] * 3 + [False] * 3, "behind the last whole group all have full attention"
    linear, latent = config.layers[0].attention, config.layers[3].attention
    assert linear.lower_bound == -5.0 and linear.narrow_dim is None
    assert latent.gate.by_head and latent.rope.rotary_dim is None and latent.rope.interleaved
    with pytest.raises(ModelLoadError, match="kda_lower_bound is 5, must be a negative number"):
        read(LING_3, kda_lower_bound=5)
    limited = read(LING_3, expert_swiglu_limit_list=[0, 0, 0, 0, 4, 4, 0], share_expert_swiglu_limit_list=[0, 0, 0, 0, 0, 7.0])
    assert [layer.mlp.clamp for layer in limited.layers] == [None] * 4 + [4.0, 4.0]
    assert [layer.mlp.shared.clamp for layer in limited.layers[2:]] == [None, None, None, 7.0]
    with pytest.raises(ModelLoadError, match="expert_swiglu_limit_list is .*must be a list of 6 numbers, none negative"):
        read(LING_3, expert_swiglu_limit_list=[0, 7.0])
    with pytest.raises(ModelLoadError, match="no_kda_lora is False, supported: True"):
        read(LING_3, no_kda_lora=False)
